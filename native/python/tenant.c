/* Tenant: the objects that it borrows, and its methods. */
#include "core.h"
#include "daemon/pcc_tenant.h"

#include <string.h>

#define HANDLE struct pcc_tenant

/* Borrows, as a user of their leases: pool, events and GPUs for its life, volumes from bind() to
 * unbind(), the volume of a load until the next load. Each lives until the tenant has released it,
 * whatever order their owners close them in. */
struct py_tenant {
    struct pcc_py_object base;
    PyObject *borrowed[3]; /* pool, events, GPUs or NULL */
    PyObject *bound;       /* list of volumes */
    PyObject *loading;     /* or NULL */
    uint64_t load_calls;
    uint64_t load_returns;
};

static struct py_tenant *tenant_of(PyObject *self)
{
    return (struct py_tenant *)self;
}

PCC_PY_CLOSES(tenant_close, pcc_tenant_close)

/* One more user of `object`, with a reference. False with ValueError when it is closed. */
static bool borrow(PyObject *object)
{
    if (pcc_py_enter(object) == NULL)
        return false;
    Py_INCREF(object);
    return true;
}

static void give_back(PyObject *object) /* accepts NULL */
{
    if (object != NULL) {
        pcc_py_leave(object);
        Py_DECREF(object);
    }
}

/* -- open and close ---------------------------------------------------------------------------- */

/* What it borrows goes only after the C tenant has gone. */
static void tenant_gone(PyObject *self)
{
    struct py_tenant *tenant = tenant_of(self);
    PyObject *bound = tenant->bound;
    tenant->bound = NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(bound); i++)
        pcc_py_leave(PyList_GetItem(bound, i));
    Py_DECREF(bound);
    give_back(tenant->loading);
    for (int i = 0; i < 3; i++)
        give_back(tenant->borrowed[i]);
}

/* Borrows the objects that are not NULL; gives all of them back when it fails. */
static PyObject *tenant_open(PyTypeObject *type, PyObject *const borrowed[3],
                             const struct pcc_tenant_spec *spec)
{
    void *handles[3] = {NULL};
    PyObject *bound = NULL;
    int entered = 0;
    for (; entered < 3; entered++) {
        if (borrowed[entered] == NULL)
            continue;
        if (!borrow(borrowed[entered]))
            goto fail;
        handles[entered] = pcc_py_lease(borrowed[entered])->handle;
    }
    bound = PyList_New(0);
    if (bound == NULL)
        goto fail;
    struct pcc_tenant *tenant = NULL;
    int result;
    PCC_PY_UNLOCKED(result = pcc_tenant_open(handles[0], handles[1], handles[2], spec, &tenant));
    PyObject *self = pcc_py_object_new(type, "Tenant", result, tenant, tenant_close);
    if (self != NULL) {
        memcpy(tenant_of(self)->borrowed, borrowed, sizeof(tenant_of(self)->borrowed));
        tenant_of(self)->bound = bound;
        pcc_py_lease(self)->gone = tenant_gone;
        return self;
    }
fail:
    Py_XDECREF(bound);
    while (entered > 0)
        give_back(borrowed[--entered]);
    return NULL;
}

static PyObject *tenant_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pool",        "events",         "id",      "chunk_bytes",
                            "block_bytes", "chunk_capacity", "lanes",   "writers",
                            "gpus",        "label",          "foreign", NULL};
    struct pcc_py_state *state = pcc_py_state_of(type);
    struct pcc_tenant_spec spec = {0};
    int foreign = 0;
    PyObject *borrowed[3] = {NULL}; /* pool, events, GPUs */
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!|$O&O&O&O&O&O&Osp:Tenant", names, state->types[PCC_PY_POOL],
            &borrowed[0], state->types[PCC_PY_EVENTS], &borrowed[1], pcc_py_u64, &spec.id,
            pcc_py_u32, &spec.chunk_bytes, pcc_py_u32, &spec.block_bytes, pcc_py_u32,
            &spec.chunk_capacity, pcc_py_u32, &spec.lanes, pcc_py_u32, &spec.writers_per_lane,
            &borrowed[2], &spec.label, &foreign) ||
        !pcc_py_require(kwargs, &names[2], 6))
        return NULL;
    spec.foreign = foreign != 0;
    if (borrowed[2] == Py_None)
        borrowed[2] = NULL;
    if (borrowed[2] != NULL && !PyObject_TypeCheck(borrowed[2], state->types[PCC_PY_GPUS])) {
        PyErr_SetString(PyExc_TypeError, "gpus must be Gpus or None");
        return NULL;
    }
    return tenant_open(type, borrowed, &spec);
}

