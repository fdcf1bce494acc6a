#include <string.h>

#include "core.h"
#include "disk/pcc_volume.h"
#include "read.h"

struct py_volume {
    struct pcc_py_object base;
    bool writable;
};

static void volume_close(void *handle)
{
    pcc_volume_close(handle);
}

/* "O&" converter. */
static int engine_named(PyObject *object, void *out)
{
    Py_ssize_t length = 0;
    const char *name = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &length) : NULL;
    if (name != NULL && strlen(name) == (size_t)length && pcc_io_engine_named(name, out) == 0) {
        return 1;
    }
    PyErr_Format(PyExc_ValueError, "there is no engine %R", object);
    return 0;
}

static PyObject *volume_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path", "writable", "allow_buffered", "engine", NULL};
    PyObject *path = NULL;
    int writable = 0;
    int allow_buffered = 0;
    struct pcc_io_options options = {.engine = PCC_IO_PWRITE};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$ppO&:Volume", names, PyUnicode_FSConverter,
                                     &path, &writable, &allow_buffered, engine_named,
                                     &options.engine)) {
        return NULL;
    }
    if (!pcc_py_require(kwargs, &names[1], 1)) {
        Py_DECREF(path);
        return NULL;
    }
    options.allow_buffered = allow_buffered != 0;
    struct pcc_volume *volume = NULL;
    int result;
    const char *name = PyBytes_AsString(path);
    PCC_PY_UNLOCKED(result = pcc_volume_open_at(name, writable != 0, &options, &volume));
    PyObject *self = NULL;
    if (result == 0) {
        self = pcc_py_object_new(type, "Volume", volume, volume_close);
        if (self != NULL) {
            ((struct py_volume *)self)->writable = writable != 0;
        }
    } else {
        PyObject *shown = PyUnicode_DecodeFSDefault(name);
        if (shown != NULL) {
            pcc_py_raise(pcc_py_state_of(type), result, shown);
            Py_DECREF(shown);
        }
    }
    Py_DECREF(path);
    return self;
}

/* -- what it says ------------------------------------------------------------------------------ */

