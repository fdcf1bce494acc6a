#include "core.h"
#include "disk/pcc_load.h"

#define HANDLE struct pcc_volume
#define CHUNK_BYTES_DEFAULT (4u << 20)
#define THREADS_DEFAULT 2u
#define THREADS_MAX 64u

PCC_PY_CLOSES(volume_close, pcc_volume_close)

static PyObject *volume_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path", "writable", "allow_buffered", "engine", "fd", NULL};
    PyObject *path PCC_PY_OWNED(pcc_py_drop) = NULL;
    bool writable = false;
    int fd = -1;
    struct pcc_io_options options = {.engine = PCC_IO_PWRITE};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O&|$O&O&O&i:Volume", names, PyUnicode_FSConverter, &path, pcc_py_bool,
            &writable, pcc_py_bool, &options.allow_buffered, pcc_py_engine, &options.engine, &fd) ||
        !pcc_py_require(kwargs, &names[1], 1))
        return NULL;
    struct pcc_volume *volume = NULL;
    int result;
    const char *name = PyBytes_AsString(path);
    PCC_PY_UNLOCKED(result = fd < 0 ? pcc_volume_open_at(name, writable, &options, &volume)
                                    : pcc_volume_open_fd(fd, name, writable, &options, &volume));
    return result < 0 ? pcc_py_raise(pcc_py_state_of(type), result, name)
                      : pcc_py_object_new(type, "Volume", 0, volume, volume_close);
}

/* -- what it says ------------------------------------------------------------------------------ */

/* The largest payload that still fits a slot beside its manifest. */
static uint64_t payload_capacity(const struct pcc_geometry *geometry)
{
    uint64_t low = 0;
    uint64_t high = geometry->slot_stride_bytes;
    while (low < high) {
        uint64_t middle = low + (high - low + 1) / 2;
        if (pcc_geometry_fits(geometry, middle, false))
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* For the format y#. */
#define ID_BYTES(id) (const char *)(id), (Py_ssize_t)sizeof(id)

static PyObject *info_values(struct pcc_volume *volume)
{
    struct pcc_record record;
    struct pcc_volume_health health;
    uint32_t free_slots;
    bool stopped;
    Py_BEGIN_ALLOW_THREADS pcc_volume_record(volume, &record);
    health = pcc_volume_health(volume);
    free_slots = pcc_volume_free_slots(volume);
    stopped = pcc_volume_stopped(volume);
    Py_END_ALLOW_THREADS struct pcc_geometry geometry = pcc_volume_geometry(volume);
    PyObject *job = PyUnicode_DecodeUTF8(record.job, (Py_ssize_t)record.job_bytes, "replace");
    if (job == NULL)
        return NULL;
    return Py_BuildValue(
        "(y#NIIIIIIKKKKKKNNIIIINy#(Ky#y#))", (const char *)record.volume_uuid,
        (Py_ssize_t)sizeof(record.volume_uuid), job, record.uid, record.rank, record.world_size,
        record.slot_count, record.keep, record.block_bytes, geometry.slot_stride_bytes,
        payload_capacity(&geometry), geometry.volume_bytes, record.record_number,
        record.next_sequence, record.incarnation, PyBool_FromLong(record.done != 0),
        PyBool_FromLong(stopped), free_slots, health.valid_replicas, health.repaired_replicas,
        health.damaged_records, PyBool_FromLong(record.record_lost != 0), ID_BYTES(record.start_id),
        record.promise.number, ID_BYTES(record.promise.start_id),
        ID_BYTES(record.promise.list_digest));
}

static PyObject *volume_info(PyObject *self, PyObject *Py_UNUSED(unused))
{
    PCC_PY_ENTER();
    return pcc_py_result(pcc_py_state_of(Py_TYPE(self)), PCC_PY_VOLUME_INFO, info_values(handle));
}

static PyObject *entry_values(uint32_t slot, const struct pcc_slot_entry *entry)
{
    if (entry->state != PCC_SLOT_DURABLE)
        return Py_BuildValue("(IIiiiiiiiiiyy)", slot, entry->flags, 0, 0, 0, 0, 0, 0, 0, 0, 0, "",
                             "");
    return Py_BuildValue("(IIKLKIKKKKKy#y#)", slot, entry->flags, entry->sequence, entry->step,
                         entry->incarnation, entry->world_size, entry->payload_bytes,
                         entry->tree_offset_bytes, entry->tree_bytes, entry->wall_ns,
                         entry->base_sequence, ID_BYTES(entry->start_id),
                         ID_BYTES(entry->manifest_digest));
}

static PyObject *volume_table(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct pcc_record record;
    PCC_PY_CALL(pcc_volume_record(handle, &record));
    struct pcc_py_state *state = pcc_py_state_of(Py_TYPE(self));
    PyObject *table = PyList_New(0);
    for (uint32_t slot = 0; table != NULL && slot < record.slot_count; slot++) {
        pcc_py_append(&table, pcc_py_result(state, PCC_PY_SLOT_ENTRY,
                                            entry_values(slot, &record.slots[slot])));
    }
    return table;
}

PCC_PY_CALLS(volume_require_in_place, PCC_PY_RETURN_DONE, pcc_volume_in_place)

PCC_PY_ANSWERS(volume_engine, void, PyUnicode_FromString(pcc_volume_io(handle)->name))

/* close() only marks it while another thread, or a tenant, uses it. */
static PyObject *volume_closed(PyObject *self, void *Py_UNUSED(unused))
{
    return PyBool_FromLong(pcc_py_lease(self)->handle == NULL);
}

/* -- how fast it may be: waits for no disk ------------------------------------------------------
 */

static PyObject *volume_limit(PyObject *self, PyObject *number)
{
    PCC_PY_NUMBER(bytes_per_second, number);
    PCC_PY_RETURN_NONE(pcc_io_limit(pcc_volume_io(handle), bytes_per_second));
}

PCC_PY_ANSWERS(volume_bytes_per_second, void,
               PyLong_FromUnsignedLongLong(pcc_io_limit_of(pcc_volume_io(handle))))

/* -- what changes its record: blocks for a durable write --------------------------------------- */

static PyObject *volume_flag(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "set", "clear", "now", NULL};
    uint64_t sequence;
    uint32_t set = 0;
    uint32_t clear = 0;
    bool now = false;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$O&O&O&:flag", names, pcc_py_u64, &sequence,
                                     pcc_py_u32, &set, pcc_py_u32, &clear, pcc_py_bool, &now))
        return NULL;
    PCC_PY_RETURN_DONE(pcc_volume_flag(handle, sequence, set, clear, now));
}

