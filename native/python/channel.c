#include "channel.h"

static void channel_close(void *handle)
{
    pcc_tenant_close(handle);
}

/* One more user of `object`, with a reference. False with ValueError when it is closed. */
static bool borrow(PyObject *object)
{
    if (pcc_py_enter((struct pcc_py_object *)object) == NULL) {
        return false;
    }
    Py_INCREF(object);
    return true;
}

static void give_back(PyObject *object) /* accepts NULL */
{
    if (object != NULL) {
        pcc_py_leave((struct pcc_py_object *)object);
        Py_DECREF(object);
    }
}

/* -- open and close ---------------------------------------------------------------------------- */

/* Borrows what is not NULL; each is given back when it fails. */
static PyObject *channel_open(PyTypeObject *type, PyObject *const borrowed[3],
                              const struct pcc_tenant_spec *spec)
{
    void *handles[3] = {NULL};
    PyObject *bound = NULL;
    int entered = 0;
    for (; entered < 3; entered++) {
        if (borrowed[entered] == NULL) {
            continue;
        }
        if (!borrow(borrowed[entered])) {
            goto fail;
        }
        handles[entered] = ((struct pcc_py_object *)borrowed[entered])->lease.handle;
    }
    bound = PyList_New(0);
    if (bound == NULL) {
        goto fail;
    }
    struct pcc_tenant *channel = NULL;
    int result;
    PCC_PY_UNLOCKED(result = pcc_tenant_open(handles[0], handles[1], handles[2], spec, &channel));
    if (result < 0) {
        pcc_py_raise(pcc_py_state_of(type), result, NULL);
        goto fail;
    }
    PyObject *self = pcc_py_object_new(type, "Channel", channel, channel_close);
    if (self != NULL) {
        struct pcc_py_channel *made = (struct pcc_py_channel *)self;
        made->bound = bound;
        made->pool = borrowed[0];
        made->events = borrowed[1];
        made->gpus = borrowed[2];
        return self;
    }
fail:
    Py_XDECREF(bound);
    while (entered > 0) {
        give_back(borrowed[--entered]);
    }
    return NULL;
}

static PyObject *channel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pool",        "events",         "id",    "chunk_bytes",
                            "block_bytes", "chunk_capacity", "lanes", "writers",
                            "gpus",        "label",          NULL};
    struct pcc_py_state *state = pcc_py_state_of(type);
    struct pcc_tenant_spec spec = {0};
    PyObject *borrowed[3] = {NULL}; /* pool, events, GPUs */
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!|$O&O&O&O&O&O&Os:Channel", names, state->pool_type, &borrowed[0],
            state->events_type, &borrowed[1], pcc_py_u64, &spec.id, pcc_py_u32, &spec.chunk_bytes,
            pcc_py_u32, &spec.block_bytes, pcc_py_u32, &spec.chunk_capacity, pcc_py_u32,
            &spec.lanes, pcc_py_u32, &spec.writers_per_lane, &borrowed[2], &spec.label) ||
        !pcc_py_require(kwargs, &names[2], 6)) {
        return NULL;
    }
    if (borrowed[2] == Py_None) {
        borrowed[2] = NULL;
    }
    if (borrowed[2] != NULL && !PyObject_TypeCheck(borrowed[2], state->gpus_type)) {
        PyErr_SetString(PyExc_TypeError, "gpus must be Gpus or None");
        return NULL;
    }
    return channel_open(type, borrowed, &spec);
}

/* What it borrows goes only after the C channel has gone. */
static void channel_settle(struct pcc_py_channel *channel)
{
    if (channel->base.lease.handle != NULL || channel->base.lease.users > 0) {
        return;
    }
    PyObject *borrowed[] = {channel->loading, channel->pool, channel->events, channel->gpus};
    PyObject *bound = channel->bound;
    channel->loading = channel->pool = channel->events = channel->gpus = channel->bound = NULL;
    for (Py_ssize_t i = 0; bound != NULL && i < PyList_Size(bound); i++) {
        pcc_py_leave((struct pcc_py_object *)PyList_GetItem(bound, i));
    }
    Py_XDECREF(bound);
    for (size_t i = 0; i < sizeof(borrowed) / sizeof(borrowed[0]); i++) {
        give_back(borrowed[i]);
    }
}

struct pcc_tenant *pcc_py_channel_enter(PyObject *self)
{
    return pcc_py_enter((struct pcc_py_object *)self);
}

void pcc_py_channel_leave(PyObject *self)
{
    pcc_py_leave((struct pcc_py_object *)self);
    channel_settle((struct pcc_py_channel *)self);
}

PyObject *pcc_py_channel_leave_with(PyObject *self, int result)
{
    pcc_py_channel_leave(self);
    return pcc_py_none_or_raise(pcc_py_state_of(Py_TYPE(self)), result);
}

PyObject *pcc_py_channel_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    pcc_py_close((struct pcc_py_object *)self);
    channel_settle((struct pcc_py_channel *)self);
    Py_RETURN_NONE;
}

static void channel_dealloc(PyObject *self)
{
    pcc_py_close((struct pcc_py_object *)self);
    channel_settle((struct pcc_py_channel *)self);
    pcc_py_object_dealloc(self);
}

/* -- volumes ----------------------------------------------------------------------------------- */

static PyObject *outcomes_new(const struct pcc_kept_outcome *outcomes, uint32_t count)
{
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        const struct pcc_kept_outcome *one = &outcomes[i];
        PyObject *made =
            Py_BuildValue("(KLKKKKIs)", one->sequence, (long long)one->step, one->incarnation,
                          one->payload_bytes, one->tree_offset_bytes, one->tree_bytes,
                          one->world_size, one->error != 0 ? pcc_error_name(one->error) : "");
        if (made == NULL || PyList_Append(list, made) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(made);
    }
    return list;
}

