#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/pcc_thread.h"
#include "io/pcc_io.h"

struct measure {
    struct pcc_io *io;
    const uint8_t *bytes;
    uint64_t length_bytes;
    uint64_t chunk_bytes;
    _Atomic uint64_t next;
    _Atomic int error;
};

static void *write_chunks(void *argument)
{
    struct measure *measure = argument;

    for (;;) {
        const uint64_t at =
            atomic_fetch_add_explicit(&measure->next, measure->chunk_bytes, memory_order_relaxed);
        if (at >= measure->length_bytes)
            return NULL;
        const int error =
            pcc_io_write_all(measure->io, measure->bytes,
                             pcc_piece_bytes(measure->length_bytes, at, measure->chunk_bytes), at);
        if (error != 0) /* any of several: read when all threads have ended */
            atomic_store_explicit(&measure->error, error, memory_order_relaxed);
    }
}

static int overwrite(struct measure *measure, uint32_t threads, uint64_t *ns_out)
{
    const uint64_t start = pcc_now_ns();

    pcc_threads_run(threads, write_chunks, measure, "pcc-measure");
    int result = atomic_load_explicit(&measure->error, memory_order_relaxed);
    if (result == 0)
        result = pcc_io_flush(measure->io);
    *ns_out = pcc_now_ns() - start;
    return result;
}

int pcc_io_measure(int fd, const struct pcc_io_options *options, uint64_t length_bytes,
                   uint64_t chunk_bytes, uint32_t threads, uint64_t *ns_out)
{
    struct measure measure = {.length_bytes = length_bytes, .chunk_bytes = chunk_bytes};

    if (chunk_bytes == 0 || chunk_bytes % PCC_IO_ALIGN != 0 || length_bytes % PCC_IO_ALIGN != 0) {
        (void)close(fd);
        return -EINVAL;
    }
    int result = pcc_io_open(fd, options, &measure.io);
    if (result != 0)
        return result;
    uint64_t *bytes = aligned_alloc(PCC_IO_ALIGN, chunk_bytes);
    measure.bytes = (const uint8_t *)bytes;
    result = bytes == NULL ? -ENOMEM : length_bytes > measure.io->size_bytes ? -EINVAL : 0;
    /* Numbers that no layer below can compress. */
    for (uint64_t i = 0, x = 1; result == 0 && i < chunk_bytes / sizeof *bytes; i++)
        bytes[i] = x = x * 6364136223846793005ull + 1442695040888963407ull;
    if (result == 0)
        result = overwrite(&measure, threads, ns_out);
    free(bytes);
    pcc_io_close(measure.io);
    return result;
}
