#include "channel.h"

#include <errno.h>
#include <string.h>

#define REASON_BYTES 192

/* -- its trainer ------------------------------------------------------------------------------- */

static PyObject *channel_attach(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"socket_fd", "session", "pid", NULL};
    PyObject *socket;
    uint64_t session;
    uint32_t pid = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO&|O&:attach", names, &socket, pcc_py_u64,
                                     &session, pcc_py_u32, &pid)) {
        return NULL;
    }
    if (pid > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "pid is no process id");
        return NULL;
    }
    int socket_fd = PyObject_AsFileDescriptor(socket);
    struct pcc_tenant *channel = socket_fd < 0 ? NULL : pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    int page_fd = -1;
    int result;
    PCC_PY_UNLOCKED(result =
                        pcc_tenant_attach(channel, socket_fd, session, (int32_t)pid, &page_fd));
    pcc_py_channel_leave(self);
    if (result < 0) {
        return pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), result, NULL);
    }
    return PyLong_FromLong(page_fd);
}

static PyObject *channel_detach(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    PCC_PY_UNLOCKED(pcc_tenant_detach(channel));
    return pcc_py_channel_leave_with(self, 0);
}

/* -- its memory -------------------------------------------------------------------------------- */

static PyObject *channel_grow(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"bytes", NULL};
    uint64_t bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:grow", names, pcc_py_u64, &bytes)) {
        return NULL;
    }
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    uint64_t granted_bytes = 0;
    int result;
    PCC_PY_UNLOCKED(result = pcc_tenant_grow(channel, bytes, &granted_bytes));
    pcc_py_channel_leave(self);
    if (result < 0) {
        return pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), result, NULL);
    }
    return PyLong_FromUnsignedLongLong(granted_bytes);
}

static PyObject *channel_shrink(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"bytes", NULL};
    uint64_t bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:shrink", names, pcc_py_u64, &bytes)) {
        return NULL;
    }
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    struct pcc_tenant_holding holding;
    PCC_PY_UNLOCKED(pcc_tenant_shrink(channel, bytes, &holding));
    pcc_py_channel_leave(self);
    return Py_BuildValue("(KKI)", holding.bytes, holding.lasting_bytes, holding.asked);
}

static PyObject *channel_release_memory(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    int result;
    PCC_PY_UNLOCKED(result = pcc_tenant_release_memory(channel));
    return pcc_py_channel_leave_with(self, result);
}

static PyObject *channel_rest(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"unmapped_s", NULL};
    uint64_t unmapped_ns;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:rest", names, pcc_py_seconds,
                                     &unmapped_ns)) {
        return NULL;
    }
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    PCC_PY_UNLOCKED(pcc_tenant_rest(channel, unmapped_ns));
    return pcc_py_channel_leave_with(self, 0);
}

static PyObject *channel_usage(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    struct pcc_tenant_usage usage;
    PCC_PY_UNLOCKED(pcc_tenant_usage(channel, &usage));
    pcc_py_channel_leave(self);
    return pcc_py_result(pcc_py_state_of(Py_TYPE(self)), PCC_PY_CHANNEL_USAGE,
                         Py_BuildValue("(KKKKKKKIKKIi)", usage.bytes, usage.free_chunks,
                                       usage.granted_chunks, usage.full_chunks, usage.cached_chunks,
                                       usage.lent_chunks, usage.left_chunks, usage.in_flight,
                                       usage.pinned_bytes, usage.exposed_bytes, usage.mappings,
                                       usage.numa_node));
}

