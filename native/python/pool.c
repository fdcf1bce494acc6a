#include "core.h"
#include "daemon/pcc_tenant.h"

/* -- Pool -------------------------------------------------------------------------------------- */

static void pool_close(void *handle)
{
    pcc_pool_close(handle);
}

/* Takes `pool`; gives it a descriptor store. */
static int pool_keep(struct pcc_pool *pool, const char *address, uint32_t limit, uint32_t stored)
{
    struct pcc_store *store = NULL;
    int result = pcc_store_open(address, limit, stored, &store);
    if (result == 0) {
        pcc_pool_keep(pool, store);
    }
    return result;
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"budget_bytes", "store", "store_limit", "stored", NULL};
    uint64_t budget_bytes;
    const char *store = "";
    uint32_t limit = 0, stored = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$sO&O&:Pool", names, pcc_py_u64,
                                     &budget_bytes, &store, pcc_py_u32, &limit, pcc_py_u32,
                                     &stored)) {
        return NULL;
    }
    struct pcc_pool *pool = NULL;
    int result = pcc_pool_open(budget_bytes, &pool);
    if (result == 0 && store[0] != '\0' && limit > 0) {
        result = pool_keep(pool, store, limit, stored);
    }
    if (result < 0) {
        pcc_pool_close(pool);
        return pcc_py_raise(pcc_py_state_of(type), result, NULL);
    }
    return pcc_py_object_new(type, "Pool", pool, pool_close);
}

static PyObject *pool_stored(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_pool *pool = pcc_py_enter((struct pcc_py_object *)self);
    if (pool == NULL) {
        return NULL;
    }
    const struct pcc_store_usage usage = pcc_pool_stored(pool);
    pcc_py_leave((struct pcc_py_object *)self);
    return Py_BuildValue("(IIK)", usage.stored, usage.limit, usage.refused);
}

static PyObject *pool_usage(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_pool *pool = pcc_py_enter((struct pcc_py_object *)self);
    if (pool == NULL) {
        return NULL;
    }
    uint64_t budget_bytes, used_bytes;
    PCC_PY_UNLOCKED(pcc_pool_usage(pool, &budget_bytes, &used_bytes));
    pcc_py_leave((struct pcc_py_object *)self);
    return Py_BuildValue("(KK)", budget_bytes, used_bytes);
}

static PyObject *pool_unstore(PyObject *self, PyObject *args)
{
    const char *name;
    if (!PyArg_ParseTuple(args, "s:unstore", &name)) {
        return NULL;
    }
    struct pcc_pool *pool = pcc_py_enter((struct pcc_py_object *)self);
    if (pool == NULL) {
        return NULL;
    }
    PCC_PY_UNLOCKED(pcc_pool_unstore(pool, name));
    pcc_py_leave((struct pcc_py_object *)self);
    Py_RETURN_NONE;
}

static PyMethodDef pool_methods[] = {
    {"usage", pool_usage, METH_NOARGS, "(budget, used) in bytes."},
    {"unstore", pool_unstore, METH_VARARGS, "Has a name removed from the descriptor store."},
    {"stored", pool_stored, METH_NOARGS, "(stored, limit, refused) of the descriptor store."},
    {"close", pcc_py_object_close, METH_NOARGS, "Closes it once no channel uses it."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject *pcc_py_pool_type(PyObject *module)
{
    PyType_Slot slots[] = {
        {Py_tp_new, (void *)pool_new},
        {Py_tp_dealloc, (void *)pcc_py_object_dealloc},
        {Py_tp_methods, pool_methods},
        {Py_tp_doc, (void *)(uintptr_t) "The DRAM budget that segments are cut from."},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = "pccheck_native._core.Pool",
        .basicsize = (int)sizeof(struct pcc_py_object),
        .flags = Py_TPFLAGS_DEFAULT,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}

/* -- Events ------------------------------------------------------------------------------------ */

#define EVENTS_CAPACITY_DEFAULT 4096u
#define EVENTS_CAPACITY_MAX (1u << 20)
#define EVENTS_PER_TAKE 64u

static void events_close(void *handle)
{
    pcc_events_close(handle);
}

static PyObject *events_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"capacity", NULL};
    uint32_t capacity = EVENTS_CAPACITY_DEFAULT;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O&:Events", names, pcc_py_u32, &capacity)) {
        return NULL;
    }
    if (capacity == 0 || capacity > EVENTS_CAPACITY_MAX) {
        PyErr_Format(PyExc_ValueError, "capacity must be 1 to %u", EVENTS_CAPACITY_MAX);
        return NULL;
    }
    struct pcc_events *events = NULL;
    int result = pcc_events_open(capacity, &events);
    if (result < 0) {
        return pcc_py_raise(pcc_py_state_of(type), result, NULL);
    }
    return pcc_py_object_new(type, "Events", events, events_close);
}

