#include "pcc_link.h"

#include <time.h>

#include "core.h"

/* Waits return to Python this often, for signals and for close() by another thread. */
#define SLICE_NS 50000000ull
#define CLOSE_TRIES 200
#define CLOSE_PAUSE_NS 1000000l

static void link_close(void *handle)
{
    pcc_link_close(handle);
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
    struct pcc_link *link = NULL;
    int result;
    PCC_PY_UNLOCKED(result = pcc_link_open(socket_fd, page_fd, &link));
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

static struct pcc_link *enter(PyObject *self)
{
    return pcc_py_enter((struct pcc_py_object *)self);
}

static void leave(PyObject *self)
{
    pcc_py_leave((struct pcc_py_object *)self);
}

static PyObject *leave_with(PyObject *self, int result)
{
    leave(self);
    return pcc_py_none_or_raise(pcc_py_state_of(Py_TYPE(self)), result);
}

/* -- quick calls: atomics and at most one poll, so the GIL is kept ------------------------------
 */

static PyObject *link_alive(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_link *link = enter(self);
    if (link == NULL) {
        return NULL;
    }
    bool alive = pcc_link_alive(link);
    leave(self);
    return PyBool_FromLong(alive);
}

static PyObject *link_chunk_bytes(PyObject *self, void *unused)
{
    (void)unused;
    struct pcc_link *link = enter(self);
    if (link == NULL) {
        return NULL;
    }
    uint32_t chunk_bytes = pcc_link_chunk_bytes(link);
    leave(self);
    return PyLong_FromUnsignedLong(chunk_bytes);
}

static PyObject *link_state(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", NULL};
    uint64_t snapshot;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:state", names, pcc_py_u64, &snapshot)) {
        return NULL;
    }
    struct pcc_link *link = enter(self);
    if (link == NULL) {
        return NULL;
    }
    struct pcc_link_state now;
    int result = pcc_link_state(link, snapshot, &now);
    leave(self);
    struct pcc_py_state *state = pcc_py_state_of(Py_TYPE(self));
    if (result == -ENOENT) {
        Py_RETURN_NONE;
    }
    if (result < 0) {
        return pcc_py_raise(state, result, NULL);
    }
    return pcc_py_result(state, PCC_PY_LINK_STATE,
                         Py_BuildValue("(IIKN)", now.word, now.outcome, now.sequence,
                                       PyBool_FromLong(now.source_read)));
}

/* -- saving ------------------------------------------------------------------------------------ */

static PyObject *link_request(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", NULL};
    uint64_t snapshot;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:request", names, pcc_py_u64, &snapshot)) {
        return NULL;
    }
    struct pcc_link *link = enter(self);
    if (link == NULL) {
        return NULL;
    }
    int result;
    PCC_PY_UNLOCKED(result = pcc_link_request(link, snapshot));
    return leave_with(self, result);
}

static PyObject *submit(PyObject *self, uint64_t snapshot, const struct pcc_py_ranges *ranges,
                        const struct pcc_py_ranges *inline_ranges, const Py_buffer *tail,
                        uint64_t tail_offset_bytes)
{
    struct pcc_link *link = enter(self);
    if (link == NULL) {
        return NULL;
    }
    int result;
    PCC_PY_UNLOCKED(result = pcc_link_submit(link, snapshot, ranges->items, ranges->count,
                                             inline_ranges->items, inline_ranges->count, tail->buf,
                                             (uint64_t)tail->len, tail_offset_bytes));
    return leave_with(self, result);
}

static PyObject *link_submit(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", "ranges", "inline_ranges", "tail", "tail_offset", NULL};
    uint64_t snapshot, tail_offset_bytes;
    struct pcc_py_ranges ranges = {0};
    struct pcc_py_ranges inline_ranges = {0};
    Py_buffer tail = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&y*O&:submit", names, pcc_py_u64,
                                     &snapshot, pcc_py_ranges, &ranges, pcc_py_ranges,
                                     &inline_ranges, &tail, pcc_py_u64, &tail_offset_bytes)) {
        return NULL;
    }
    PyObject *result = submit(self, snapshot, &ranges, &inline_ranges, &tail, tail_offset_bytes);
    PyBuffer_Release(&tail);
    pcc_py_ranges_done(&inline_ranges);
    pcc_py_ranges_done(&ranges);
    return result;
}

static PyObject *link_abandon(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", NULL};
    uint64_t snapshot;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:abandon", names, pcc_py_u64, &snapshot)) {
        return NULL;
    }
    struct pcc_link *link = enter(self);
    if (link == NULL) {
        return NULL;
    }
    bool won;
    PCC_PY_UNLOCKED(won = pcc_link_abandon(link, snapshot));
    leave(self);
    return PyBool_FromLong(won);
}

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

/* True after an expired slice when the wait should go on; false with an exception otherwise. */
static bool wait_goes_on(PyObject *self)
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

