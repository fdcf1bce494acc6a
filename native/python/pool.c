#include "core.h"
#include "daemon/pcc_tenant.h"

/* -- Pool -------------------------------------------------------------------------------------- */

#define HANDLE struct pcc_pool

PCC_PY_CLOSES(pool_close, pcc_pool_close)

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"budget_bytes", "store", "store_limit", "stored", NULL};
    uint64_t budget_bytes;
    const char *store = "";
    uint32_t limit = 0, stored = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$sO&O&:Pool", names, pcc_py_u64,
                                     &budget_bytes, &store, pcc_py_u32, &limit, pcc_py_u32,
                                     &stored))
        return NULL;
    struct pcc_pool *pool = NULL;
    int result = pcc_pool_open(budget_bytes, &pool);
    if (result == 0 && store[0] != '\0' && limit > 0) {
        struct pcc_store *kept = NULL;
        result = pcc_store_open(store, limit, stored, &kept);
        if (result == 0)
            pcc_pool_keep(pool, kept);
    }
    if (result < 0)
        pcc_pool_close(pool);
    return pcc_py_object_new(type, "Pool", result, pool, pool_close);
}

static PyObject *pool_stored(PyObject *self, PyObject *Py_UNUSED(unused))
{
    PCC_PY_ENTER();
    const struct pcc_store_usage usage = pcc_pool_stored(handle);
    return Py_BuildValue("(IIK)", usage.stored, usage.limit, usage.refused);
}

static PyObject *pool_usage(PyObject *self, PyObject *Py_UNUSED(unused))
{
    uint64_t budget_bytes, used_bytes;
    PCC_PY_CALL(pcc_pool_usage(handle, &budget_bytes, &used_bytes));
    return Py_BuildValue("(KK)", budget_bytes, used_bytes);
}

static PyObject *pool_unstore(PyObject *self, PyObject *args)
{
    const char *name;
    if (!PyArg_ParseTuple(args, "s:unstore", &name))
        return NULL;
    PCC_PY_RETURN_NONE(pcc_pool_unstore(handle, name));
}

static PyMethodDef pool_methods[] = {
    {"usage", pool_usage, METH_NOARGS, NULL},
    {"unstore", pool_unstore, METH_VARARGS, NULL},
    {"stored", pool_stored, METH_NOARGS, NULL},
    {"close", pcc_py_object_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const struct pcc_py_type pcc_py_pool = {
    .name = "pccheck_native._core.Pool",
    .doc = "The DRAM budget that segments are cut from.",
    .make = pool_new,
    .methods = pool_methods,
};

/* -- Events ------------------------------------------------------------------------------------ */

#undef HANDLE
#define HANDLE struct pcc_events
#define EVENTS_CAPACITY 4096u
#define EVENTS_PER_TAKE 64u

PCC_PY_CLOSES(events_close, pcc_events_close)

static PyObject *events_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Events", names))
        return NULL;
    struct pcc_events *events = NULL;
    int result = pcc_events_open(EVENTS_CAPACITY, &events);
    return pcc_py_object_new(type, "Events", result, events, events_close);
}

PCC_PY_ANSWERS(events_fileno, PyObject, PyLong_FromLong(pcc_events_fd(handle)))

static const char *const kinds[] = {
    [PCC_EVENT_REQUESTED] = "requested",   [PCC_EVENT_BEGUN] = "begun",
    [PCC_EVENT_WAITS] = "waits",           [PCC_EVENT_REFUSED] = "refused",
    [PCC_EVENT_COPIED] = "copied",         [PCC_EVENT_WRITING] = "writing",
    [PCC_EVENT_DURABLE] = "durable",       [PCC_EVENT_SUPERSEDED] = "superseded",
    [PCC_EVENT_GIVEN_UP] = "given_up",     [PCC_EVENT_FAILED] = "failed",
    [PCC_EVENT_LOAD_ENDED] = "load_ended", [PCC_EVENT_BAD_PEER] = "bad_peer",
    [PCC_EVENT_DETACHED] = "detached",     [PCC_EVENT_WANTED] = "wanted",
};

static PyObject *request_new(struct pcc_py_state *state, const struct pcc_event *event)
{
    const struct pcc_request *request = &event->requested.request;
    const struct pcc_reason *fault = &event->requested.fault;
    return pcc_py_result(
        state, PCC_PY_SAVE_REQUEST,
        Py_BuildValue("(LKKKNIKKKKKKKKKKIK)", (long long)request->step, request->payload_bytes,
                      request->tree_offset_bytes, request->tree_bytes,
                      PyBool_FromLong(request->flags & PCC_REQUEST_SKIP), request->level,
                      request->map, request->held_at_ns, request->held_ns, request->base,
                      request->turn, request->descents, request->row, request->interval,
                      request->division, event->requested.taken_ns, (unsigned int)fault->cause,
                      fault->argument));
}

/* Of a save; zeros where the event has a request. */
static PyObject *times_new(struct pcc_py_state *state, const struct pcc_event *event)
{
    static const struct pcc_save_times none;
    const struct pcc_save_times *times = event->kind == PCC_EVENT_REQUESTED ? &none : &event->times;
    return pcc_py_result(state, PCC_PY_SAVE_TIMES,
                         Py_BuildValue("(KKKKKKK)", times->begin, times->first_write, times->sealed,
                                       times->written, times->flushed, times->durable,
                                       times->ended));
}

static PyObject *event_new(struct pcc_py_state *state, const struct pcc_event *event)
{
    PyObject *when = times_new(state, event);
    if (when == NULL)
        return NULL;
    PyObject *request =
        event->kind == PCC_EVENT_REQUESTED ? request_new(state, event) : Py_NewRef(Py_None);
    if (request == NULL) {
        Py_DECREF(when);
        return NULL;
    }
    return pcc_py_result(
        state, PCC_PY_EVENT,
        Py_BuildValue("(sKKKKIissIKKKNN)", kinds[event->kind], event->tenant, event->session,
                      event->id, event->sequence, event->slot, event->error,
                      event->error ? pcc_error_name(event->error) : "",
                      pcc_stage_name(event->stage), event->rehomed, event->payload_bytes,
                      event->copied_bytes, event->written_bytes, when, request));
}

static PyObject *take_all(struct pcc_py_state *state, struct pcc_events *events)
{
    struct pcc_event taken[EVENTS_PER_TAKE];
    PyObject *list = PyList_New(0);
    uint32_t count = EVENTS_PER_TAKE;
    while (list != NULL && count == EVENTS_PER_TAKE) {
        PCC_PY_UNLOCKED(count = pcc_events_take(events, taken, EVENTS_PER_TAKE));
        for (uint32_t i = 0; list != NULL && i < count; i++)
            pcc_py_append(&list, event_new(state, &taken[i]));
    }
    return list;
}

PCC_PY_ANSWERS(events_take, PyObject, take_all(pcc_py_state_of(Py_TYPE(self)), handle))

static PyMethodDef events_methods[] = {
    {"fileno", events_fileno, METH_NOARGS, NULL},
    {"take", events_take, METH_NOARGS, NULL},
    {"close", pcc_py_object_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const struct pcc_py_type pcc_py_events = {
    .name = "pccheck_native._core.Events",
    .doc = "What the tenants report, behind an eventfd.",
    .make = events_new,
    .methods = events_methods,
};