/* -- volumes ----------------------------------------------------------------------------------- */

static PyObject *outcomes_new(const struct pcc_kept_outcome *outcomes, uint32_t count)
{
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        const struct pcc_slot_entry *one = &outcomes[i].entry;
        const int error = outcomes[i].error;
        pcc_py_append(&list, Py_BuildValue("(KLKKKKIs)", one->sequence, (long long)one->step,
                                           one->incarnation, one->payload_bytes,
                                           one->tree_offset_bytes, one->tree_bytes, one->world_size,
                                           error != 0 ? pcc_error_name(error) : ""));
    }
    return list;
}

static PyObject *tenant_bind(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"volume", "state_fd", "state_id", NULL};
    struct pcc_py_state *state = pcc_py_state_of(Py_TYPE(self));
    PyObject *volume;
    int state_fd = -1;
    uint64_t state_id = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|iO&:bind", names,
                                     state->types[PCC_PY_VOLUME], &volume, &state_fd, pcc_py_u64,
                                     &state_id))
        return NULL;
    PCC_PY_ENTER();
    if (!borrow(volume))
        return NULL;
    int result;
    struct pcc_kept_outcome outcomes[PCC_KEPT_OUTCOMES_MAX];
    uint32_t count = 0;
    struct pcc_volume *lent = pcc_py_lease(volume)->handle;
    PCC_PY_UNLOCKED(result = state_fd < 0 ? pcc_tenant_bind(handle, lent)
                                          : pcc_tenant_bind_kept(handle, lent, state_fd, state_id,
                                                                 outcomes, &count));
    int known = result < 0 ? 1 : PySequence_Contains(tenant_of(self)->bound, volume);
    if (known == 0 && PyList_Append(tenant_of(self)->bound, volume) == 0) {
        Py_DECREF(volume); /* the list holds the reference, `bound` stands for the use */
    } else if (known == 1) {
        give_back(volume);
    } /* else memory is out: the volume stays open, for C has bound it */
    if (known < 0 || PyErr_Occurred())
        return NULL;
    return result < 0 ? pcc_py_done(self, result) : outcomes_new(outcomes, count);
}

/* `before` is the number of load calls at the unbind, when none was in progress. A call that came
 * later borrows the volume, too, and its load may be running. */
static void forget(struct py_tenant *tenant, PyObject *volume, uint64_t before)
{
    for (Py_ssize_t i = 0; i < PyList_Size(tenant->bound); i++) {
        if (PyList_GetItem(tenant->bound, i) == volume) {
            PyList_SetSlice(tenant->bound, i, i + 1, NULL);
            pcc_py_leave(volume);
            break;
        }
    }
    if (tenant->loading == volume && tenant->load_returns == before &&
        tenant->load_calls == before) {
        tenant->loading = NULL;
        give_back(volume);
    }
}

static PyObject *tenant_unbind(PyObject *self, PyObject *volume)
{
    if (!PyObject_TypeCheck(volume, pcc_py_state_of(Py_TYPE(self))->types[PCC_PY_VOLUME])) {
        PyErr_SetString(PyExc_TypeError, "unbind() takes a Volume");
        return NULL;
    }
    PCC_PY_ENTER();
    int result = 0;
    const struct py_tenant *counted = tenant_of(self);
    const uint64_t before =
        counted->load_calls == counted->load_returns ? counted->load_calls : UINT64_MAX;
    struct pcc_volume *lent = pcc_py_lease(volume)->handle;
    if (lent != NULL) /* a closed volume is not bound any more */
        PCC_PY_UNLOCKED(result = pcc_tenant_unbind(handle, lent));
    if (result == 0)
        forget(tenant_of(self), volume, before);
    return pcc_py_done(self, result);
}

