#include "core.h"

/* What is wrong, behind the path when there is one. */
static PyObject *message_new(int code, PyObject *name, const char *path)
{
    if (path == NULL)
        return PyUnicode_FromFormat("%s (%U)", pcc_error_text(code), name);
    PyObject *shown PCC_PY_OWNED(pcc_py_drop) = PyUnicode_DecodeFSDefault(path);
    return shown != NULL ? PyUnicode_FromFormat("%U: %s (%U)", shown, pcc_error_text(code), name)
                         : NULL;
}

static void native_error_raise(PyObject *type, int code, const char *path)
{
    PyObject *name PCC_PY_OWNED(pcc_py_drop) = PyUnicode_FromString(pcc_error_name(code));
    PyObject *number PCC_PY_OWNED(pcc_py_drop) = name ? PyLong_FromLong(code) : NULL;
    PyObject *message PCC_PY_OWNED(pcc_py_drop) = number ? message_new(code, name, path) : NULL;
    PyObject *error PCC_PY_OWNED(pcc_py_drop) =
        message ? PyObject_CallFunctionObjArgs(type, message, NULL) : NULL;
    if (error != NULL && PyObject_SetAttrString(error, "code", number) == 0 &&
        PyObject_SetAttrString(error, "code_name", name) == 0)
        PyErr_SetObject(type, error);
}

PyObject *pcc_py_raise(struct pcc_py_state *state, int code, const char *path)
{
    PCC_ASSERT(code < 0);
    if (code > -PCC_E_FIRST) {
        errno = -code;
        return PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    }
    native_error_raise(state->native_error, code, path);
    return NULL;
}

PyObject *pcc_py_done(PyObject *self, int code)
{
    if (code < 0)
        return pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), code, NULL);
    Py_RETURN_NONE;
}

int pcc_py_errors_add(PyObject *module, struct pcc_py_state *state)
{
    PyObject *defaults PCC_PY_OWNED(pcc_py_drop) =
        Py_BuildValue("{s:i,s:s}", "code", 0, "code_name", "");
    if (defaults == NULL)
        return -1;
    state->native_error = PyErr_NewExceptionWithDoc(
        "pccheck_native._core.NativeError",
        "What the core found itself. `code` is negative, `code_name` is its name, e.g. DAMAGED.",
        NULL, defaults);
    if (state->native_error == NULL)
        return -1;
    return PyModule_AddObjectRef(module, "NativeError", state->native_error);
}
