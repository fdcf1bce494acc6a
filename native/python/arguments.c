#include "core.h"
#include "disk/pcc_format.h"
#include "io/pcc_io.h"

#include <string.h>

/* What is packed, is what C takes: the checks below read every kind as its leading triple. */
#define TRIPLE(type, offset)                                                                       \
    _Static_assert(offsetof(type, address) == 0 && offsetof(type, offset) == 8 &&                  \
                       offsetof(type, length_bytes) == 16,                                         \
                   "begins with a packed <QQQ triple")
TRIPLE(struct pcc_range, offset_bytes);
TRIPLE(struct pcc_device_range, offset_bytes);
TRIPLE(struct pcc_device_copy, staging_offset_bytes);
_Static_assert(sizeof(struct pcc_range) == 24 && sizeof(struct pcc_device_copy) == 24, "<QQQ");
_Static_assert(sizeof(struct pcc_device_range) == 32, "<QQQII");

int pcc_py_u64(PyObject *object, void *out)
{
    unsigned long long value = PyLong_AsUnsignedLongLong(object);
    if (value == (unsigned long long)-1 && PyErr_Occurred())
        return 0;
    *(uint64_t *)out = value;
    return 1;
}

int pcc_py_seconds(PyObject *object, void *out)
{
    const double seconds = PyFloat_AsDouble(object);
    if (seconds == -1.0 && PyErr_Occurred())
        return 0;
    if (!(seconds >= 0 && seconds < 1e9)) {
        PyErr_SetString(PyExc_ValueError, "seconds are from 0 to 1e9");
        return 0;
    }
    *(uint64_t *)out = (uint64_t)(seconds * 1e9);
    return 1;
}

int pcc_py_u32(PyObject *object, void *out)
{
    uint64_t value;
    if (!pcc_py_u64(object, &value))
        return 0;
    if (value > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "the number does not fit into 32 bits");
        return 0;
    }
    *(uint32_t *)out = (uint32_t)value;
    return 1;
}

int pcc_py_bool(PyObject *object, void *out)
{
    const int truth = PyObject_IsTrue(object);
    *(bool *)out = truth > 0;
    return truth >= 0;
}

int pcc_py_id(PyObject *object, void *out)
{
    if (!PyBytes_Check(object) || PyBytes_Size(object) != PCC_UUID_BYTES) {
        PyErr_SetString(PyExc_ValueError, "an id is 16 bytes");
        return 0;
    }
    memcpy(out, PyBytes_AsString(object), PCC_UUID_BYTES);
    return 1;
}

int pcc_py_engine(PyObject *object, void *out)
{
    Py_ssize_t length = 0;
    const char *name = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &length) : NULL;
    if (name != NULL && strlen(name) == (size_t)length && pcc_io_engine_named(name, out) == 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "there is no engine %R", object);
    return 0;
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

/* NULL, or what is wrong with one (address, offset, length) that must not start before
 * `floor_bytes`. */
static const char *triple_fault(const uint64_t *triple, uint64_t floor_bytes, uint64_t *end_out)
{
    const uint64_t address = triple[0], offset_bytes = triple[1], length_bytes = triple[2];
    uint64_t address_end;
    if (__builtin_add_overflow(offset_bytes, length_bytes, end_out) ||
        __builtin_add_overflow(address, length_bytes, &address_end))
        return "ranges: address or offset plus length overflows";
    if (length_bytes > 0 && address == 0)
        return "ranges: bytes at address 0";
    if (offset_bytes < floor_bytes)
        return "ranges: offsets must ascend without overlap";
    return NULL;
}

static const char *device_fault(const struct pcc_device_range *range)
{
    if (range->device >= PCC_DEVICES)
        return "ranges: the device's number is too large";
    return range->reserved != 0 ? "ranges: the last field must be 0" : NULL;
}

static const char *ranges_fault(const struct pcc_py_ranges *ranges, size_t item_bytes)
{
    const bool on_device = item_bytes == sizeof(struct pcc_device_range);
    if ((size_t)ranges->view.len % item_bytes != 0) {
        return on_device ? "ranges: the length is not a multiple of 32 bytes"
                         : "ranges: the length is not a multiple of 24 bytes";
    }
    if (ranges->count > PCC_PY_RANGES_MAX)
        return "ranges: too many";
    if ((uintptr_t)ranges->view.buf % _Alignof(struct pcc_range) != 0)
        return "ranges: the buffer is not aligned to 8 bytes";
    uint64_t floor_bytes = 0;
    for (uint64_t i = 0; i < ranges->count; i++) {
        const uint64_t *triple = ranges->view.buf;
        const char *fault =
            triple_fault(triple + i * (item_bytes / sizeof(*triple)), floor_bytes, &floor_bytes);
        if (fault == NULL && on_device)
            fault = device_fault(&ranges->device_items[i]);
        if (fault != NULL)
            return fault;
    }
    return NULL;
}

static int convert(PyObject *object, struct pcc_py_ranges *ranges, size_t item_bytes)
{
    if (object == NULL) { /* a later argument was refused */
        pcc_py_ranges_done(ranges);
        return 1;
    }
    if (PyObject_GetBuffer(object, &ranges->view, PyBUF_SIMPLE) < 0)
        return 0;
    ranges->items = ranges->view.buf;
    ranges->count = (uint64_t)ranges->view.len / item_bytes;
    const char *fault = ranges_fault(ranges, item_bytes);
    if (fault != NULL) {
        PyErr_SetString(PyExc_ValueError, fault);
        pcc_py_ranges_done(ranges);
        return 0;
    }
    return Py_CLEANUP_SUPPORTED;
}

int pcc_py_ranges(PyObject *object, void *out)
{
    return convert(object, out, sizeof(struct pcc_range));
}

int pcc_py_device_ranges(PyObject *object, void *out)
{
    return convert(object, out, sizeof(struct pcc_device_range));
}

int pcc_py_device_copies(PyObject *object, void *out)
{
    return convert(object, out, sizeof(struct pcc_device_copy));
}

void pcc_py_ranges_done(struct pcc_py_ranges *ranges)
{
    PyBuffer_Release(&ranges->view);
    *ranges = (struct pcc_py_ranges){0};
}