/* "" or why not. */
static PyObject *reason_new(int result, const char *reason)
{
    const char *text = result == 0 ? "" : reason[0] != '\0' ? reason : pcc_error_name(result);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *channel_expose(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"map", "exposure", NULL};
    uint64_t map;
    Py_buffer exposure = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&y*:expose", names, pcc_py_u64, &map,
                                     &exposure)) {
        return NULL;
    }
    if (map == 0) {
        PyBuffer_Release(&exposure);
        PyErr_SetString(PyExc_ValueError, "map 0 stands for no exposure");
        return NULL;
    }
    PyObject *told = NULL;
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel != NULL) {
        char reason[REASON_BYTES] = "";
        int result;
        PCC_PY_UNLOCKED(result = pcc_tenant_expose(channel, map, exposure.buf,
                                                   (uint64_t)exposure.len, reason, sizeof(reason)));
        pcc_py_channel_leave(self);
        if (result == -ENOMEM) {
            PyErr_SetString(PyExc_MemoryError, reason);
        } else {
            told = reason_new(result, reason);
        }
    }
    PyBuffer_Release(&exposure);
    return told;
}

static PyObject *channel_cached(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", NULL};
    uint64_t sequence;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:cached", names, pcc_py_u64, &sequence)) {
        return NULL;
    }
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    bool cached;
    PCC_PY_UNLOCKED(cached = pcc_tenant_cached(channel, sequence));
    pcc_py_channel_leave(self);
    return PyBool_FromLong(cached);
}

/* -- its checkpoints --------------------------------------------------------------------------- */

static PyObject *channel_begin(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot",    "map",        "sequence",      "step",
                            "incarnation", "world_size", "payload_bytes", "tree_offset",
                            "tree_bytes",  NULL};
    struct pcc_save_request request = {0};
    uint64_t snapshot;
    uint64_t map = 0;
    long long step = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O&|$O&O&LO&O&O&O&O&:begin", names, pcc_py_u64, &snapshot, pcc_py_u64,
            &map, pcc_py_u64, &request.sequence, &step, pcc_py_u64, &request.incarnation,
            pcc_py_u32, &request.world_size, pcc_py_u64, &request.payload_bytes, pcc_py_u64,
            &request.tree_offset_bytes, pcc_py_u64, &request.tree_bytes) ||
        !pcc_py_require(kwargs, &names[3], 6)) {
        return NULL;
    }
    request.tag = snapshot;
    request.step = step;
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    uint64_t sequence = 0;
    int result;
    PCC_PY_UNLOCKED(result = pcc_tenant_begin(channel, snapshot, map, &request, &sequence));
    pcc_py_channel_leave(self);
    if (result < 0) {
        return pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), result, NULL);
    }
    return PyLong_FromUnsignedLongLong(sequence);
}

struct verdict {
    uint64_t snapshot;
    uint64_t sequence;
    uint32_t outcome;
};

static bool verdict_parse(PyObject *args, PyObject *kwargs, struct verdict *out)
{
    static char *names[] = {"snapshot", "outcome", "sequence", NULL};
    *out = (struct verdict){0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|O&", names, pcc_py_u64, &out->snapshot,
                                     pcc_py_u32, &out->outcome, pcc_py_u64, &out->sequence)) {
        return false;
    }
    if (out->outcome > PCC_OUTCOME_FAILED) {
        PyErr_SetString(PyExc_ValueError, "outcome is no checkpoint state");
        return false;
    }
    return true;
}

static PyObject *channel_refuse(PyObject *self, PyObject *args, PyObject *kwargs)
{
    struct verdict verdict;
    if (!verdict_parse(args, kwargs, &verdict)) {
        return NULL;
    }
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    PCC_PY_UNLOCKED(pcc_tenant_refuse(channel, verdict.snapshot, (enum pcc_outcome)verdict.outcome,
                                      verdict.sequence));
    return pcc_py_channel_leave_with(self, 0);
}