static PyObject *tenant_load(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"volume", "sequence", "offset", "length", "load_id", "own", NULL};
    struct pcc_py_state *state = pcc_py_state_of(Py_TYPE(self));
    PyObject *volume;
    uint64_t sequence, offset_bytes, length_bytes, load_id;
    bool own = true;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O&O&O&O&|O&:load", names,
                                     state->types[PCC_PY_VOLUME], &volume, pcc_py_u64, &sequence,
                                     pcc_py_u64, &offset_bytes, pcc_py_u64, &length_bytes,
                                     pcc_py_u64, &load_id, pcc_py_bool, &own))
        return NULL;
    PCC_PY_ENTER();
    if (!borrow(volume))
        return NULL;
    int result;
    struct pcc_volume *lent = pcc_py_lease(volume)->handle;
    tenant_of(self)->load_calls++;
    PCC_PY_UNLOCKED(
        result = pcc_tenant_load(handle, lent, own, sequence, offset_bytes, length_bytes, load_id));
    tenant_of(self)->load_returns++;
    PyObject *unused = volume;
    if (result == 0) { /* one load at a time: the one before has ended */
        unused = tenant_of(self)->loading;
        tenant_of(self)->loading = volume;
    }
    give_back(unused);
    return pcc_py_done(self, result);
}

/* -- its trainer ------------------------------------------------------------------------------- */

static PyObject *tenant_attach(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"socket_fd", "session", "pid", NULL};
    PyObject *socket;
    uint64_t session;
    uint32_t pid = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO&|O&:attach", names, &socket, pcc_py_u64,
                                     &session, pcc_py_u32, &pid))
        return NULL;
    if (pid > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "pid is no process id");
        return NULL;
    }
    int socket_fd = PyObject_AsFileDescriptor(socket);
    if (socket_fd < 0)
        return NULL;
    int page_fd = -1;
    int result;
    PCC_PY_CALL(result = pcc_tenant_attach(handle, socket_fd, session, (int32_t)pid, &page_fd));
    return result < 0 ? pcc_py_done(self, result) : PyLong_FromLong(page_fd);
}

/* The tenants of a sequence, entered for one call. */
struct lenders {
    PyObject *tuple;
    struct pcc_tenant **handles; /* NULL: that tenant is closed */
    Py_ssize_t count;
};

static void lenders_done(struct lenders *lenders)
{
    while (lenders->count-- > 0)
        if (lenders->handles[lenders->count] != NULL)
            pcc_py_leave(PyTuple_GetItem(lenders->tuple, lenders->count));
    PyMem_Free(lenders->handles);
    Py_XDECREF(lenders->tuple);
}

static int lenders_enter(PyObject *self, PyObject *others, struct lenders *out)
{
    PyTypeObject *type = pcc_py_state_of(Py_TYPE(self))->types[PCC_PY_TENANT];

    out->tuple = PySequence_Tuple(others);
    if (out->tuple == NULL)
        return -1;
    const Py_ssize_t count = PyTuple_Size(out->tuple);
    for (Py_ssize_t i = 0; i < count; i++)
        if (!PyObject_TypeCheck(PyTuple_GetItem(out->tuple, i), type)) {
            PyErr_SetString(PyExc_TypeError, "detach() takes Tenants");
            return -1;
        }
    out->handles = PyMem_Calloc((size_t)count + 1, sizeof(struct pcc_tenant *));
    if (out->handles == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; out->count < count; out->count++) {
        out->handles[out->count] = pcc_py_enter(PyTuple_GetItem(out->tuple, out->count));
        PyErr_Clear();
    }
    return 0;
}

static PyObject *tenant_detach(PyObject *self, PyObject *others)
{
    struct lenders lenders PCC_PY_OWNED(lenders_done) = {0};
    int32_t lender;
    PCC_PY_ENTER();
    if (lenders_enter(self, others, &lenders) != 0)
        return NULL;
    PCC_PY_UNLOCKED(lender = pcc_tenant_detach(handle, (struct pcc_tenant *const *)lenders.handles,
                                               (uint32_t)lenders.count));
    if (lender < 0)
        Py_RETURN_NONE;
    return PyLong_FromLong(lender);
}

/* -- its memory -------------------------------------------------------------------------------- */

static PyObject *tenant_grow(PyObject *self, PyObject *number)
{
    PCC_PY_NUMBER(bytes, number);
    uint64_t granted_bytes = 0;
    int result;
    PCC_PY_CALL(result = pcc_tenant_grow(handle, bytes, &granted_bytes));
    return result < 0 ? pcc_py_done(self, result) : PyLong_FromUnsignedLongLong(granted_bytes);
}

static PyObject *tenant_shrink(PyObject *self, PyObject *number)
{
    PCC_PY_NUMBER(bytes, number);
    struct pcc_tenant_holding holding;
    PCC_PY_CALL(pcc_tenant_shrink(handle, bytes, &holding));
    return Py_BuildValue("(KKI)", holding.bytes, holding.lasting_bytes, holding.asked);
}

