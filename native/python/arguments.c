#include "core.h"

_Static_assert(sizeof(struct pcc_range) == 24, "a range is a packed <QQQ triple");

int pcc_py_u64(PyObject *object, void *out)
{
    unsigned long long value = PyLong_AsUnsignedLongLong(object);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        return 0;
    }
    *(uint64_t *)out = value;
    return 1;
}

int pcc_py_u32(PyObject *object, void *out)
{
    uint64_t value;
    if (!pcc_py_u64(object, &value)) {
        return 0;
    }
    if (value > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "the number does not fit into 32 bits");
        return 0;
    }
    *(uint32_t *)out = (uint32_t)value;
    return 1;
}

bool pcc_py_require(PyObject *kwargs, char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (kwargs == NULL || PyDict_GetItemString(kwargs, names[i]) == NULL) {
            PyErr_Format(PyExc_TypeError, "missing required keyword-only argument: '%s'", names[i]);
            return false;
        }
    }
    return true;
}

/* NULL, or what is wrong with one triple that must not start before `floor_bytes`. */
static const char *range_fault(const struct pcc_range *range, uint64_t floor_bytes,
                               uint64_t *end_out)
{
    uint64_t address_end;
    if (__builtin_add_overflow(range->offset_bytes, range->length_bytes, end_out) ||
        __builtin_add_overflow(range->address, range->length_bytes, &address_end)) {
        return "ranges: address or offset plus length overflows";
    }
    if (range->length_bytes > 0 && range->address == 0) {
        return "ranges: bytes at address 0";
    }
    if (range->offset_bytes < floor_bytes) {
        return "ranges: offsets must ascend without overlap";
    }
    return NULL;
}

static const char *ranges_fault(const struct pcc_py_ranges *ranges)
{
    if (ranges->view.len % (Py_ssize_t)sizeof(struct pcc_range) != 0) {
        return "ranges: the length is not a multiple of 24 bytes";
    }
    if (ranges->count > PCC_PY_RANGES_MAX) {
        return "ranges: too many";
    }
    if ((uintptr_t)ranges->items % _Alignof(struct pcc_range) != 0) {
        return "ranges: the buffer is not aligned to 8 bytes";
    }
    uint64_t floor_bytes = 0;
    for (uint64_t i = 0; i < ranges->count; i++) {
        const char *fault = range_fault(&ranges->items[i], floor_bytes, &floor_bytes);
        if (fault != NULL) {
            return fault;
        }
    }
    return NULL;
}

int pcc_py_ranges(PyObject *object, void *out)
{
    struct pcc_py_ranges *ranges = out;
    if (object == NULL) { /* a later argument was refused */
        pcc_py_ranges_done(ranges);
        return 1;
    }
    if (PyObject_GetBuffer(object, &ranges->view, PyBUF_SIMPLE) < 0) {
        return 0;
    }
    ranges->items = ranges->view.buf;
    ranges->count = (uint64_t)ranges->view.len / sizeof(struct pcc_range);
    const char *fault = ranges_fault(ranges);
    if (fault != NULL) {
        PyErr_SetString(PyExc_ValueError, fault);
        pcc_py_ranges_done(ranges);
        return 0;
    }
    return Py_CLEANUP_SUPPORTED;
}

void pcc_py_ranges_done(struct pcc_py_ranges *ranges)
{
    PyBuffer_Release(&ranges->view);
    *ranges = (struct pcc_py_ranges){0};
}
