#include "read.h"

#include <string.h>

#include "pcc_load.h"

#define CHUNK_BYTES_DEFAULT (4u << 20)
#define CHUNK_BYTES_MAX (256u << 20)
#define THREADS_DEFAULT 2u
#define THREADS_MAX 64u
/* Ranges closer than this are read in one stream: seeking would cost more than reading the gap. */
#define GAP_BYTES_MAX (4ull << 20)

/* A chunk must be whole blocks and whole direct-I/O units. */
static uint32_t chunk_bytes_for(const struct pcc_load *load, uint32_t wanted_bytes)
{
    uint64_t unit = pcc_load_block_bytes(load);
    while (unit % PCC_IO_ALIGN != 0) {
        unit += pcc_load_block_bytes(load);
    }
    uint64_t bytes = wanted_bytes < CHUNK_BYTES_MAX ? wanted_bytes : CHUNK_BYTES_MAX;
    return (uint32_t)(bytes <= unit ? unit : bytes / unit * unit);
}

static int sink_bytes(void *context, const void *bytes, uint64_t offset_bytes,
                      uint64_t length_bytes)
{
    const struct pcc_range *target = context;
    memcpy((char *)(uintptr_t)target->address + (offset_bytes - target->offset_bytes), bytes,
           length_bytes);
    return 0;
}

struct scatter {
    const struct pcc_range *items;
    uint64_t count;
};

static uint64_t range_end(const struct pcc_range *range)
{
    return range->offset_bytes + range->length_bytes;
}

/* The first range that ends behind offset_bytes. */
static uint64_t scatter_find(const struct scatter *scatter, uint64_t offset_bytes)
{
    uint64_t low = 0;
    uint64_t high = scatter->count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (range_end(&scatter->items[middle]) > offset_bytes) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

static int sink_scatter(void *context, const void *bytes, uint64_t offset_bytes,
                        uint64_t length_bytes)
{
    const struct scatter *scatter = context;
    uint64_t end_bytes = offset_bytes + length_bytes;
    for (uint64_t i = scatter_find(scatter, offset_bytes);
         i < scatter->count && scatter->items[i].offset_bytes < end_bytes; i++) {
        const struct pcc_range *range = &scatter->items[i];
        uint64_t from = range->offset_bytes > offset_bytes ? range->offset_bytes : offset_bytes;
        uint64_t to = range_end(range) < end_bytes ? range_end(range) : end_bytes;
        memcpy((char *)(uintptr_t)range->address + (from - range->offset_bytes),
               (const char *)bytes + (from - offset_bytes), to - from);
    }
    return 0;
}

static int sink_nothing(void *context, const void *bytes, uint64_t offset_bytes,
                        uint64_t length_bytes)
{
    (void)context;
    (void)bytes;
    (void)offset_bytes;
    (void)length_bytes;
    return 0;
}

/* Streams every run of near ranges. */
static int read_runs(struct pcc_load *load, const struct pcc_py_ranges *ranges,
                     uint32_t chunk_bytes, uint32_t threads)
{
    uint64_t first = 0;
    while (first < ranges->count) {
        uint64_t start_bytes = ranges->items[first].offset_bytes;
        uint64_t end_bytes = range_end(&ranges->items[first]);
        uint64_t next = first + 1;
        while (next < ranges->count &&
               ranges->items[next].offset_bytes - end_bytes <= GAP_BYTES_MAX) {
            end_bytes = range_end(&ranges->items[next++]);
        }
        struct scatter scatter = {.items = &ranges->items[first], .count = next - first};
        int result = 0;
        if (end_bytes > start_bytes) {
            result = pcc_load_stream(load, start_bytes, end_bytes - start_bytes, chunk_bytes,
                                     threads, sink_scatter, &scatter);
        }
        if (result != 0) {
            return result;
        }
        first = next;
    }
    return 0;
}

static bool within_payload(const struct pcc_load *load, uint64_t offset_bytes,
                           uint64_t length_bytes)
{
    uint64_t payload_bytes = pcc_load_entry(load)->payload_bytes;
    if (offset_bytes <= payload_bytes && length_bytes <= payload_bytes - offset_bytes) {
        return true;
    }
    PyErr_Format(PyExc_ValueError, "bytes %llu..+%llu lie outside of the payload of %llu bytes",
                 (unsigned long long)offset_bytes, (unsigned long long)length_bytes,
                 (unsigned long long)payload_bytes);
    return false;
}

static bool threads_fit(uint32_t threads)
{
    if (threads > THREADS_MAX) {
        PyErr_Format(PyExc_ValueError, "threads must be at most %u", THREADS_MAX);
        return false;
    }
    return true;
}

/* NULL with an exception; else the volume has one more user, gone with load_leave(). */
static struct pcc_load *load_enter(PyObject *self, uint64_t sequence)
{
    struct pcc_volume *volume = pcc_py_enter((struct pcc_py_object *)self);
    if (volume == NULL) {
        return NULL;
    }
    struct pcc_load *load = NULL;
    int result;
    PCC_PY_UNLOCKED(result = pcc_load_open(volume, sequence, &load));
    if (result < 0) {
        pcc_py_leave((struct pcc_py_object *)self);
        pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), result, NULL);
        return NULL;
    }
    return load;
}

