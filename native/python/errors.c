#include "core.h"

static PyObject *native_error(struct pcc_py_state *state, int code, const char *path)
{
    const char *name = pcc_error_name(code);
    PyObject *message = PyUnicode_FromFormat("%s (%s)", pcc_error_text(code), name);
    if (message != NULL && path != NULL) {
        PyObject *shown = PyUnicode_DecodeFSDefault(path);
        PyObject *alone = message;
        message = shown == NULL ? NULL : PyUnicode_FromFormat("%U: %U", shown, alone);
        Py_XDECREF(shown);
        Py_DECREF(alone);
    }
    if (message == NULL) {
        return NULL;
    }
    PyObject *error = PyObject_CallFunctionObjArgs(state->native_error, message, NULL);
    Py_DECREF(message);
    if (error == NULL) {
        return NULL;
    }
    PyObject *number = PyLong_FromLong(code);
    PyObject *text = PyUnicode_FromString(name);
    if (number == NULL || text == NULL || PyObject_SetAttrString(error, "code", number) < 0 ||
        PyObject_SetAttrString(error, "code_name", text) < 0) {
        Py_CLEAR(error);
    }
    Py_XDECREF(number);
    Py_XDECREF(text);
    return error;
}

PyObject *pcc_py_raise(struct pcc_py_state *state, int code, const char *path)
{
    PCC_ASSERT(code < 0);
    if (code > -PCC_E_FIRST) {
        errno = -code;
        return PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    }
    PyObject *error = native_error(state, code, path);
    if (error != NULL) {
        PyErr_SetObject(state->native_error, error);
        Py_DECREF(error);
    }
    return NULL;
}

PyObject *pcc_py_done(PyObject *self, int code)
{
    if (code < 0) {
        return pcc_py_raise(pcc_py_state_of(Py_TYPE(self)), code, NULL);
    }
    Py_RETURN_NONE;
}

int pcc_py_errors_add(PyObject *module, struct pcc_py_state *state)
{
    PyObject *defaults = Py_BuildValue("{s:i,s:s}", "code", 0, "code_name", "");
    if (defaults == NULL) {
        return -1;
    }
    state->native_error = PyErr_NewExceptionWithDoc(
        "pccheck_native._core.NativeError",
        "What the core found itself. `code` is negative, `code_name` is its name, e.g. DAMAGED.",
        NULL, defaults);
    Py_DECREF(defaults);
    if (state->native_error == NULL) {
        return -1;
    }
    return PyModule_AddObjectRef(module, "NativeError", state->native_error);
}