static PyObject *volume_spare(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "spared", NULL};
    uint64_t sequence;
    bool spared;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:spare", names, pcc_py_u64, &sequence,
                                     pcc_py_bool, &spared))
        return NULL;
    PCC_PY_RETURN_DONE(pcc_volume_spare(handle, sequence, spared));
}

static PyObject *volume_begin_incarnation(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"incarnation", "world_size", "start", NULL};
    uint64_t incarnation;
    uint32_t world_size;
    uint8_t start_id[PCC_UUID_BYTES] = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|O&:begin_incarnation", names, pcc_py_u64,
                                     &incarnation, pcc_py_u32, &world_size, pcc_py_id, start_id))
        return NULL;
    PCC_PY_RETURN_DONE(pcc_volume_begin_incarnation(handle, incarnation, start_id, world_size));
}

static PyObject *volume_promise(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"number", "start", "list_digest", NULL};
    struct pcc_promise promise = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&:promise", names, pcc_py_u64,
                                     &promise.number, pcc_py_id, promise.start_id, pcc_py_id,
                                     promise.list_digest))
        return NULL;
    PCC_PY_RETURN_DONE(pcc_volume_promise(handle, &promise));
}

static PyObject *volume_finish(PyObject *self, PyObject *number)
{
    uint32_t keep;
    if (!pcc_py_u32(number, &keep))
        return NULL;
    PCC_PY_RETURN_DONE(pcc_volume_finish(handle, keep));
}

PCC_PY_CALLS(volume_recycle, PCC_PY_RETURN_DONE, pcc_volume_recycle)

/* Fills `group` from a sequence of integers; false with an exception set. */
static bool given_up_from(PyObject *sequences, struct pcc_volume_group *group)
{
    PyObject *fast PCC_PY_OWNED(pcc_py_drop) = PySequence_List(sequences);
    if (fast == NULL)
        return false;
    const Py_ssize_t count = PyList_Size(fast);
    if (count > (Py_ssize_t)PCC_GIVEN_UP_MAX) {
        PyErr_Format(PyExc_ValueError, "more than %u sequences are given up", PCC_GIVEN_UP_MAX);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (!pcc_py_u64(PyList_GetItem(fast, i), &group->given_up[i]))
            return false;
    group->given_up_count = (uint32_t)count;
    return true;
}

static PyObject *volume_set_group(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"oldest", "newest", "given_up", NULL};
    struct pcc_volume_group group = {0};
    PyObject *given_up;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$O&O&O:set_group", names, pcc_py_u64,
                                     &group.oldest, pcc_py_u64, &group.newest, &given_up) ||
        !pcc_py_require(kwargs, names, 3) || !given_up_from(given_up, &group))
        return NULL;
    PCC_PY_RETURN_DONE(pcc_volume_set_group(handle, &group));
}

