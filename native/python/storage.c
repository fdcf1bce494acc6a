/* Storage before there is a volume: the engine that is the fastest in a directory, a new volume. */
#include "core.h"
#include "pcc_io.h"
#include "pcc_volume.h"

/* {engine: bytes per second, or the name of what it failed with}; without those not measured. */
static PyObject *measured_dict(const struct pcc_io_choice *choice)
{
    PyObject *measured = PyDict_New();
    for (uint32_t i = 0; measured != NULL && i < PCC_IO_ENGINES; i++) {
        const int error = choice->measured[i].error;
        const uint64_t speed = choice->measured[i].bytes_per_second;
        if (error == 0 && speed == 0) {
            continue;
        }
        PyObject *value = error != 0 ? PyUnicode_FromString(pcc_error_name(error))
                                     : PyLong_FromUnsignedLongLong(speed);
        if (value == NULL ||
            PyDict_SetItemString(measured, pcc_io_engine_name((enum pcc_io_engine)i), value) < 0) {
            Py_CLEAR(measured);
        }
        Py_XDECREF(value);
    }
    return measured;
}

PyObject *pcc_py_choose_engine(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"directory", "allow_buffered", NULL};
    PyObject *directory = NULL;
    int allow_buffered = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$p:choose_engine", names,
                                     PyUnicode_FSConverter, &directory, &allow_buffered)) {
        return NULL;
    }
    struct pcc_py_state *state = PyModule_GetState(module);
    struct pcc_io_choice choice;
    int result;
    const char *name = PyBytes_AsString(directory);
    PCC_PY_UNLOCKED(result = pcc_io_choose_in(name, allow_buffered != 0, &choice));
    PyObject *values = NULL;
    if (result < 0) {
        PyObject *shown = PyUnicode_DecodeFSDefault(name);
        if (shown != NULL) {
            pcc_py_raise(state, result, shown);
            Py_DECREF(shown);
        }
    } else {
        PyObject *measured = measured_dict(&choice);
        values = measured == NULL ? NULL
                                  : Py_BuildValue("(sIKN)", pcc_io_engine_name(choice.engine),
                                                  choice.rounds, choice.round_bytes, measured);
    }
    Py_DECREF(directory);
    return pcc_py_result(state, PCC_PY_ENGINE_CHOICE, values);
}

PyObject *pcc_py_volume_bytes_for(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"payload_capacity", "slots", "block_bytes", "record_stride", NULL};
    uint64_t capacity_bytes;
    uint64_t stride_bytes = PCC_RECORD_STRIDE_DEFAULT;
    uint32_t slots;
    uint32_t block_bytes = PCC_BLOCK_BYTES_DEFAULT;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|O&O&:volume_bytes_for", names, pcc_py_u64,
                                     &capacity_bytes, pcc_py_u32, &slots, pcc_py_u32, &block_bytes,
                                     pcc_py_u64, &stride_bytes)) {
        return NULL;
    }
    struct pcc_geometry geometry;
    int result = pcc_geometry_plan(capacity_bytes, slots, block_bytes, stride_bytes, &geometry);
    if (result < 0) {
        return pcc_py_raise(PyModule_GetState(module), result, NULL);
    }
    return PyLong_FromUnsignedLongLong(geometry.volume_bytes);
}

PyObject *pcc_py_create_volume(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path",           "uid",         "job",         "rank",
                            "world_size",     "slots",       "keep",        "payload_capacity",
                            "next_sequence",  "incarnation", "block_bytes", "record_stride",
                            "allow_buffered", NULL};
    struct pcc_volume_spec spec = {
        .record_stride_bytes = PCC_RECORD_STRIDE_DEFAULT,
        .block_bytes = PCC_BLOCK_BYTES_DEFAULT,
        .next_sequence = 1,
    };
    PyObject *path = NULL;
    int allow_buffered = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O&|$O&sO&O&O&O&O&O&O&O&O&p:create_volume", names, PyUnicode_FSConverter,
            &path, pcc_py_u32, &spec.uid, &spec.job, pcc_py_u32, &spec.rank, pcc_py_u32,
            &spec.world_size, pcc_py_u32, &spec.slot_count, pcc_py_u32, &spec.keep, pcc_py_u64,
            &spec.payload_capacity_bytes, pcc_py_u64, &spec.next_sequence, pcc_py_u64,
            &spec.incarnation, pcc_py_u32, &spec.block_bytes, pcc_py_u64, &spec.record_stride_bytes,
            &allow_buffered)) {
        return NULL;
    }
    if (!pcc_py_require(kwargs, &names[1], 7)) {
        Py_DECREF(path);
        return NULL;
    }
    int result;
    const char *name = PyBytes_AsString(path);
    PCC_PY_UNLOCKED(result = pcc_volume_create(name, &spec, allow_buffered != 0));
    PyObject *done = NULL;
    if (result < 0) {
        PyObject *shown = PyUnicode_DecodeFSDefault(name);
        if (shown != NULL) {
            pcc_py_raise(PyModule_GetState(module), result, shown);
            Py_DECREF(shown);
        }
    } else {
        done = Py_NewRef(Py_None);
    }
    Py_DECREF(path);
    return done;
}