static PyObject *events_fileno(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_events *events = pcc_py_enter((struct pcc_py_object *)self);
    if (events == NULL) {
        return NULL;
    }
    int fd = pcc_events_fd(events);
    pcc_py_leave((struct pcc_py_object *)self);
    return PyLong_FromLong(fd);
}

static const char *kind_name(uint32_t kind)
{
    switch (kind) {
    case PCC_EVENT_COPIED:
        return "copied";
    case PCC_EVENT_WRITING:
        return "writing";
    case PCC_EVENT_DURABLE:
        return "durable";
    case PCC_EVENT_SUPERSEDED:
        return "superseded";
    case PCC_EVENT_GIVEN_UP:
        return "given_up";
    case PCC_EVENT_FAILED:
        return "failed";
    case PCC_EVENT_LOAD_ENDED:
        return "load_ended";
    case PCC_EVENT_BAD_PEER:
        return "bad_peer";
    case PCC_EVENT_DETACHED:
        return "detached";
    default:
        return "unknown";
    }
}

static PyObject *event_new(struct pcc_py_state *state, const struct pcc_event *event)
{
    const struct pcc_save_times *times = &event->times;
    PyObject *when =
        pcc_py_result(state, PCC_PY_SAVE_TIMES,
                      Py_BuildValue("(KKKKKK)", times->begin, times->first_write, times->sealed,
                                    times->written, times->flushed, times->durable));
    if (when == NULL) {
        return NULL;
    }
    return pcc_py_result(state, PCC_PY_EVENT,
                         Py_BuildValue("(sKKKKIissIN)", kind_name(event->kind), event->tenant,
                                       event->session, event->id, event->sequence, event->slot,
                                       event->error,
                                       event->error ? pcc_error_name(event->error) : "",
                                       event->stage ? event->stage : "", event->rehomed, when));
}

static PyObject *events_take(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_events *events = pcc_py_enter((struct pcc_py_object *)self);
    if (events == NULL) {
        return NULL;
    }
    struct pcc_py_state *state = pcc_py_state_of(Py_TYPE(self));
    struct pcc_event taken[EVENTS_PER_TAKE];
    PyObject *list = PyList_New(0);
    uint32_t count = EVENTS_PER_TAKE;
    while (list != NULL && count == EVENTS_PER_TAKE) {
        PCC_PY_UNLOCKED(count = pcc_events_take(events, taken, EVENTS_PER_TAKE));
        for (uint32_t i = 0; list != NULL && i < count; i++) {
            PyObject *event = event_new(state, &taken[i]);
            if (event == NULL || PyList_Append(list, event) < 0) {
                Py_CLEAR(list);
            }
            Py_XDECREF(event);
        }
    }
    pcc_py_leave((struct pcc_py_object *)self);
    return list;
}

static PyMethodDef events_methods[] = {
    {"fileno", events_fileno, METH_NOARGS, "Readable while events wait."},
    {"take", events_take, METH_NOARGS, "All events that wait, oldest first; never blocks."},
    {"close", pcc_py_object_close, METH_NOARGS, "Closes it once no channel uses it."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject *pcc_py_events_type(PyObject *module)
{
    PyType_Slot slots[] = {
        {Py_tp_new, (void *)events_new},
        {Py_tp_dealloc, (void *)pcc_py_object_dealloc},
        {Py_tp_methods, events_methods},
        {Py_tp_doc, (void *)(uintptr_t) "What the channels report, behind an eventfd."},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = "pccheck_native._core.Events",
        .basicsize = (int)sizeof(struct pcc_py_object),
        .flags = Py_TPFLAGS_DEFAULT,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
