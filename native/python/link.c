#include "link.h"

#include <time.h>

#define CLOSE_TRIES 200
#define CLOSE_PAUSE_NS 1000000l

static void link_close(void *handle)
{
    pcc_client_close(handle);
}

static PyObject *link_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"socket_fd", "page_fd", NULL};
    PyObject *socket;
    PyObject *page;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:Link", names, &socket, &page)) {
        return NULL;
    }
    int socket_fd = PyObject_AsFileDescriptor(socket);
    int page_fd = socket_fd < 0 ? -1 : PyObject_AsFileDescriptor(page);
    if (page_fd < 0) {
        return NULL;
    }
    struct pcc_client *link = NULL;
    int result;
    PCC_PY_UNLOCKED(result = pcc_client_open(socket_fd, page_fd, &link));
    if (result < 0) {
        return pcc_py_raise(pcc_py_state_of(type), result, NULL);
    }
    return pcc_py_object_new(type, "Link", link, link_close);
}

/* Its thread reads the caller's tensors, so close() waits for calls in other threads, which leave
 * within a slice, and returns with the thread gone. Bounded: a signal handler that closes the link
 * its own thread waits on would wait for itself; then the wait closes it when it goes on. */
static PyObject *method_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_py_object *object = (struct pcc_py_object *)self;
    const struct timespec pause = {.tv_nsec = CLOSE_PAUSE_NS};
    pcc_py_close(object);
    for (int i = 0; object->lease.users > 0 && i < CLOSE_TRIES; i++) {
        PCC_PY_UNLOCKED(nanosleep(&pause, NULL));
    }
    Py_RETURN_NONE;
}

struct pcc_client *pcc_py_link_enter(PyObject *self)
{
    return pcc_py_enter((struct pcc_py_object *)self);
}

void pcc_py_link_leave(PyObject *self)
{
    pcc_py_leave((struct pcc_py_object *)self);
}

PyObject *pcc_py_link_leave_with(PyObject *self, int result)
{
    pcc_py_link_leave(self);
    return pcc_py_none_or_raise(pcc_py_state_of(Py_TYPE(self)), result);
}

/* -- quick calls: atomics and at most one poll, so the GIL is kept ------------------------------
 */

static PyObject *link_alive(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    bool alive = pcc_client_alive(link);
    pcc_py_link_leave(self);
    return PyBool_FromLong(alive);
}

static PyObject *link_chunk_bytes(PyObject *self, void *unused)
{
    (void)unused;
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    uint32_t chunk_bytes = pcc_client_chunk_bytes(link);
    pcc_py_link_leave(self);
    return PyLong_FromUnsignedLong(chunk_bytes);
}

static PyObject *link_state(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", NULL};
    uint64_t snapshot;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:state", names, pcc_py_u64, &snapshot)) {
        return NULL;
    }
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    struct pcc_client_state now;
    int result = pcc_client_state(link, snapshot, &now);
    pcc_py_link_leave(self);
    struct pcc_py_state *state = pcc_py_state_of(Py_TYPE(self));
    if (result == -ENOENT) {
        Py_RETURN_NONE;
    }
    if (result < 0) {
        return pcc_py_raise(state, result, NULL);
    }
    return pcc_py_result(state, PCC_PY_LINK_STATE,
                         Py_BuildValue("(IIKNis)", now.word, now.outcome, now.sequence,
                                       PyBool_FromLong(now.source_read), now.error,
                                       now.error ? pcc_error_name(now.error) : ""));
}

/* -- saving ------------------------------------------------------------------------------------ */

static PyObject *link_request(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", NULL};
    uint64_t snapshot;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:request", names, pcc_py_u64, &snapshot)) {
        return NULL;
    }
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    int result;
    PCC_PY_UNLOCKED(result = pcc_client_request(link, snapshot));
    return pcc_py_link_leave_with(self, result);
}

static PyObject *submit(PyObject *self, uint64_t snapshot, const struct pcc_submission *submission)
{
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    int result;
    PCC_PY_UNLOCKED(result = pcc_client_submit(link, snapshot, submission));
    return pcc_py_link_leave_with(self, result);
}

static PyObject *link_submit(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "snapshot",      "ranges",       "inline_ranges",  "tail",        "tail_offset",
        "device_ranges", "pulled_bytes", "pulled_devices", "provisional", NULL};
    uint64_t snapshot;
    struct pcc_submission submission = {0};
    struct pcc_py_ranges ranges = {0};
    struct pcc_py_ranges inline_ranges = {0};
    struct pcc_py_ranges device_ranges = {0};
    Py_buffer tail = {0};
    int provisional = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O&O&O&y*O&|O&$O&O&p:submit", names, pcc_py_u64, &snapshot, pcc_py_ranges,
            &ranges, pcc_py_ranges, &inline_ranges, &tail, pcc_py_u64,
            &submission.tail_offset_bytes, pcc_py_device_ranges, &device_ranges, pcc_py_u64,
            &submission.pulled_bytes, pcc_py_u32, &submission.pulled_devices, &provisional)) {
        return NULL;
    }
    submission.provisional = provisional != 0;
    submission.ranges = ranges.items;
    submission.range_count = ranges.count;
    submission.inline_ranges = inline_ranges.items;
    submission.inline_count = inline_ranges.count;
    submission.tail = tail.buf;
    submission.tail_bytes = (uint64_t)tail.len;
    submission.device_ranges = device_ranges.device_items;
    submission.device_range_count = device_ranges.count;
    PyObject *result = submit(self, snapshot, &submission);
    PyBuffer_Release(&tail);
    pcc_py_ranges_done(&device_ranges);
    pcc_py_ranges_done(&inline_ranges);
    pcc_py_ranges_done(&ranges);
    return result;
}