PCC_PY_CALLS(volume_has_expendable, PCC_PY_RETURN_BOOL, pcc_volume_has_expendable)
PCC_PY_CALLS(volume_is_full, PCC_PY_RETURN_BOOL, pcc_volume_is_full)

/* -- verified reads of one checkpoint ---------------------------------------------------------- */

static bool within_payload(const struct pcc_load *load, uint64_t offset_bytes,
                           uint64_t length_bytes)
{
    uint64_t payload_bytes = pcc_load_entry(load)->payload_bytes;
    if (pcc_is_within(offset_bytes, length_bytes, payload_bytes))
        return true;
    PyErr_Format(PyExc_ValueError, "bytes %llu..+%llu lie outside of the payload of %llu bytes",
                 (unsigned long long)offset_bytes, (unsigned long long)length_bytes,
                 (unsigned long long)payload_bytes);
    return false;
}

/* NULL with an exception. */
static struct pcc_load *load_open(PyObject *self, struct pcc_volume *volume, uint64_t sequence)
{
    struct pcc_load *load = NULL;
    int result;
    PCC_PY_UNLOCKED(result = pcc_load_open(volume, sequence, &load));
    if (result < 0)
        pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), result, NULL);
    return load;
}

static void load_close(struct pcc_load **load)
{
    PCC_PY_UNLOCKED(pcc_load_close(*load));
}

/* In a method: a checkpoint, open until the end of the block. */
#define LOAD_OPEN(load, sequence)                                                                  \
    PCC_PY_ENTER();                                                                                \
    struct pcc_load *load PCC_PY_OWNED(load_close) = load_open(self, handle, sequence);            \
    if (load == NULL)                                                                              \
        return NULL;

static PyObject *volume_own_bytes(PyObject *self, PyObject *number)
{
    PCC_PY_NUMBER(sequence, number);
    LOAD_OPEN(load, sequence);
    return PyLong_FromUnsignedLongLong(pcc_load_own_bytes(load));
}

static PyObject *volume_name(PyObject *self, PyObject *number)
{
    PCC_PY_NUMBER(sequence, number);
    LOAD_OPEN(load, sequence);
    const struct pcc_manifest_notes *notes = &pcc_load_manifest(load)->notes;
    return Py_BuildValue("(KKK)", notes->name_base, notes->name_descents, notes->name_row);
}

static PyObject *volume_manifest(PyObject *self, PyObject *number)
{
    PCC_PY_NUMBER(sequence, number);
    LOAD_OPEN(load, sequence);
    return PyBytes_FromStringAndSize((const char *)pcc_load_manifest(load),
                                     (Py_ssize_t)pcc_load_entry(load)->manifest_bytes);
}

static PyObject *volume_read(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "offset", "length", NULL};
    uint64_t sequence, offset_bytes, length_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&:read", names, pcc_py_u64, &sequence,
                                     pcc_py_u64, &offset_bytes, pcc_py_u64, &length_bytes))
        return NULL;
    LOAD_OPEN(load, sequence);
    if (!within_payload(load, offset_bytes, length_bytes))
        return NULL;
    PyObject *bytes PCC_PY_OWNED(pcc_py_drop) =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length_bytes);
    if (bytes == NULL || length_bytes == 0)
        return Py_XNewRef(bytes);
    struct pcc_range target = {
        .address = (uintptr_t)PyBytes_AsString(bytes),
        .offset_bytes = offset_bytes,
        .length_bytes = length_bytes,
    };
    int result;
    uint32_t chunk_bytes = pcc_load_chunk_bytes(load, 0); /* no more than what is asked for */
    PCC_PY_UNLOCKED(result = pcc_load_ranges(load, &target, 1, chunk_bytes, 0));
    return result == 0 ? Py_NewRef(bytes) : pcc_py_done(self, result);
}

