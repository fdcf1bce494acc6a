/* Storage before there is a volume: the engines, a new volume. */
#include "core.h"
#include "disk/pcc_volume.h"
#include "io/pcc_io.h"

PyObject *pcc_py_engines(void)
{
    PyObject *engines PCC_PY_OWNED(pcc_py_drop) = PyTuple_New(PCC_IO_ENGINES);
    for (int i = 0; engines != NULL && i < PCC_IO_ENGINES; i++) {
        const struct pcc_io_words *words = pcc_io_words_of((enum pcc_io_engine)i);
        PyObject *item = Py_BuildValue("(sss)", words->name, words->how, words->refusal);
        if (item == NULL || PyTuple_SetItem(engines, i, item) < 0)
            return NULL;
    }
    return Py_XNewRef(engines);
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
                                     pcc_py_u64, &stride_bytes))
        return NULL;
    struct pcc_geometry geometry;
    int result = pcc_geometry_plan(capacity_bytes, slots, block_bytes, stride_bytes, &geometry);
    if (result < 0)
        return pcc_py_raise(PyModule_GetState(module), result, NULL);
    return PyLong_FromUnsignedLongLong(geometry.volume_bytes);
}

PyObject *pcc_py_create_volume(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path",           "uid",         "job",         "rank",
                            "world_size",     "slots",       "keep",        "payload_capacity",
                            "next_sequence",  "incarnation", "block_bytes", "record_stride",
                            "allow_buffered", "start",       NULL};
    struct pcc_volume_spec spec = {
        .record_stride_bytes = PCC_RECORD_STRIDE_DEFAULT,
        .block_bytes = PCC_BLOCK_BYTES_DEFAULT,
        .next_sequence = 1,
    };
    PyObject *path PCC_PY_OWNED(pcc_py_drop) = NULL;
    bool allow_buffered = false;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O&|$O&sO&O&O&O&O&O&O&O&O&O&O&:create_volume", names,
            PyUnicode_FSConverter, &path, pcc_py_u32, &spec.uid, &spec.job, pcc_py_u32, &spec.rank,
            pcc_py_u32, &spec.world_size, pcc_py_u32, &spec.slot_count, pcc_py_u32, &spec.keep,
            pcc_py_u64, &spec.payload_capacity_bytes, pcc_py_u64, &spec.next_sequence, pcc_py_u64,
            &spec.incarnation, pcc_py_u32, &spec.block_bytes, pcc_py_u64, &spec.record_stride_bytes,
            pcc_py_bool, &allow_buffered, pcc_py_id, spec.start_id) ||
        !pcc_py_require(kwargs, &names[1], 7))
        return NULL;
    int result;
    const char *name = PyBytes_AsString(path);
    PCC_PY_UNLOCKED(result = pcc_volume_create(name, &spec, allow_buffered));
    return result < 0 ? pcc_py_raise(PyModule_GetState(module), result, name) : Py_NewRef(Py_None);
}