static PyObject *link_confirm(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", NULL};
    uint64_t snapshot;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:confirm", names, pcc_py_u64, &snapshot)) {
        return NULL;
    }
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    PCC_PY_UNLOCKED(pcc_client_confirm(link, snapshot));
    return pcc_py_link_leave_with(self, 0);
}

static PyObject *link_abandon(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", NULL};
    uint64_t snapshot;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:abandon", names, pcc_py_u64, &snapshot)) {
        return NULL;
    }
    struct pcc_client *link = pcc_py_link_enter(self);
    if (link == NULL) {
        return NULL;
    }
    bool won;
    PCC_PY_UNLOCKED(won = pcc_client_abandon(link, snapshot));
    pcc_py_link_leave(self);
    return PyBool_FromLong(won);
}

/* -- the type ---------------------------------------------------------------------------------- */

#define KEYWORDS (METH_VARARGS | METH_KEYWORDS)

static PyMethodDef methods[] = {
    {"alive", link_alive, METH_NOARGS, "Whether the daemon still holds its end."},
    {"request", PCC_PY_METHOD(link_request), KEYWORDS, "The snapshot's word becomes REQUESTED."},
    {"submit", PCC_PY_METHOD(link_submit), KEYWORDS, "Hands the copy to the native thread."},
    {"wait_read", PCC_PY_METHOD(pcc_py_link_wait_read), KEYWORDS,
     "True once the source may change."},
    {"wait_copied", PCC_PY_METHOD(pcc_py_link_wait_copied), KEYWORDS,
     "True once the daemon vouches for it, or it ended otherwise."},
    {"wait_global", PCC_PY_METHOD(pcc_py_link_wait_global), KEYWORDS,
     "Until every rank of the group has it, or a newer one, or it ended otherwise."},
    {"wait_durable", PCC_PY_METHOD(pcc_py_link_wait_durable), KEYWORDS,
     "True once it or a newer one is durable, or it ended otherwise."},
    {"confirm", PCC_PY_METHOD(link_confirm), KEYWORDS,
     "The source was not changed before it was read; for provisional ones."},
    {"abandon", PCC_PY_METHOD(link_abandon), KEYWORDS, "True when this call gave it up."},
    {"state", PCC_PY_METHOD(link_state), KEYWORDS, "LinkState; None when it is long gone."},
    {"device_open", PCC_PY_METHOD(pcc_py_link_device_open), KEYWORDS,
     "Readies a GPU; \"\" or why it cannot be pulled from."},
    {"staging", PCC_PY_METHOD(pcc_py_link_staging), KEYWORDS,
     "Device memory of ours; its address."},
    {"staging_trim", pcc_py_link_staging_trim, METH_NOARGS, "Frees what staging has outgrown."},
    {"stage", PCC_PY_METHOD(pcc_py_link_stage), KEYWORDS, "Copies on the device into staging."},
    {"mark", PCC_PY_METHOD(pcc_py_link_mark), KEYWORDS,
     "What the snapshot depends on is on this stream by now."},
    {"hold", PCC_PY_METHOD(pcc_py_link_hold), KEYWORDS, "The stream waits for the copy."},
    {"reached", PCC_PY_METHOD(pcc_py_link_reached), KEYWORDS,
     "Whether the GPUs have come to the snapshot."},
    {"capturing", PCC_PY_METHOD(pcc_py_link_capturing), KEYWORDS,
     "Whether the stream records a graph."},
    {"expose", PCC_PY_METHOD(pcc_py_link_expose), KEYWORDS, "The exposure of device ranges."},
    {"exposure_holds", pcc_py_link_exposure_holds, METH_NOARGS,
     "Whether the memory of the last exposure is still what it was."},
    {"load_start", PCC_PY_METHOD(pcc_py_link_load_start), KEYWORDS, "Where a load's bytes go."},
    {"load_wait", PCC_PY_METHOD(pcc_py_link_load_wait), KEYWORDS, "0 or the daemon's code."},
    {"close", method_close, METH_NOARGS, "Stops at once; what was not handed over is lost."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"chunk_bytes", link_chunk_bytes, NULL, "b", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject *pcc_py_link_type(PyObject *module)
{
    PyType_Slot slots[] = {
        {Py_tp_new, (void *)link_new},
        {Py_tp_dealloc, (void *)pcc_py_object_dealloc},
        {Py_tp_methods, methods},
        {Py_tp_getset, properties},
        {Py_tp_doc, (void *)(uintptr_t) "The client's end of a session."},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = "pccheck_native._core.Link",
        .basicsize = (int)sizeof(struct pcc_py_object),
        .flags = Py_TPFLAGS_DEFAULT,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