static PyObject *volume_read_into(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "ranges", "threads", "chunk_bytes", NULL};
    uint64_t sequence;
    uint32_t threads = THREADS_DEFAULT;
    uint32_t chunk_bytes = CHUNK_BYTES_DEFAULT;
    struct pcc_py_ranges ranges PCC_PY_OWNED(pcc_py_ranges_done) = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|O&O&:read_into", names, pcc_py_u64,
                                     &sequence, pcc_py_ranges, &ranges, pcc_py_u32, &threads,
                                     pcc_py_u32, &chunk_bytes))
        return NULL;
    if (threads > THREADS_MAX)
        return PyErr_Format(PyExc_ValueError, "threads must be at most %u", THREADS_MAX);
    LOAD_OPEN(load, sequence);
    uint64_t end_bytes = ranges.count ? pcc_range_end(&ranges.items[ranges.count - 1]) : 0;
    if (!within_payload(load, end_bytes, 0))
        return NULL;
    int result;
    chunk_bytes = pcc_load_chunk_bytes(load, chunk_bytes);
    PCC_PY_UNLOCKED(result =
                        pcc_load_ranges(load, ranges.items, ranges.count, chunk_bytes, threads));
    return pcc_py_done(self, result);
}

static PyObject *volume_read_blocks(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "offset", "length", "into", NULL};
    uint64_t sequence, offset_bytes, length_bytes;
    Py_buffer into PCC_PY_OWNED(PyBuffer_Release) = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&w*:read_blocks", names, pcc_py_u64,
                                     &sequence, pcc_py_u64, &offset_bytes, pcc_py_u64,
                                     &length_bytes, &into))
        return NULL;
    LOAD_OPEN(load, sequence);
    if (!within_payload(load, offset_bytes, length_bytes))
        return NULL;
    if ((uint64_t)into.len < pcc_align_up(length_bytes, PCC_IO_ALIGN) ||
        (uintptr_t)into.buf % PCC_IO_ALIGN != 0)
        return PyErr_Format(PyExc_ValueError, "into is not aligned, or has no room");
    int result;
    PCC_PY_UNLOCKED(result = pcc_load_read(load, into.buf, offset_bytes, length_bytes));
    return pcc_py_done(self, result);
}

static PyObject *volume_verify(PyObject *self, PyObject *number)
{
    PCC_PY_NUMBER(sequence, number);
    LOAD_OPEN(load, sequence);
    uint64_t payload_bytes = pcc_load_entry(load)->payload_bytes;
    uint32_t chunk_bytes = pcc_load_chunk_bytes(load, CHUNK_BYTES_DEFAULT);
    int result;
    PCC_PY_UNLOCKED(
        result = pcc_load_stream(load, 0, payload_bytes, chunk_bytes, THREADS_DEFAULT, NULL, NULL));
    return pcc_py_done(self, result);
}

static PyGetSetDef properties[] = {
    {"engine", volume_engine, NULL, "What reads and writes it.", NULL},
    {"bytes_per_second", volume_bytes_per_second, NULL, "Its limit; 0: none.", NULL},
    {"closed", volume_closed, NULL, "Whether its file is closed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"info", volume_info, METH_NOARGS, NULL},
    {"table", volume_table, METH_NOARGS, NULL},
    {"require_in_place", volume_require_in_place, METH_NOARGS, NULL},
    {"limit", volume_limit, METH_O, NULL},
    PCC_PY_METHOD("flag", volume_flag),
    PCC_PY_METHOD("spare", volume_spare),
    PCC_PY_METHOD("begin_incarnation", volume_begin_incarnation),
    PCC_PY_METHOD("promise", volume_promise),
    {"finish", volume_finish, METH_O, NULL},
    PCC_PY_METHOD("set_group", volume_set_group),
    {"has_expendable", volume_has_expendable, METH_NOARGS, NULL},
    {"is_full", volume_is_full, METH_NOARGS, NULL},
    {"recycle", volume_recycle, METH_NOARGS, NULL},
    {"own_bytes", volume_own_bytes, METH_O, NULL},
    {"name", volume_name, METH_O, NULL},
    {"manifest", volume_manifest, METH_O, NULL},
    PCC_PY_METHOD("read", volume_read),
    PCC_PY_METHOD("read_into", volume_read_into),
    PCC_PY_METHOD("read_blocks", volume_read_blocks),
    {"verify", volume_verify, METH_O, NULL},
    {"close", pcc_py_object_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const struct pcc_py_type pcc_py_volume = {
    .name = "pccheck_native._core.Volume",
    .doc = "The storage of one (uid, job, rank).",
    .make = volume_new,
    .methods = methods,
    .properties = properties,
};
