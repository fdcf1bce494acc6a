#include "core.h"

static const struct {
    int code;
    const char *text;
} texts[] = {
    {PCC_E_NOT_A_VOLUME, "no valid commit record: not a volume"},
    {PCC_E_DAMAGED, "a checksum does not fit: damaged"},
    {PCC_E_NEWER_FORMAT, "written by a later version of the volume format"},
    {PCC_E_TRUNCATED, "the file is shorter than its records say"},
    {PCC_E_LOCKED, "another process has the volume open for writing"},
    {PCC_E_NO_SLOT, "no free slot"},
    {PCC_E_NO_LANE, "as many checkpoints are in flight as the volume allows"},
    {PCC_E_TOO_LARGE, "the checkpoint does not fit into a slot"},
    {PCC_E_STOPPED, "a commit record could not be written: nothing is published until the volume "
                    "is opened again"},
    {PCC_E_ABORTED, "given up on request"},
    {PCC_E_BAD_PEER, "shared memory holds what no honest peer writes"},
    {PCC_E_NO_MEMORY, "the DRAM budget is used up"},
    {PCC_E_SHUT_DOWN, "it is being closed"},
    {PCC_E_UNSUPPORTED, "the file system or the kernel lacks what is needed"},
    {PCC_E_NO_DRIVER, "there is no CUDA driver that can be used"},
    {PCC_E_DEVICE, "the CUDA driver refused or failed a call"},
    {PCC_E_DEVICE_LOST, "the GPU's context is gone for this process"},
    {PCC_E_BAD_HANDLE, "this GPU memory cannot be shared with the daemon"},
    {PCC_E_UNREADABLE, "the disk could not read it"},
    {PCC_E_REMOVED, "the file was removed or moved away while it was open"},
    {PCC_E_REPLACED, "another file was put in the place of the open one"},
};

static const char *text_of(int code)
{
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        if (texts[i].code == code) {
            return texts[i].text;
        }
    }
    return "failed";
}

static PyObject *native_error(struct pcc_py_state *state, int code, const char *path)
{
    const char *name = pcc_error_name(code);
    PyObject *message = PyUnicode_FromFormat("%s (%s)", text_of(-code), name);
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