/* The largest payload that still fits a slot beside its manifest. */
static uint64_t payload_capacity(const struct pcc_geometry *geometry)
{
    uint64_t low = 0;
    uint64_t high = geometry->slot_stride_bytes;
    while (low < high) {
        uint64_t middle = low + (high - low + 1) / 2;
        if (pcc_geometry_fits(geometry, middle)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* What a writer would find free; the core keeps no queue of free slots for a reader. */
static uint32_t free_in(const struct pcc_record *record)
{
    uint32_t count = 0;
    for (uint32_t slot = 0; slot < record->slot_count; slot++) {
        count += record->slots[slot].state == PCC_SLOT_FREE &&
                 (record->slots[slot].flags & PCC_SLOT_QUARANTINED) == 0;
    }
    return count;
}

static PyObject *info_values(struct pcc_volume *volume, bool writable)
{
    struct pcc_record record;
    struct pcc_volume_health health;
    uint32_t free_slots;
    bool stopped;
    Py_BEGIN_ALLOW_THREADS pcc_volume_record(volume, &record);
    health = pcc_volume_health(volume);
    free_slots = writable ? pcc_volume_free_slots(volume) : free_in(&record);
    stopped = pcc_volume_stopped(volume);
    Py_END_ALLOW_THREADS struct pcc_geometry geometry = pcc_volume_geometry(volume);
    PyObject *job = PyUnicode_DecodeUTF8(record.job, (Py_ssize_t)record.job_bytes, "replace");
    if (job == NULL) {
        return NULL;
    }
    return Py_BuildValue("(y#NIIIIIIKKKKKKKKNNIIII)", (const char *)record.volume_uuid,
                         (Py_ssize_t)sizeof(record.volume_uuid), job, record.uid, record.rank,
                         record.world_size, record.slot_count, record.keep, record.block_bytes,
                         geometry.slot_stride_bytes, payload_capacity(&geometry),
                         geometry.volume_bytes, record.record_number, record.boot_epoch,
                         record.next_sequence, record.incarnation, record.created_wall_ns,
                         PyBool_FromLong(record.done != 0), PyBool_FromLong(stopped), free_slots,
                         health.valid_replicas, health.repaired_replicas, health.damaged_records);
}

static PyObject *volume_info(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_volume *volume = pcc_py_enter((struct pcc_py_object *)self);
    if (volume == NULL) {
        return NULL;
    }
    PyObject *values = info_values(volume, ((struct py_volume *)self)->writable);
    pcc_py_leave((struct pcc_py_object *)self);
    return pcc_py_result(pcc_py_state_of(Py_TYPE(self)), PCC_PY_VOLUME_INFO, values);
}

static PyObject *entry_values(uint32_t slot, const struct pcc_slot_entry *entry)
{
    if (entry->state != PCC_SLOT_DURABLE) {
        return Py_BuildValue("(IIiiiiiiiii)", slot, entry->flags, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    }
    return Py_BuildValue("(IIKLKIKIKKK)", slot, entry->flags, entry->sequence, entry->step,
                         entry->incarnation, entry->world_size, entry->payload_bytes,
                         entry->manifest_bytes, entry->tree_offset_bytes, entry->tree_bytes,
                         entry->wall_ns);
}

static PyObject *volume_table(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_volume *volume = pcc_py_enter((struct pcc_py_object *)self);
    if (volume == NULL) {
        return NULL;
    }
    struct pcc_record record;
    PCC_PY_UNLOCKED(pcc_volume_record(volume, &record));
    pcc_py_leave((struct pcc_py_object *)self);
    struct pcc_py_state *state = pcc_py_state_of(Py_TYPE(self));
    PyObject *table = PyList_New((Py_ssize_t)record.slot_count);
    for (uint32_t slot = 0; table != NULL && slot < record.slot_count; slot++) {
        PyObject *entry =
            pcc_py_result(state, PCC_PY_SLOT_ENTRY, entry_values(slot, &record.slots[slot]));
        if (entry == NULL || PyList_SetItem(table, (Py_ssize_t)slot, entry) < 0) {
            Py_CLEAR(table);
        }
    }
    return table;
}

static PyObject *volume_require_in_place(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_volume *volume = pcc_py_enter((struct pcc_py_object *)self);
    if (volume == NULL) {
        return NULL;
    }
    int result;
    PCC_PY_UNLOCKED(result = pcc_volume_in_place(volume));
    pcc_py_leave((struct pcc_py_object *)self);
    return pcc_py_none_or_raise(pcc_py_state_of(Py_TYPE(self)), result);
}

/* -- how fast it may be: waits for no disk ------------------------------------------------------
 */

static PyObject *volume_limit(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"bytes_per_second", NULL};
    uint64_t bytes_per_second;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:limit", names, pcc_py_u64,
                                     &bytes_per_second)) {
        return NULL;
    }
    struct pcc_volume *volume = pcc_py_enter((struct pcc_py_object *)self);
    if (volume == NULL) {
        return NULL;
    }
    PCC_PY_UNLOCKED(pcc_io_limit(pcc_volume_io(volume), bytes_per_second));
    pcc_py_leave((struct pcc_py_object *)self);
    return Py_NewRef(Py_None);
}

static PyObject *volume_bytes_per_second(PyObject *self, void *unused)
{
    (void)unused;
    struct pcc_volume *volume = pcc_py_enter((struct pcc_py_object *)self);
    if (volume == NULL) {
        return NULL;
    }
    PyObject *limit = PyLong_FromUnsignedLongLong(pcc_io_limit_of(pcc_volume_io(volume)));
    pcc_py_leave((struct pcc_py_object *)self);
    return limit;
}

/* -- what changes its record: blocks for a durable write --------------------------------------- */

static PyObject *volume_flag(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "set", "clear", "now", NULL};
    uint64_t sequence;
    uint32_t set = 0;
    uint32_t clear = 0;
    int now = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$O&O&p:flag", names, pcc_py_u64, &sequence,
                                     pcc_py_u32, &set, pcc_py_u32, &clear, &now)) {
        return NULL;
    }
    struct pcc_volume *volume = pcc_py_enter((struct pcc_py_object *)self);
    if (volume == NULL) {
        return NULL;
    }
    int result;
    PCC_PY_UNLOCKED(result = pcc_volume_flag(volume, sequence, set, clear, now != 0));
    pcc_py_leave((struct pcc_py_object *)self);
    return pcc_py_none_or_raise(pcc_py_state_of(Py_TYPE(self)), result);
}

