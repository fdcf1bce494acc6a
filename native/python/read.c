#include "read.h"

#include "disk/pcc_load.h"

#define CHUNK_BYTES_DEFAULT (4u << 20)
#define THREADS_DEFAULT 2u
#define THREADS_MAX 64u
static int sink_nothing(void *context, const void *bytes, uint64_t offset_bytes,
                        uint64_t length_bytes)
{
    (void)context;
    (void)bytes;
    (void)offset_bytes;
    (void)length_bytes;
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
        uint32_t chunk_bytes = pcc_load_chunk_bytes(load, 0); /* no more than what is asked for */
        PCC_PY_UNLOCKED(result = pcc_load_ranges(load, &target, 1, chunk_bytes, 0));
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
    uint64_t end_bytes = ranges->count ? pcc_range_end(&ranges->items[ranges->count - 1]) : 0;
    if (!within_payload(load, end_bytes, 0)) {
        load_leave(self, load);
        return NULL;
    }
    int result;
    uint32_t whole_bytes = pcc_load_chunk_bytes(load, chunk_bytes);
    PCC_PY_UNLOCKED(result =
                        pcc_load_ranges(load, ranges->items, ranges->count, whole_bytes, threads));
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
    uint32_t chunk_bytes = pcc_load_chunk_bytes(load, CHUNK_BYTES_DEFAULT);
    int result = 0;
    if (payload_bytes > 0) {
        PCC_PY_UNLOCKED(result = pcc_load_stream(load, 0, payload_bytes, chunk_bytes, threads,
                                                 sink_nothing, NULL));
    }
    load_leave(self, load);
    return pcc_py_none_or_raise(pcc_py_state_of(Py_TYPE(self)), result);
}