static void load_leave(PyObject *self, struct pcc_load *load)
{
    PCC_PY_UNLOCKED(pcc_load_close(load));
    pcc_py_leave((struct pcc_py_object *)self);
}

PyObject *pcc_py_volume_read(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "offset", "length", NULL};
    uint64_t sequence, offset_bytes, length_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&:read", names, pcc_py_u64, &sequence,
                                     pcc_py_u64, &offset_bytes, pcc_py_u64, &length_bytes)) {
        return NULL;
    }
    struct pcc_load *load = load_enter(self, sequence);
    if (load == NULL) {
        return NULL;
    }
    PyObject *bytes = within_payload(load, offset_bytes, length_bytes)
                          ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length_bytes)
                          : NULL;
    int result = 0;
    if (bytes != NULL && length_bytes > 0) {
        struct pcc_range target = {
            .address = (uintptr_t)PyBytes_AsString(bytes),
            .offset_bytes = offset_bytes,
            .length_bytes = length_bytes,
        };
        uint32_t chunk_bytes = chunk_bytes_for(load, 0); /* no more than what is asked for */
        PCC_PY_UNLOCKED(result = pcc_load_stream(load, offset_bytes, length_bytes, chunk_bytes, 0,
                                                 sink_bytes, &target));
    }
    load_leave(self, load);
    if (result != 0) {
        Py_DECREF(bytes);
        return pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), result, NULL);
    }
    return bytes;
}

static PyObject *read_into(PyObject *self, uint64_t sequence, const struct pcc_py_ranges *ranges,
                           uint32_t threads, uint32_t chunk_bytes)
{
    struct pcc_load *load = load_enter(self, sequence);
    if (load == NULL) {
        return NULL;
    }
    uint64_t end_bytes = ranges->count ? range_end(&ranges->items[ranges->count - 1]) : 0;
    if (!within_payload(load, end_bytes, 0)) {
        load_leave(self, load);
        return NULL;
    }
    int result;
    uint32_t whole_bytes = chunk_bytes_for(load, chunk_bytes);
    PCC_PY_UNLOCKED(result = read_runs(load, ranges, whole_bytes, threads));
    load_leave(self, load);
    return pcc_py_none_or_raise(pcc_py_state_of(Py_TYPE(self)), result);
}

PyObject *pcc_py_volume_read_into(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "ranges", "threads", "chunk_bytes", NULL};
    uint64_t sequence;
    uint32_t threads = THREADS_DEFAULT;
    uint32_t chunk_bytes = CHUNK_BYTES_DEFAULT;
    struct pcc_py_ranges ranges = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|O&O&:read_into", names, pcc_py_u64,
                                     &sequence, pcc_py_ranges, &ranges, pcc_py_u32, &threads,
                                     pcc_py_u32, &chunk_bytes)) {
        return NULL;
    }
    PyObject *result =
        threads_fit(threads) ? read_into(self, sequence, &ranges, threads, chunk_bytes) : NULL;
    pcc_py_ranges_done(&ranges);
    return result;
}

PyObject *pcc_py_volume_verify(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "threads", NULL};
    uint64_t sequence;
    uint32_t threads = THREADS_DEFAULT;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|O&:verify", names, pcc_py_u64, &sequence,
                                     pcc_py_u32, &threads) ||
        !threads_fit(threads)) {
        return NULL;
    }
    struct pcc_load *load = load_enter(self, sequence);
    if (load == NULL) {
        return NULL;
    }
    uint64_t payload_bytes = pcc_load_entry(load)->payload_bytes;
    uint32_t chunk_bytes = chunk_bytes_for(load, CHUNK_BYTES_DEFAULT);
    int result = 0;
    if (payload_bytes > 0) {
        PCC_PY_UNLOCKED(result = pcc_load_stream(load, 0, payload_bytes, chunk_bytes, threads,
                                                 sink_nothing, NULL));
    }
    load_leave(self, load);
    return pcc_py_none_or_raise(pcc_py_state_of(Py_TYPE(self)), result);
}