static uint64_t slice_end(const struct wait *wait)
{
    uint64_t end_ns = pcc_now_ns() + SLICE_NS;
    return end_ns < wait->deadline_ns ? end_ns : wait->deadline_ns;
}

/* Sets *code_out to 0 or a negative code; false with an exception. */
static bool wait_snapshot(PyObject *self, const struct wait *wait, enum pcc_wait_for what,
                          int *code_out)
{
    struct pcc_link *link = enter(self);
    if (link == NULL) {
        return false;
    }
    bool ok = true;
    uint64_t end_ns;
    do {
        end_ns = slice_end(wait);
        PCC_PY_UNLOCKED(*code_out = pcc_link_wait(link, wait->id, what, end_ns));
    } while (*code_out == -ETIMEDOUT && end_ns < wait->deadline_ns && (ok = wait_goes_on(self)));
    leave(self);
    return ok;
}

static PyObject *wait_for(PyObject *self, PyObject *args, PyObject *kwargs, enum pcc_wait_for what)
{
    static char *names[] = {"snapshot", "deadline_ns", NULL};
    struct wait wait;
    int code = 0;
    if (!wait_parse(args, kwargs, names, &wait) || !wait_snapshot(self, &wait, what, &code)) {
        return NULL;
    }
    if (code < 0 && code != -ETIMEDOUT) {
        return pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), code, NULL);
    }
    return PyBool_FromLong(code == 0);
}

static PyObject *link_wait_read(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return wait_for(self, args, kwargs, PCC_WAIT_READ);
}

static PyObject *link_wait_copied(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return wait_for(self, args, kwargs, PCC_WAIT_COPIED);
}

static PyObject *link_wait_durable(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return wait_for(self, args, kwargs, PCC_WAIT_DURABLE);
}

/* -- loading ----------------------------------------------------------------------------------- */

static PyObject *link_load_start(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"load_id", "ranges", NULL};
    uint64_t load_id;
    struct pcc_py_ranges ranges = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:load_start", names, pcc_py_u64, &load_id,
                                     pcc_py_ranges, &ranges)) {
        return NULL;
    }
    PyObject *done = NULL;
    struct pcc_link *link = enter(self);
    if (link != NULL) {
        int result;
        PCC_PY_UNLOCKED(result = pcc_link_load_start(link, load_id, ranges.items, ranges.count));
        done = leave_with(self, result);
    }
    pcc_py_ranges_done(&ranges);
    return done;
}

static PyObject *link_load_wait(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"load_id", "deadline_ns", NULL};
    struct wait wait;
    struct pcc_link *link = wait_parse(args, kwargs, names, &wait) ? enter(self) : NULL;
    if (link == NULL) {
        return NULL;
    }
    bool ok = true;
    bool ended = false;
    int code;
    while (ok && !ended && pcc_now_ns() < wait.deadline_ns) {
        uint64_t end_ns = slice_end(&wait);
        PCC_PY_UNLOCKED(ended = pcc_link_load_ended(link, wait.id, end_ns));
        ok = ended || wait_goes_on(self);
    }
    /* Also after an exception: nothing may write to the caller's memory behind his back. */
    PCC_PY_UNLOCKED(code = pcc_link_load_wait(link, wait.id, ok ? wait.deadline_ns : 0));
    leave(self);
    if (!ok) {
        return NULL;
    }
    if (code == -ETIMEDOUT || code == -ECONNRESET) {
        return pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), code, NULL);
    }
    return PyLong_FromLong(code);
}

/* -- the type ---------------------------------------------------------------------------------- */

#define KEYWORDS (METH_VARARGS | METH_KEYWORDS)

static PyMethodDef methods[] = {
    {"alive", link_alive, METH_NOARGS, "Whether the daemon still holds its end."},
    {"request", PCC_PY_METHOD(link_request), KEYWORDS, "The snapshot's word becomes REQUESTED."},
    {"submit", PCC_PY_METHOD(link_submit), KEYWORDS, "Hands the copy to the native thread."},
    {"wait_read", PCC_PY_METHOD(link_wait_read), KEYWORDS, "True once the source may change."},
    {"wait_copied", PCC_PY_METHOD(link_wait_copied), KEYWORDS,
     "True once the daemon vouches for it, or it ended otherwise."},
    {"wait_durable", PCC_PY_METHOD(link_wait_durable), KEYWORDS,
     "True once it or a newer one is durable, or it ended otherwise."},
    {"abandon", PCC_PY_METHOD(link_abandon), KEYWORDS, "True when this call gave it up."},
    {"state", PCC_PY_METHOD(link_state), KEYWORDS, "LinkState; None when it is long gone."},
    {"load_start", PCC_PY_METHOD(link_load_start), KEYWORDS, "Where a load's bytes go."},
    {"load_wait", PCC_PY_METHOD(link_load_wait), KEYWORDS, "0 or the daemon's code."},
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
