/* Link on GPUs. A driver call may wait for the driver's own locks, so none is made under the GIL.
 */
#include <stdlib.h>
#include <string.h>

#include "link.h"

/* "O&" converter of a CUDA ordinal. */
static int ordinal(PyObject *object, void *out)
{
    uint32_t device;
    if (!pcc_py_u32(object, &device)) {
        return 0;
    }
    if (device >= PCC_DEVICES) {
        PyErr_Format(PyExc_ValueError, "GPU %u: the last one that is supported is %u", device,
                     PCC_DEVICES - 1);
        return 0;
    }
    *(uint32_t *)out = device;
    return 1;
}

static int open_device(struct pcc_client *link, uint32_t device, const char **why_out)
{
    const int result = pcc_client_device_open(link, device);
    if (result == 0) {
        *why_out = pcc_client_device_cannot_pull(link, device);
    }
    return result;
}

PyObject *pcc_py_link_device_open(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device", NULL};
    uint32_t device;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:device_open", names, ordinal, &device)) {
        return NULL;
    }
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    const char *why = "";
    int result;
    PCC_PY_UNLOCKED(result = open_device(link, device, &why));
    PyObject *told = result < 0 ? pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), result, NULL)
                                : PyUnicode_DecodeUTF8(why, (Py_ssize_t)strlen(why), "replace");
    pcc_py_link_leave(self); /* last: the words are the link's */
    return told;
}

/* -- staging ----------------------------------------------------------------------------------- */

PyObject *pcc_py_link_staging(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device", "nbytes", NULL};
    uint32_t device;
    uint64_t length_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:staging", names, ordinal, &device,
                                     pcc_py_u64, &length_bytes)) {
        return NULL;
    }
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    uint64_t address = 0;
    int result;
    PCC_PY_UNLOCKED(result = pcc_client_staging(link, device, length_bytes, &address));
    pcc_py_link_leave(self);
    if (result == -ENOMEM) {
        return PyErr_NoMemory();
    }
    if (result < 0) {
        return pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), result, NULL);
    }
    return PyLong_FromUnsignedLongLong(address);
}

PyObject *pcc_py_link_staging_trim(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    PCC_PY_UNLOCKED(pcc_client_staging_trim(link));
    return pcc_py_link_leave_with(self, 0);
}

PyObject *pcc_py_link_stage(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device", "stream", "copies", "aside", NULL};
    uint32_t device;
    uint64_t stream;
    struct pcc_py_ranges copies = {0};
    int aside = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&|$p:stage", names, ordinal, &device,
                                     pcc_py_u64, &stream, pcc_py_device_copies, &copies, &aside)) {
        return NULL;
    }
    PyObject *done = NULL;
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link != NULL) {
        int result;
        PCC_PY_UNLOCKED(result = pcc_client_stage(link, device, stream, copies.copies, copies.count,
                                                  aside != 0));
        done = pcc_py_link_leave_with(self, result);
    }
    pcc_py_ranges_done(&copies);
    return done;
}

/* -- order ------------------------------------------------------------------------------------- */

PyObject *pcc_py_link_mark(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", "device", "stream", "pull", "aside", NULL};
    uint64_t snapshot, stream;
    uint32_t device;
    int pull = 0;
    int aside = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&|$pp:mark", names, pcc_py_u64, &snapshot,
                                     ordinal, &device, pcc_py_u64, &stream, &pull, &aside) ||
        !pcc_py_require(kwargs, &names[3], 1)) {
        return NULL;
    }
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    int result;
    PCC_PY_UNLOCKED(result =
                        pcc_client_mark(link, snapshot, device, stream, pull != 0, aside != 0));
    return pcc_py_link_leave_with(self, result);
}

PyObject *pcc_py_link_hold(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", "device", "stream", "deadline_ns", NULL};
    uint64_t snapshot, stream, deadline_ns;
    uint32_t device;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&O&:hold", names, pcc_py_u64, &snapshot,
                                     ordinal, &device, pcc_py_u64, &stream, pcc_py_u64,
                                     &deadline_ns)) {
        return NULL;
    }
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    bool ok = true;
    bool ready = false;
    while (ok && !ready && pcc_now_ns() < deadline_ns) {
        uint64_t end_ns = pcc_py_link_slice_end(deadline_ns);
        PCC_PY_UNLOCKED(ready = pcc_client_hold_ready(link, snapshot, device, end_ns));
        ok = ready || pcc_py_link_goes_on(self);
    }
    int result = 0;
    if (ok) {
        PCC_PY_UNLOCKED(result = pcc_client_hold(link, snapshot, device, stream, deadline_ns));
    }
    pcc_py_link_leave(self);
    if (!ok) {
        return NULL;
    }
    if (result < 0 && result != -ETIMEDOUT) {
        return pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), result, NULL);
    }
    return PyBool_FromLong(result == 0);
}

PyObject *pcc_py_link_reached(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", NULL};
    uint64_t snapshot;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:reached", names, pcc_py_u64, &snapshot)) {
        return NULL;
    }
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    bool reached = false;
    PCC_PY_UNLOCKED(reached = pcc_client_reached(link, snapshot));
    pcc_py_link_leave(self);
    return PyBool_FromLong(reached);
}

PyObject *pcc_py_link_capturing(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device", "stream", NULL};
    uint32_t device;
    uint64_t stream;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:capturing", names, ordinal, &device,
                                     pcc_py_u64, &stream)) {
        return NULL;
    }
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    bool capturing = false;
    int result;
    PCC_PY_UNLOCKED(result = pcc_client_capturing(link, device, stream, &capturing));
    pcc_py_link_leave(self);
    if (result < 0) {
        return pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), result, NULL);
    }
    return PyBool_FromLong(capturing);
}

/* -- pull -------------------------------------------------------------------------------------- */

/* Frees `bytes`. */
static PyObject *taken(uint8_t *bytes, uint64_t length_bytes)
{
    PyObject *made = PyBytes_FromStringAndSize((const char *)bytes, (Py_ssize_t)length_bytes);
    free(bytes);
    return made;
}

PyObject *pcc_py_link_expose(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device_ranges", "device_bytes", NULL};
    struct pcc_py_ranges ranges = {0};
    uint64_t device_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:expose", names, pcc_py_device_ranges,
                                     &ranges, pcc_py_u64, &device_bytes)) {
        return NULL;
    }
    PyObject *exposure = NULL;
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link != NULL) {
        uint8_t *bytes = NULL;
        uint64_t length_bytes = 0;
        int result;
        PCC_PY_UNLOCKED(result = pcc_client_expose(link, ranges.device_items, ranges.count,
                                                   device_bytes, &bytes, &length_bytes));
        pcc_py_link_leave(self);
        exposure = result < 0 ? pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), result, NULL)
                              : taken(bytes, length_bytes);
    }
    pcc_py_ranges_done(&ranges);
    return exposure;
}

PyObject *pcc_py_link_exposure_holds(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    bool holds;
    PCC_PY_UNLOCKED(holds = pcc_client_exposure_holds(link));
    pcc_py_link_leave(self);
    return PyBool_FromLong(holds);
}
