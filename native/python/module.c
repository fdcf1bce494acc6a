/* pccheck_native._core: the C core as Python sees it. _core.pyi is its contract. */
#include "core.h"
#include "disk/pcc_format.h"
#include "disk/pcc_save.h"
#include "disk/pcc_volume.h"
#include "shared/pcc_shared.h"

static int add_constants(PyObject *module)
{
    static const struct {
        const char *name;
        long value;
    } constants[] = {
#define CONSTANT(name) {#name, PCC_##name}
        CONSTANT(FORMAT_VERSION),     CONSTANT(SNAPSHOTS),          CONSTANT(SLOTS_MAX),
        CONSTANT(GIVEN_UP_MAX),       CONSTANT(JOB_BYTES_MAX),      CONSTANT(DEVICES),
        CONSTANT(EXPOSURE_BYTES_MAX), CONSTANT(EXPOSED_PIECES_MAX), CONSTANT(DESCRIPTORS_MAX),
        CONSTANT(SLOT_IMAGE),         CONSTANT(SLOT_PROTECTED),     CONSTANT(SLOT_PINNED),
        CONSTANT(SLOT_QUARANTINED),   CONSTANT(SLOT_DAMAGED),       CONSTANT(SLOT_OFFERED),
        CONSTANT(SLOT_HEALTHY),       CONSTANT(SLOT_NOT_FINITE),    CONSTANT(SLOT_GLOBAL),
        CONSTANT(WORD_REQUESTED),     CONSTANT(WORD_COPYING),       CONSTANT(WORD_COPIED),
        CONSTANT(WORD_ABANDONED),     CONSTANT(WORD_REFUSED),       CONSTANT(LEVEL_DISK),
        CONSTANT(LEVEL_MEMORY),       CONSTANT(LEVEL_DEVICE),       CONSTANT(OUTCOME_GIVEN_UP),
        CONSTANT(CAUSE_REPLACED),     CONSTANT(CAUSE_OTHER_RANK),   CONSTANT(SAVES_PARKED),
#undef CONSTANT
    };
    for (size_t i = 0; i < sizeof(constants) / sizeof(constants[0]); i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0)
            return -1;
    PyObject *engines PCC_PY_OWNED(pcc_py_drop) = pcc_py_engines();
    if (PyModule_AddObjectRef(module, "ENGINES", engines) < 0)
        return -1;
#define FAILS(name, text) PyModule_AddIntConstant(module, "E_" #name, -PCC_E_##name) < 0 ||
    return PCC_CODES(FAILS) false ? -1 : 0;
#undef FAILS
}

static const struct pcc_py_type *const types[PCC_PY_TYPE_COUNT] = {
    [PCC_PY_VOLUME] = &pcc_py_volume, [PCC_PY_POOL] = &pcc_py_pool,
    [PCC_PY_EVENTS] = &pcc_py_events, [PCC_PY_GPUS] = &pcc_py_gpus,
    [PCC_PY_TENANT] = &pcc_py_tenant, [PCC_PY_CLIENT] = &pcc_py_client,
};

static PyTypeObject *type_new(PyObject *module, const struct pcc_py_type *type)
{
    PyType_Slot slots[] = {
        {Py_tp_new, (void *)type->make},
        {Py_tp_dealloc, (void *)pcc_py_object_dealloc},
        {Py_tp_methods, type->methods},
        {Py_tp_doc, (void *)(uintptr_t)type->doc},
        {type->properties != NULL ? Py_tp_getset : 0, type->properties},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = type->name,
        .basicsize = (int)(type->size_bytes != 0 ? type->size_bytes : sizeof(struct pcc_py_object)),
        .flags = Py_TPFLAGS_DEFAULT,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}

static int module_exec(PyObject *module)
{
    struct pcc_py_state *state = PyModule_GetState(module);
    if (pcc_py_errors_add(module, state) < 0 || pcc_py_results_add(module, state) < 0 ||
        add_constants(module) < 0)
        return -1;
    for (int i = 0; i < PCC_PY_TYPE_COUNT; i++) {
        state->types[i] = type_new(module, types[i]);
        if (state->types[i] == NULL || PyModule_AddType(module, state->types[i]) < 0)
            return -1;
    }
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct pcc_py_state *state = PyModule_GetState(module);
    Py_VISIT(state->native_error);
    for (int i = 0; i < PCC_PY_TYPE_COUNT; i++)
        Py_VISIT(state->types[i]);
    for (int i = 0; i < PCC_PY_RESULT_COUNT; i++)
        Py_VISIT(state->results[i]);
    return 0;
}

static int module_clear(PyObject *module)
{
    struct pcc_py_state *state = PyModule_GetState(module);
    Py_CLEAR(state->native_error);
    for (int i = 0; i < PCC_PY_TYPE_COUNT; i++)
        Py_CLEAR(state->types[i]);
    for (int i = 0; i < PCC_PY_RESULT_COUNT; i++)
        Py_CLEAR(state->results[i]);
    return 0;
}

static PyMethodDef functions[] = {
    PCC_PY_METHOD("volume_bytes_for", pcc_py_volume_bytes_for),
    PCC_PY_METHOD("create_volume", pcc_py_create_volume),
    {"manifest_facts", pcc_py_manifest_facts, METH_VARARGS, NULL},
    {"manifest_place", pcc_py_manifest_place, METH_VARARGS, NULL},
    {"kept_state", pcc_py_kept_state, METH_VARARGS, NULL},
    {"cuda_missing", pcc_py_cuda_missing, METH_NOARGS, NULL},
    {"cuda_driver", pcc_py_cuda_driver, METH_NOARGS, NULL},
    {"tensor_geometry", pcc_py_tensor_geometry, METH_VARARGS, NULL},
    {"same_geometry", pcc_py_same_geometry, METH_VARARGS, NULL},
    {"integers", pcc_py_integers, METH_VARARGS, NULL},
    {"same_items", pcc_py_same_items, METH_VARARGS, NULL},
    {"same_values", pcc_py_same_values, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "pccheck_native._core",
    .m_doc = "The data plane of PCcheck.",
    .m_size = sizeof(struct pcc_py_state),
    .m_methods = functions,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&module_def);
}