PCC_PY_CALLS(tenant_release_memory, PCC_PY_RETURN_DONE, pcc_tenant_release_memory)

static PyObject *tenant_rest(PyObject *self, PyObject *seconds)
{
    uint64_t unmapped_ns;
    if (!pcc_py_seconds(seconds, &unmapped_ns))
        return NULL;
    PCC_PY_RETURN_NONE(pcc_tenant_rest(handle, unmapped_ns));
}

static PyObject *tenant_usage(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct pcc_tenant_usage usage;
    PCC_PY_CALL(pcc_tenant_usage(handle, &usage));
    return pcc_py_result(pcc_py_state_of(Py_TYPE(self)), PCC_PY_TENANT_USAGE,
                         Py_BuildValue("(KKKKKKKIKKIII)", usage.bytes, usage.free_chunks,
                                       usage.granted_chunks, usage.full_chunks, usage.cached_chunks,
                                       usage.lent_chunks, usage.left_chunks, usage.in_flight,
                                       usage.pinned_bytes, usage.exposed_bytes, usage.mappings,
                                       usage.pieces, usage.parked));
}

/* "" or why not. */
static PyObject *reason_new(int result, const char *reason)
{
    const char *text = result == 0 ? "" : reason[0] != '\0' ? reason : pcc_error_name(result);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *tenant_expose(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"map", "exposure", "descriptors", NULL};
    uint64_t map;
    Py_buffer exposure PCC_PY_OWNED(PyBuffer_Release) = {0};
    Py_buffer fds PCC_PY_OWNED(PyBuffer_Release) = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&y*|y*:expose", names, pcc_py_u64, &map,
                                     &exposure, &fds))
        return NULL;
    const struct pcc_descriptors descriptors = {.fds = fds.buf,
                                                .count = (uint64_t)fds.len / sizeof(int)};
    if (map == 0) {
        PyErr_SetString(PyExc_ValueError, "map 0 stands for no exposure");
        return NULL;
    }
    char reason[PCC_REASON_BYTES] = "";
    int result;
    PCC_PY_CALL(result = pcc_tenant_expose(handle, map, exposure.buf, (uint64_t)exposure.len,
                                           &descriptors, reason));
    if (result == -ENOMEM) {
        PyErr_SetString(PyExc_MemoryError, reason);
        return NULL;
    }
    return reason_new(result, reason);
}

/* -- its checkpoints --------------------------------------------------------------------------- */

static PyObject *tenant_policy(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"held", "numbers", "incarnation", "world_size", "above", NULL};
    struct pcc_tenant_policy policy = {.world_size = 1};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$O&O&O&O&O&:policy", names, pcc_py_bool,
                                     &policy.held, pcc_py_bool, &policy.numbers, pcc_py_u64,
                                     &policy.incarnation, pcc_py_u32, &policy.world_size,
                                     pcc_py_u64, &policy.above))
        return NULL;
    PCC_PY_RETURN_NONE(pcc_tenant_policy(handle, &policy));
}

PCC_PY_CALLS(tenant_noted, PCC_PY_RETURN_NONE, pcc_tenant_noted)

static PyObject *tenant_number(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", "sequence", "incarnation", "world_size",
                            "marks",    "name",     NULL};
    struct pcc_number number = {0};
    uint64_t snapshot;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O&O&O&O&|O&(O&O&O&):number", names, pcc_py_u64, &snapshot, pcc_py_u64,
            &number.sequence, pcc_py_u64, &number.incarnation, pcc_py_u32, &number.world_size,
            pcc_py_u32, &number.marks, pcc_py_u64, &number.name_base, pcc_py_u64,
            &number.name_descents, pcc_py_u64, &number.name_row))
        return NULL;
    PCC_PY_RETURN_DONE(pcc_tenant_number(handle, snapshot, &number));
}

PCC_PY_CALLS(tenant_retry, PCC_PY_RETURN_NONE, pcc_tenant_retry)

/* For O&. */
static int outcome_of(PyObject *number, void *out)
{
    uint32_t outcome;
    if (!pcc_py_u32(number, &outcome))
        return 0;
    if (outcome > PCC_OUTCOME_GIVEN_UP) {
        PyErr_SetString(PyExc_ValueError, "outcome is no checkpoint state");
        return 0;
    }
    *(enum pcc_outcome *)out = (enum pcc_outcome)outcome;
    return 1;
}

