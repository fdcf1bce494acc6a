/* pccheck_native._core: the C core as Python sees it. _core.pyi is its contract. */
#include "core.h"
#include "disk/pcc_format.h"
#include "disk/pcc_volume.h"
#include "shared/pcc_shared.h"

static int add_constants(PyObject *module)
{
    static const struct {
        const char *name;
        long value;
    } constants[] = {
        {"FORMAT_VERSION", PCC_FORMAT_VERSION},
        {"SNAPSHOTS", PCC_SNAPSHOTS},
        {"SLOTS_MAX", PCC_SLOTS_MAX},
        {"GIVEN_UP_MAX", PCC_GIVEN_UP_MAX},
        {"JOB_BYTES_MAX", PCC_JOB_BYTES_MAX},
        {"BLOCK_BYTES_DEFAULT", PCC_BLOCK_BYTES_DEFAULT},
        {"DEVICES", PCC_DEVICES},
        {"EXPOSURE_BYTES_MAX", PCC_EXPOSURE_BYTES_MAX},
        {"SLOT_PROTECTED", PCC_SLOT_PROTECTED},
        {"SLOT_PINNED", PCC_SLOT_PINNED},
        {"SLOT_QUARANTINED", PCC_SLOT_QUARANTINED},
        {"SLOT_DAMAGED", PCC_SLOT_DAMAGED},
        {"WORD_IDLE", PCC_WORD_IDLE},
        {"WORD_REQUESTED", PCC_WORD_REQUESTED},
        {"WORD_COPYING", PCC_WORD_COPYING},
        {"WORD_COPIED", PCC_WORD_COPIED},
        {"WORD_ABANDONED", PCC_WORD_ABANDONED},
        {"WORD_REFUSED", PCC_WORD_REFUSED},
    };
    for (size_t i = 0; i < sizeof(constants) / sizeof(constants[0]); i++) {
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Adds a type to the module; *kept (may be NULL) gets a reference of its own. */
static int add_type(PyObject *module, PyTypeObject *type, PyTypeObject **kept)
{
    if (type == NULL) {
        return -1;
    }
    int result = PyModule_AddType(module, type);
    if (result == 0 && kept != NULL) {
        *kept = type;
    } else {
        Py_DECREF(type);
    }
    return result;
}

static int module_exec(PyObject *module)
{
    struct pcc_py_state *state = PyModule_GetState(module);
    if (pcc_py_errors_add(module, state) < 0 || pcc_py_results_add(module, state) < 0 ||
        add_constants(module) < 0) {
        return -1;
    }
    if (add_type(module, pcc_py_volume_type(module), &state->volume_type) < 0 ||
        add_type(module, pcc_py_pool_type(module), &state->pool_type) < 0 ||
        add_type(module, pcc_py_events_type(module), &state->events_type) < 0 ||
        add_type(module, pcc_py_gpus_type(module), &state->gpus_type) < 0 ||
        add_type(module, pcc_py_channel_type(module), NULL) < 0 ||
        add_type(module, pcc_py_link_type(module), NULL) < 0) {
        return -1;
    }
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct pcc_py_state *state = PyModule_GetState(module);
    Py_VISIT(state->native_error);
    Py_VISIT(state->volume_type);
    Py_VISIT(state->pool_type);
    Py_VISIT(state->events_type);
    Py_VISIT(state->gpus_type);
    for (int i = 0; i < PCC_PY_RESULT_COUNT; i++) {
        Py_VISIT(state->results[i]);
    }
    return 0;
}

static int module_clear(PyObject *module)
{
    struct pcc_py_state *state = PyModule_GetState(module);
    Py_CLEAR(state->native_error);
    Py_CLEAR(state->volume_type);
    Py_CLEAR(state->pool_type);
    Py_CLEAR(state->events_type);
    Py_CLEAR(state->gpus_type);
    for (int i = 0; i < PCC_PY_RESULT_COUNT; i++) {
        Py_CLEAR(state->results[i]);
    }
    return 0;
}

static PyMethodDef functions[] = {
    {"volume_bytes_for", PCC_PY_METHOD(pcc_py_volume_bytes_for), METH_VARARGS | METH_KEYWORDS,
     "The size of a volume of that many slots for payloads of that size."},
    {"create_volume", PCC_PY_METHOD(pcc_py_create_volume), METH_VARARGS | METH_KEYWORDS,
     "Makes a volume, all its room taken, durable and under its name on return."},
    {"kept_state", pcc_py_kept_state, METH_VARARGS,
     "What a state memfd says of its volume and of what was copied."},
    {"measure_engine", PCC_PY_METHOD(pcc_py_measure_engine), METH_VARARGS | METH_KEYWORDS,
     "Seconds for which an engine overwrites a file and flushes it."},
    {"cuda_missing", pcc_py_cuda_missing, METH_NOARGS,
     "Why there is no usable CUDA driver; \"\" when there is one."},
    {"cuda_driver", pcc_py_cuda_driver, METH_NOARGS, "(version, GPUs) of the CUDA driver."},
    {"tensor_geometry", pcc_py_tensor_geometry, METH_VARARGS,
     "Where tensors lie, their shapes, strides and types, for same_geometry()."},
    {"same_geometry", pcc_py_same_geometry, METH_VARARGS,
     "Whether tensors are as tensor_geometry() saw them; False when in doubt."},
    {"same_items", pcc_py_same_items, METH_VARARGS,
     "Whether dicts hold these keys and values, each dict itself behind its own."},
    {"same_values", pcc_py_same_values, METH_VARARGS,
     "Whether the values of some keys of every dict are these objects."},
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
