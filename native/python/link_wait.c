#include "link.h"

/* Waits return to Python this often, for signals and for close() by another thread. */
#define SLICE_NS 50000000ull

/* -- waits ------------------------------------------------------------------------------------- */

struct wait {
    uint64_t id;
    uint64_t deadline_ns;
};

static bool wait_parse(PyObject *args, PyObject *kwargs, char **names, struct wait *out)
{
    return PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&", names, pcc_py_u64, &out->id,
                                       pcc_py_u64, &out->deadline_ns);
}

bool pcc_py_link_goes_on(PyObject *self)
{
    if (PyErr_CheckSignals() < 0) {
        return false;
    }
    if (((struct pcc_py_object *)self)->lease.closed) {
        PyErr_SetString(PyExc_ValueError, "this Link was closed during the call");
        return false;
    }
    return true;
}

uint64_t pcc_py_link_slice_end(uint64_t deadline_ns)
{
    uint64_t end_ns = pcc_now_ns() + SLICE_NS;
    return end_ns < deadline_ns ? end_ns : deadline_ns;
}

/* Sets *code_out to 0 or a negative code; false with an exception. */
static bool wait_snapshot(PyObject *self, const struct wait *wait, enum pcc_wait_for what,
                          int *code_out)
{
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return false;
    }
    bool ok = true;
    uint64_t end_ns;
    do {
        end_ns = pcc_py_link_slice_end(wait->deadline_ns);
        PCC_PY_UNLOCKED(*code_out = pcc_client_wait(link, wait->id, what, end_ns));
    } while (*code_out == -ETIMEDOUT && end_ns < wait->deadline_ns &&
             (ok = pcc_py_link_goes_on(self)));
    pcc_py_link_leave(self);
    return ok;
}

static PyObject *wait_for(PyObject *self, const struct wait *wait, enum pcc_wait_for what)
{
    int code = 0;
    if (!wait_snapshot(self, wait, what, &code)) {
        return NULL;
    }
    if (code < 0 && code != -ETIMEDOUT) {
        return pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), code, NULL);
    }
    return PyBool_FromLong(code == 0);
}

PyObject *pcc_py_link_wait_read(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", "deadline_ns", "host_only", NULL};
    struct wait wait;
    int host_only = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|$p:wait_read", names, pcc_py_u64, &wait.id,
                                     pcc_py_u64, &wait.deadline_ns, &host_only)) {
        return NULL;
    }
    return wait_for(self, &wait, host_only ? PCC_WAIT_HOST_READ : PCC_WAIT_READ);
}

static char *snapshot_names[] = {"snapshot", "deadline_ns", NULL};

PyObject *pcc_py_link_wait_copied(PyObject *self, PyObject *args, PyObject *kwargs)
{
    struct wait wait;
    return wait_parse(args, kwargs, snapshot_names, &wait) ? wait_for(self, &wait, PCC_WAIT_COPIED)
                                                           : NULL;
}

PyObject *pcc_py_link_wait_global(PyObject *self, PyObject *args, PyObject *kwargs)
{
    struct wait wait;
    return wait_parse(args, kwargs, snapshot_names, &wait) ? wait_for(self, &wait, PCC_WAIT_GLOBAL)
                                                           : NULL;
}

PyObject *pcc_py_link_wait_durable(PyObject *self, PyObject *args, PyObject *kwargs)
{
    struct wait wait;
    return wait_parse(args, kwargs, snapshot_names, &wait) ? wait_for(self, &wait, PCC_WAIT_DURABLE)
                                                           : NULL;
}

/* -- loading ----------------------------------------------------------------------------------- */

PyObject *pcc_py_link_load_start(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"load_id", "ranges", "device_ranges", NULL};
    uint64_t load_id;
    struct pcc_py_ranges ranges = {0};
    struct pcc_py_ranges device_ranges = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|O&:load_start", names, pcc_py_u64,
                                     &load_id, pcc_py_ranges, &ranges, pcc_py_device_ranges,
                                     &device_ranges)) {
        return NULL;
    }
    PyObject *done = NULL;
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link != NULL) {
        int result;
        PCC_PY_UNLOCKED(result =
                            pcc_client_load_start(link, load_id, ranges.items, ranges.count,
                                                  device_ranges.device_items, device_ranges.count));
        done = pcc_py_link_leave_with(self, result);
    }
    pcc_py_ranges_done(&device_ranges);
    pcc_py_ranges_done(&ranges);
    return done;
}

PyObject *pcc_py_link_load_wait(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"load_id", "deadline_ns", NULL};
    struct wait wait;
    struct pcc_client *link =
        wait_parse(args, kwargs, names, &wait) ? pcc_py_link_enter(self) : NULL;
    if (link == NULL) {
        return NULL;
    }
    bool ok = true;
    bool ended = false;
    int code;
    while (ok && !ended && pcc_now_ns() < wait.deadline_ns) {
        uint64_t end_ns = pcc_py_link_slice_end(wait.deadline_ns);
        PCC_PY_UNLOCKED(ended = pcc_client_load_ended(link, wait.id, end_ns));
        ok = ended || pcc_py_link_goes_on(self);
    }
    /* Also after an exception: nothing may write to the caller's memory behind his back. */
    PCC_PY_UNLOCKED(code = pcc_client_load_wait(link, wait.id, ok ? wait.deadline_ns : 0));
    pcc_py_link_leave(self);
    if (!ok) {
        return NULL;
    }
    if (code == -ETIMEDOUT || code == -ECONNRESET) {
        return pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), code, NULL);
    }
    return PyLong_FromLong(code);
}