static PyObject *channel_requested(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    uint64_t snapshots[PCC_SNAPSHOTS];
    uint32_t count;
    PCC_PY_UNLOCKED(count = pcc_tenant_requested(channel, snapshots));
    pcc_py_channel_leave(self);
    PyObject *list = PyList_New(count);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(snapshots[i]);
        if (number == NULL || PyList_SetItem(list, i, number) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *channel_set_outcome(PyObject *self, PyObject *args, PyObject *kwargs)
{
    struct verdict verdict;
    if (!verdict_parse(args, kwargs, &verdict)) {
        return NULL;
    }
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    PCC_PY_UNLOCKED(pcc_tenant_set_outcome(channel, verdict.snapshot,
                                           (enum pcc_outcome)verdict.outcome, verdict.sequence));
    return pcc_py_channel_leave_with(self, 0);
}

/* -- what a daemon before has left ------------------------------------------------------------- */

static PyObject *channel_adopt(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fd", "id", NULL};
    int fd;
    uint64_t id;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO&:adopt", names, &fd, pcc_py_u64, &id)) {
        return NULL;
    }
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    int result;
    PCC_PY_UNLOCKED(result = pcc_tenant_adopt(channel, fd, id));
    return pcc_py_channel_leave_with(self, result);
}

static PyObject *channel_settle(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    PCC_PY_UNLOCKED(pcc_tenant_settle(channel));
    return pcc_py_channel_leave_with(self, 0);
}

#define KEYWORDS (METH_VARARGS | METH_KEYWORDS)

PyMethodDef pcc_py_channel_methods[] = {
    {"bind", PCC_PY_METHOD(pcc_py_channel_bind), KEYWORDS,
     "New saves go to this volume; with a state memfd, what goes on and what does not."},
    {"adopt", PCC_PY_METHOD(channel_adopt), KEYWORDS,
     "Takes over a segment, and its descriptor, out of the store."},
    {"settle", channel_settle, METH_NOARGS,
     "Checks what was adopted and hands it to the writers; blocks."},
    {"unbind", PCC_PY_METHOD(pcc_py_channel_unbind), KEYWORDS,
     "Lets go of a volume; EBUSY while it has saves."},
    {"attach", PCC_PY_METHOD(channel_attach), KEYWORDS,
     "A trainer connected; the page's descriptor, the caller's."},
    {"detach", channel_detach, METH_NOARGS, "The trainer is gone; blocks for the drain."},
    {"grow", PCC_PY_METHOD(channel_grow), KEYWORDS, "Takes memory; the bytes it now has."},
    {"shrink", PCC_PY_METHOD(channel_shrink), KEYWORDS,
     "Takes memory back, a step further each time: (bytes held, bytes that stay, segments that the "
     "client was asked for and still has)."},
    {"release_memory", channel_release_memory, METH_NOARGS,
     "Gives every segment back; EBUSY unless detached and idle."},
    {"rest", PCC_PY_METHOD(channel_rest), KEYWORDS,
     "Unpins the segments when no GPU memory was mapped for so long."},
    {"expose", PCC_PY_METHOD(channel_expose), KEYWORDS,
     "Takes over an exposure of GPU memory; \"\" or why not; MemoryError when "
     "GPU or host memory is short."},
    {"begin", PCC_PY_METHOD(channel_begin), KEYWORDS, "Admits a snapshot; its sequence."},
    {"refuse", PCC_PY_METHOD(channel_refuse), KEYWORDS, "Refuses a snapshot."},
    {"requested", channel_requested, METH_NOARGS, "Snapshots whose word says REQUESTED."},
    {"set_outcome", PCC_PY_METHOD(channel_set_outcome), KEYWORDS,
     "Tells the trainer what became of a snapshot."},
    {"load", PCC_PY_METHOD(pcc_py_channel_load), KEYWORDS,
     "Sends a checkpoint to the trainer; returns at once."},
    {"cached", PCC_PY_METHOD(channel_cached), KEYWORDS, "Whether all of it is still in DRAM."},
    {"usage", channel_usage, METH_NOARGS, "What its chunks are used for."},
    {"close", pcc_py_channel_close, METH_NOARGS, "Drains sealed saves, then goes."},
    {NULL, NULL, 0, NULL},
};
