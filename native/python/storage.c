/* Which storage engine is the fastest in a directory. */
#include "core.h"
#include "pcc_io.h"

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