static PyObject *volume_begin_incarnation(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"incarnation", "world_size", NULL};
    uint64_t incarnation;
    uint32_t world_size;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:begin_incarnation", names, pcc_py_u64,
                                     &incarnation, pcc_py_u32, &world_size)) {
        return NULL;
    }
    struct pcc_volume *volume = pcc_py_enter((struct pcc_py_object *)self);
    if (volume == NULL) {
        return NULL;
    }
    int result;
    PCC_PY_UNLOCKED(result = pcc_volume_begin_incarnation(volume, incarnation, world_size));
    pcc_py_leave((struct pcc_py_object *)self);
    return pcc_py_none_or_raise(pcc_py_state_of(Py_TYPE(self)), result);
}

static PyObject *volume_finish(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"keep", NULL};
    uint32_t keep;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:finish", names, pcc_py_u32, &keep)) {
        return NULL;
    }
    struct pcc_volume *volume = pcc_py_enter((struct pcc_py_object *)self);
    if (volume == NULL) {
        return NULL;
    }
    int result;
    PCC_PY_UNLOCKED(result = pcc_volume_finish(volume, keep));
    pcc_py_leave((struct pcc_py_object *)self);
    return pcc_py_none_or_raise(pcc_py_state_of(Py_TYPE(self)), result);
}

static PyObject *volume_recycle(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_volume *volume = pcc_py_enter((struct pcc_py_object *)self);
    if (volume == NULL) {
        return NULL;
    }
    int result;
    PCC_PY_UNLOCKED(result = pcc_volume_recycle(volume));
    pcc_py_leave((struct pcc_py_object *)self);
    return pcc_py_none_or_raise(pcc_py_state_of(Py_TYPE(self)), result);
}

/* Fills `group` from a sequence of integers; false with an exception set. */
static bool given_up_from(PyObject *sequences, struct pcc_volume_group *group)
{
    PyObject *fast = PySequence_List(sequences);
    if (fast == NULL) {
        return false;
    }
    const Py_ssize_t count = PyList_Size(fast);
    bool good = count <= (Py_ssize_t)PCC_GIVEN_UP_MAX;
    if (!good) {
        PyErr_Format(PyExc_ValueError, "more than %u sequences are given up", PCC_GIVEN_UP_MAX);
    }
    for (Py_ssize_t i = 0; good && i < count; i++) {
        good = pcc_py_u64(PyList_GetItem(fast, i), &group->given_up[i]) != 0;
    }
    group->given_up_count = good ? (uint32_t)count : 0;
    Py_DECREF(fast);
    return good;
}

static PyObject *volume_set_group(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"oldest", "newest", "given_up", NULL};
    struct pcc_volume_group group = {0};
    PyObject *given_up;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$O&O&O:set_group", names, pcc_py_u64,
                                     &group.oldest, pcc_py_u64, &group.newest, &given_up) ||
        !pcc_py_require(kwargs, names, 3) || !given_up_from(given_up, &group)) {
        return NULL;
    }
    struct pcc_volume *volume = pcc_py_enter((struct pcc_py_object *)self);
    if (volume == NULL) {
        return NULL;
    }
    int result;
    PCC_PY_UNLOCKED(result = pcc_volume_set_group(volume, &group));
    pcc_py_leave((struct pcc_py_object *)self);
    return pcc_py_none_or_raise(pcc_py_state_of(Py_TYPE(self)), result);
}

