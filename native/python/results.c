#include "core.h"

static const struct {
    const char *name;
    const char *fields;
} shapes[PCC_PY_RESULT_COUNT] = {
    [PCC_PY_SLOT_ENTRY] = {"SlotEntry",
                           "slot flags sequence step incarnation world_size payload_bytes "
                           "tree_offset tree_bytes wall_ns base start digest"},
    [PCC_PY_VOLUME_INFO] = {"VolumeInfo",
                            "uuid job uid rank world_size slots keep block_bytes slot_bytes "
                            "payload_capacity volume_bytes record_number next_sequence "
                            "incarnation done stopped free_slots valid_replicas "
                            "repaired_replicas damaged_records record_lost start promise"},
    [PCC_PY_SAVE_TIMES] = {"SaveTimes", "begin first_write sealed written flushed durable ended"},
    [PCC_PY_EVENT] = {"Event", "kind tenant session id sequence slot error error_name stage "
                               "rehomed payload_bytes copied_bytes written_bytes times request"},
    [PCC_PY_SAVE_REQUEST] =
        {"SaveRequest",
         "step payload_bytes tree_offset tree_bytes skip level map held_at_ns held_ns "
         "base turn descents row interval division taken_ns cause argument"},
    [PCC_PY_GPU_INFO] = {"GpuInfo", "uuid name lost copied_bytes copies failures"},
    [PCC_PY_TENANT_USAGE] =
        {"TenantUsage",
         "bytes free_chunks granted_chunks full_chunks cached_chunks "
         "lent_chunks left_chunks in_flight pinned_bytes exposed_bytes mappings pieces "
         "parked"},
    [PCC_PY_CLIENT_STATE] = {"ClientState",
                             "word outcome sequence newer source_read error error_name fault "
                             "cause stage code argument"},
    [PCC_PY_KEPT_STATE] = {"KeptState", "uuid uid job rank chunk_bytes block_bytes lanes copied"},
};

/* collections.namedtuple and not PyStructSequence: callers rely on the type's keywords, _replace
 * and _asdict, which the .pyi promises. */
int pcc_py_results_add(PyObject *module, struct pcc_py_state *state)
{
    PyObject *collections PCC_PY_OWNED(pcc_py_drop) = PyImport_ImportModule("collections");
    PyObject *make PCC_PY_OWNED(pcc_py_drop) =
        collections ? PyObject_GetAttrString(collections, "namedtuple") : NULL;
    PyObject *keywords PCC_PY_OWNED(pcc_py_drop) =
        make ? Py_BuildValue("{s:s}", "module", "pccheck_native._core") : NULL;
    if (keywords == NULL)
        return -1;
    for (int kind = 0; kind < PCC_PY_RESULT_COUNT; kind++) {
        PyObject *args PCC_PY_OWNED(pcc_py_drop) =
            Py_BuildValue("(ss)", shapes[kind].name, shapes[kind].fields);
        state->results[kind] = args ? PyObject_Call(make, args, keywords) : NULL;
        if (state->results[kind] == NULL ||
            PyModule_AddObjectRef(module, shapes[kind].name, state->results[kind]) < 0)
            return -1;
    }
    return 0;
}

PyObject *pcc_py_result(struct pcc_py_state *state, enum pcc_py_result kind, PyObject *values)
{
    if (values == NULL)
        return NULL;
    PyObject *result = PyObject_Call(state->results[kind], values, NULL);
    Py_DECREF(values);
    return result;
}

void pcc_py_append(PyObject **list, PyObject *item)
{
    if (item == NULL || PyList_Append(*list, item) < 0)
        Py_CLEAR(*list);
    Py_XDECREF(item);
}