PyObject *pcc_py_channel_bind(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"volume", "state_fd", "state_id", NULL};
    struct pcc_py_state *state = pcc_py_state_of(Py_TYPE(self));
    PyObject *volume;
    int state_fd = -1;
    uint64_t state_id = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|iO&:bind", names, state->volume_type,
                                     &volume, &state_fd, pcc_py_u64, &state_id)) {
        return NULL;
    }
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    PyObject *bound = ((struct pcc_py_channel *)self)->bound;
    if (!borrow(volume)) {
        pcc_py_channel_leave(self);
        return NULL;
    }
    int result;
    struct pcc_kept_outcome outcomes[PCC_KEPT_OUTCOMES_MAX];
    uint32_t count = 0;
    struct pcc_volume *handle = ((struct pcc_py_object *)volume)->lease.handle;
    PCC_PY_UNLOCKED(result = state_fd < 0 ? pcc_tenant_bind(channel, handle)
                                          : pcc_tenant_bind_kept(channel, handle, state_fd,
                                                                 state_id, outcomes, &count));
    int known = result < 0 ? 1 : PySequence_Contains(bound, volume);
    if (known == 0 && PyList_Append(bound, volume) == 0) {
        Py_DECREF(volume); /* the list holds the reference, `bound` stands for the use */
    } else if (known == 1) {
        give_back(volume);
    } /* else memory is out: the volume stays open, for C has bound it */
    pcc_py_channel_leave(self);
    if (known < 0 || PyErr_Occurred()) {
        return NULL;
    }
    return result < 0 ? pcc_py_raise(state, result, NULL) : outcomes_new(outcomes, count);
}

/* `before` counts the load calls at the time of the unbind, none of them under way: one that came
 * since borrows the volume for a load that may be running. */
static void forget(PyObject *self, PyObject *volume, uint64_t before)
{
    struct pcc_py_channel *channel = (struct pcc_py_channel *)self;
    for (Py_ssize_t i = 0; i < PyList_Size(channel->bound); i++) {
        if (PyList_GetItem(channel->bound, i) == volume) {
            PyList_SetSlice(channel->bound, i, i + 1, NULL);
            pcc_py_leave((struct pcc_py_object *)volume);
            break;
        }
    }
    if (channel->loading == volume && channel->load_returns == before &&
        channel->load_calls == before) {
        channel->loading = NULL;
        give_back(volume);
    }
}

PyObject *pcc_py_channel_unbind(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"volume", NULL};
    struct pcc_py_state *state = pcc_py_state_of(Py_TYPE(self));
    PyObject *volume;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:unbind", names, state->volume_type,
                                     &volume)) {
        return NULL;
    }
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    int result = 0;
    const struct pcc_py_channel *counted = (struct pcc_py_channel *)self;
    const uint64_t before =
        counted->load_calls == counted->load_returns ? counted->load_calls : UINT64_MAX;
    struct pcc_volume *handle = ((struct pcc_py_object *)volume)->lease.handle;
    if (handle != NULL) { /* a closed volume is nobody's any more */
        PCC_PY_UNLOCKED(result = pcc_tenant_unbind(channel, handle));
    }
    if (result == 0) {
        forget(self, volume, before);
    }
    return pcc_py_channel_leave_with(self, result);
}

PyObject *pcc_py_channel_load(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"volume", "sequence", "offset", "length", "load_id", "own", NULL};
    struct pcc_py_state *state = pcc_py_state_of(Py_TYPE(self));
    PyObject *volume;
    uint64_t sequence, offset_bytes, length_bytes, load_id;
    int own = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O&O&O&O&|p:load", names, state->volume_type,
                                     &volume, pcc_py_u64, &sequence, pcc_py_u64, &offset_bytes,
                                     pcc_py_u64, &length_bytes, pcc_py_u64, &load_id, &own)) {
        return NULL;
    }
    struct pcc_tenant *channel = pcc_py_channel_enter(self);
    if (channel == NULL) {
        return NULL;
    }
    if (!borrow(volume)) {
        pcc_py_channel_leave(self);
        return NULL;
    }
    int result;
    struct pcc_volume *handle = ((struct pcc_py_object *)volume)->lease.handle;
    ((struct pcc_py_channel *)self)->load_calls++;
    PCC_PY_UNLOCKED(result = pcc_tenant_load(channel, handle, own != 0, sequence, offset_bytes,
                                             length_bytes, load_id));
    ((struct pcc_py_channel *)self)->load_returns++;
    PyObject *unused = volume;
    if (result == 0) { /* one load at a time: the one before has ended */
        unused = ((struct pcc_py_channel *)self)->loading;
        ((struct pcc_py_channel *)self)->loading = volume;
    }
    give_back(unused);
    return pcc_py_channel_leave_with(self, result);
}

PyTypeObject *pcc_py_channel_type(PyObject *module)
{
    PyType_Slot slots[] = {
        {Py_tp_new, (void *)channel_new},
        {Py_tp_dealloc, (void *)channel_dealloc},
        {Py_tp_methods, pcc_py_channel_methods},
        {Py_tp_doc, (void *)(uintptr_t) "The daemon's end for one (uid, job, rank)."},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = "pccheck_native._core.Channel",
        .basicsize = (int)sizeof(struct pcc_py_channel),
        .flags = Py_TPFLAGS_DEFAULT,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