static PyObject *volume_has_expendable(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct pcc_volume *volume = pcc_py_enter((struct pcc_py_object *)self);
    if (volume == NULL) {
        return NULL;
    }
    bool found;
    PCC_PY_UNLOCKED(found = pcc_volume_has_expendable(volume));
    pcc_py_leave((struct pcc_py_object *)self);
    return PyBool_FromLong(found);
}

static PyObject *volume_engine(PyObject *self, void *unused)
{
    (void)unused;
    struct pcc_volume *volume = pcc_py_enter((struct pcc_py_object *)self);
    if (volume == NULL) {
        return NULL;
    }
    const char *name = pcc_volume_io(volume)->ops->name;
    pcc_py_leave((struct pcc_py_object *)self); /* engines' names outlive them */
    return PyUnicode_FromString(name);
}

static PyGetSetDef properties[] = {
    {"engine", volume_engine, NULL, "What reads and writes it.", NULL},
    {"bytes_per_second", volume_bytes_per_second, NULL, "Its limit; 0: none.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"info", volume_info, METH_NOARGS, "Identity, geometry and health."},
    {"table", volume_table, METH_NOARGS, "One SlotEntry per slot, of the newest durable record."},
    {"require_in_place", volume_require_in_place, METH_NOARGS,
     "Raises unless its file is the one at its path, and whole."},
    {"limit", PCC_PY_METHOD(volume_limit), METH_VARARGS | METH_KEYWORDS,
     "Bytes per second that may pass from now on; 0: no limit."},
    {"flag", PCC_PY_METHOD(volume_flag), METH_VARARGS | METH_KEYWORDS,
     "Sets and clears policy flags of a durable checkpoint."},
    {"begin_incarnation", PCC_PY_METHOD(volume_begin_incarnation), METH_VARARGS | METH_KEYWORDS,
     "Records a new start of the job; durable on return."},
    {"finish", PCC_PY_METHOD(volume_finish), METH_VARARGS | METH_KEYWORDS,
     "Keeps the newest checkpoints only and says done; durable on return."},
    {"set_group", PCC_PY_METHOD(volume_set_group), METH_VARARGS | METH_KEYWORDS,
     "What the ranks of a group have agreed on: which checkpoints the next record may let go."},
    {"has_expendable", volume_has_expendable, METH_NOARGS, "Whether a slot may be recycled now."},
    {"recycle", volume_recycle, METH_NOARGS,
     "Lets go of what is no longer kept, durably, when no slot is free."},
    {"read", PCC_PY_METHOD(pcc_py_volume_read), METH_VARARGS | METH_KEYWORDS,
     "Verified bytes of a payload."},
    {"read_into", PCC_PY_METHOD(pcc_py_volume_read_into), METH_VARARGS | METH_KEYWORDS,
     "Verified, parallel read into memory."},
    {"verify", PCC_PY_METHOD(pcc_py_volume_verify), METH_VARARGS | METH_KEYWORDS,
     "Reads and checks a whole checkpoint."},
    {"close", pcc_py_object_close, METH_NOARGS, "Closes it once no call and no channel uses it."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject *pcc_py_volume_type(PyObject *module)
{
    PyType_Slot slots[] = {
        {Py_tp_new, (void *)volume_new},
        {Py_tp_dealloc, (void *)pcc_py_object_dealloc},
        {Py_tp_methods, methods},
        {Py_tp_getset, properties},
        {Py_tp_doc, (void *)(uintptr_t) "The storage of one (uid, job, rank)."},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = "pccheck_native._core.Volume",
        .basicsize = (int)sizeof(struct py_volume),
        .flags = Py_TPFLAGS_DEFAULT,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