/* The arguments of refuse and set_outcome: what the page is to show. */
static int end_of(PyObject *args, PyObject *kwargs, uint64_t *snapshot, struct pcc_tenant_end *end)
{
    static char *names[] = {"snapshot", "outcome", "sequence", "newer",
                            "cause",    "error",   "argument", NULL};
    uint32_t cause = 0;
    int error = 0;
    *end = (struct pcc_tenant_end){0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|O&O&$O&iO&", names, pcc_py_u64, snapshot,
                                     outcome_of, &end->outcome, pcc_py_u64, &end->sequence,
                                     pcc_py_u64, &end->newer, pcc_py_u32, &cause, &error,
                                     pcc_py_u64, &end->reason.argument))
        return 0;
    if (cause > UINT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "cause is not a number of 16 bits");
        return 0;
    }
    end->reason.cause = (uint16_t)cause;
    end->reason.stage = error != 0 ? PCC_STAGE_BEGIN : PCC_STAGE_NONE;
    end->reason.error = error;
    return 1;
}

static PyObject *tenant_refuse(PyObject *self, PyObject *args, PyObject *kwargs)
{
    uint64_t snapshot;
    struct pcc_tenant_end end;
    if (!end_of(args, kwargs, &snapshot, &end))
        return NULL;
    PCC_PY_RETURN_BOOL(pcc_tenant_refuse(handle, snapshot, &end));
}

static PyObject *tenant_set_outcome(PyObject *self, PyObject *args, PyObject *kwargs)
{
    uint64_t snapshot;
    struct pcc_tenant_end end;
    if (!end_of(args, kwargs, &snapshot, &end))
        return NULL;
    PCC_PY_RETURN_NONE(pcc_tenant_set_outcome(handle, snapshot, &end));
}

PCC_PY_CALLS_NUMBER(tenant_write, PCC_PY_RETURN_DONE, pcc_tenant_write)

static PyObject *tenant_drop(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "outcome", "newer", "cause", "argument", NULL};
    struct pcc_tenant_end end = {0};
    uint32_t cause = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|O&$O&O&:drop", names, pcc_py_u64,
                                     &end.sequence, outcome_of, &end.outcome, pcc_py_u64,
                                     &end.newer, pcc_py_u32, &cause, pcc_py_u64,
                                     &end.reason.argument))
        return NULL;
    end.reason.cause = (uint16_t)cause;
    PCC_PY_RETURN_BOOL(pcc_tenant_drop(handle, end.sequence, &end));
}

/* -- what an earlier daemon has left ----------------------------------------------------------- */

static PyObject *tenant_adopt(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fd", "id", NULL};
    int fd;
    uint64_t id;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO&:adopt", names, &fd, pcc_py_u64, &id))
        return NULL;
    PCC_PY_RETURN_DONE(pcc_tenant_adopt(handle, fd, id));
}

PCC_PY_CALLS(tenant_settle, PCC_PY_RETURN_NONE, pcc_tenant_settle)

static PyMethodDef methods[] = {
    PCC_PY_METHOD("bind", tenant_bind),
    PCC_PY_METHOD("adopt", tenant_adopt),
    {"settle", tenant_settle, METH_NOARGS, NULL},
    {"unbind", tenant_unbind, METH_O, NULL},
    PCC_PY_METHOD("attach", tenant_attach),
    {"detach", tenant_detach, METH_O, NULL},
    {"grow", tenant_grow, METH_O, NULL},
    {"shrink", tenant_shrink, METH_O, NULL},
    {"release_memory", tenant_release_memory, METH_NOARGS, NULL},
    {"rest", tenant_rest, METH_O, NULL},
    PCC_PY_METHOD("expose", tenant_expose),
    PCC_PY_METHOD("policy", tenant_policy),
    {"noted", tenant_noted, METH_NOARGS, NULL},
    PCC_PY_METHOD("number", tenant_number),
    {"retry", tenant_retry, METH_NOARGS, NULL},
    PCC_PY_METHOD("refuse", tenant_refuse),
    PCC_PY_METHOD("set_outcome", tenant_set_outcome),
    {"write", tenant_write, METH_O, NULL},
    PCC_PY_METHOD("drop", tenant_drop),
    PCC_PY_METHOD("load", tenant_load),
    {"usage", tenant_usage, METH_NOARGS, NULL},
    {"close", pcc_py_object_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const struct pcc_py_type pcc_py_tenant = {
    .name = "pccheck_native._core.Tenant",
    .doc = "The daemon's end for one (uid, job, rank).",
    .size_bytes = sizeof(struct py_tenant),
    .make = tenant_new,
    .methods = methods,
};
