/* Steps "registration" and "bandwidth": what pinning a memfd costs, and how fast copies are. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "probe.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#define SEGMENT_BYTES (256 * MIB) /* the daemon's segments */

/* KiB of the mapping that huge pages make up, by /proc/self/smaps; -1: unknown. */
static long huge_kib(const char *bytes)
{
    char line[256];
    long kib = -1, found;
    bool is_here = false;
    FILE *file = fopen("/proc/self/smaps", "re");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        unsigned long long start, end;
        if (sscanf(line, "%llx-%llx ", &start, &end) == 2)
            is_here = start <= (uintptr_t)bytes && (uintptr_t)bytes < end;
        else if (is_here && sscanf(line, "ShmemPmdMapped: %ld kB", &found) == 1)
            kib = found;
    }
    if (file != NULL)
        fclose(file);
    return kib;
}

static void say_of(const char *kind, size_t length, const char *what, double value)
{
    char key[96];
    if (length >= GIB)
        snprintf(key, sizeof(key), "%s_%zugib_%s", kind, length / GIB, what);
    else
        snprintf(key, sizeof(key), "%s_%zumib_%s", kind, length / MIB, what);
    say_number(key, value);
}

static double copy_rate(CUdeviceptr source, char *host, size_t length, CUstream stream)
{
    double start_s = now_s();
    for (size_t at = 0; at < length; at += CHUNK_BYTES)
        CU(cu.copy_to_host(host + at, source, CHUNK_BYTES, stream));
    CU(cu.stream_synchronize(stream));
    return (double)length / (now_s() - start_s) * 1e-9;
}

/* Registers in pieces, copies into all of it, and lets go. */
static void measure_registration(const char *kind, char *bytes, size_t length, size_t piece)
{
    static CUdeviceptr source;
    static CUstream stream;
    if (source == 0) {
        source = gpu_memory(CHUNK_BYTES);
        stream = gpu_stream();
    }
    double start_s = now_s();
    for (size_t at = 0; at < length; at += piece)
        CU(cu.host_register(bytes + at, piece, CU_MEMHOSTREGISTER_PORTABLE));
    say_of(kind, length, "register_ms", (now_s() - start_s) * 1e3);
    (void)copy_rate(source, bytes, length, stream);
    say_of(kind, length, "copy_gb_s", copy_rate(source, bytes, length, stream));
    start_s = now_s();
    for (size_t at = 0; at < length; at += piece)
        CU(cu.host_unregister(bytes + at));
    say_of(kind, length, "unregister_ms", (now_s() - start_s) * 1e3);
}

static void measure_length(size_t length)
{
    int descriptor;
    size_t piece = length < SEGMENT_BYTES ? length : SEGMENT_BYTES;
    double start_s = now_s();
    char *bytes = segment(length, &descriptor);
    say_of("small_pages", length, "touch_ms", (now_s() - start_s) * 1e3);
    measure_registration("small_pages", bytes, length, length);
    measure_registration("small_pages_in_segments", bytes, length, piece);
    (void)madvise(bytes, length, MADV_HUGEPAGE);
    start_s = now_s();
    int error = madvise(bytes, length, MADV_COLLAPSE) == 0 ? 0 : errno;
    say_of("huge_pages", length, "collapse_ms", (now_s() - start_s) * 1e3);
    say_of("huge_pages", length, "collapse_errno", error);
    say_of("huge_pages", length, "mapped_kib", (double)huge_kib(bytes));
    measure_registration("huge_pages", bytes, length, length);
    drop_segment(bytes, length, descriptor);
}

void step_registration(void)
{
    static const size_t wanted[] = {1 * GIB, 4 * GIB}, small[] = {16 * MIB, 64 * MIB};
    (void)gpu_begin();
    for (int i = 0; i < 2; i++) {
        size_t length = options.is_small ? small[i] : wanted[i];
        if (length > available_bytes() / 2) {
            say_of("skipped", length, "no_memory", 1);
            continue;
        }
        measure_length(length);
    }
}

/* -- bandwidth ----------------------------------------------------------------------------------
 */

struct way {
    const char *name;
    char *host;
    bool to_host;
};

static void copy(const struct way *way, size_t at, CUdeviceptr device, size_t length,
                 CUstream stream)
{
    if (way->to_host)
        CU(cu.copy_to_host(way->host + at, device, length, stream));
    else
        CU(cu.copy_to_device(device, way->host + at, length, stream));
}

/* Single copies of one size, each waited for; the median of the rates. */
static void measure_single(const struct way *way, CUdeviceptr device, size_t length,
                           CUstream stream)
{
    double rates[64];
    size_t count = 0;
    char key[96];
    double start_s = now_s();
    copy(way, 0, device, length, stream);
    CU(cu.stream_synchronize(stream));
    while (count < 64 && (count < 5 || now_s() - start_s < 0.15)) {
        double begin_s = now_s();
        copy(way, 0, device, length, stream);
        CU(cu.stream_synchronize(stream));
        rates[count++] = (double)length / (now_s() - begin_s) * 1e-9;
    }
    snprintf(key, sizeof(key), "%s_%zumib_gb_s", way->name, length / MIB);
    say_spread(key, rates, count);
}

/* As the daemon copies: chunks one behind the other, on one stream or on two in turn. */
static void measure_chunked(const struct way *way, CUdeviceptr device, size_t length,
                            size_t host_bytes, unsigned stream_count)
{
    CUstream streams[2] = {gpu_stream(), gpu_stream()};
    double rates[5];
    char key[96];
    for (size_t run = 0; run < 5; run++) {
        double start_s = now_s();
        for (size_t at = 0; at < length; at += CHUNK_BYTES)
            copy(way, at % host_bytes, device + at, CHUNK_BYTES,
                 streams[at / CHUNK_BYTES % stream_count]);
        for (unsigned i = 0; i < stream_count; i++)
            CU(cu.stream_synchronize(streams[i]));
        rates[run] = (double)length / (now_s() - start_s) * 1e-9;
    }
    snprintf(key, sizeof(key), "%s_chunked_%u_streams_gb_s", way->name, stream_count);
    say_spread(key, rates, 5);
}

void step_bandwidth(void)
{
    size_t length = options.is_small ? 64 * MIB : GIB;
    size_t host_bytes = options.is_small ? 64 * MIB : 256 * MIB;
    (void)gpu_begin();
    CUdeviceptr device = gpu_memory(length);
    CUstream stream = gpu_stream();
    char *pinned = pinned_segment(host_bytes);
    int descriptor;
    char *pageable = segment(host_bytes, &descriptor);
    const struct way ways[] = {{"pinned_to_host", pinned, true},
                               {"pinned_to_device", pinned, false},
                               {"pageable_to_host", pageable, true},
                               {"pageable_to_device", pageable, false}};
    for (size_t i = 0; i < 4; i++) {
        for (size_t size = MIB; size <= host_bytes; size *= 4)
            measure_single(&ways[i], device, size, stream);
        measure_chunked(&ways[i], device, length, host_bytes, 1);
        if (i < 2)
            measure_chunked(&ways[i], device, length, host_bytes, 2);
    }
}
