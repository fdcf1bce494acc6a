/* Gpus, and what there is of a CUDA driver. */
#include "core.h"
#include "gpu/pcc_cuda.h"
#include "gpu/pcc_gpus.h"

#include <string.h>

#define HANDLE struct pcc_gpus
#define GPUS_MAX 64u /* that info() tells of */

/* -- the driver -------------------------------------------------------------------------------- */

PyObject *pcc_py_cuda_missing(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    const struct pcc_cuda *cuda;
    int result;
    PCC_PY_UNLOCKED(result = pcc_cuda_load(&cuda));
    const char *why = result < 0 ? pcc_cuda_missing() : "";
    return PyUnicode_DecodeUTF8(why, (Py_ssize_t)strlen(why), "replace");
}

/* -PCC_E_NO_DRIVER, -PCC_E_DEVICE. */
static int driver(int *version_out, int *count_out)
{
    const struct pcc_cuda *cuda;
    int result = pcc_cuda_load(&cuda);
    if (result == 0)
        result = pcc_cuda_code(cuda->driver_version(version_out));
    if (result == 0)
        result = pcc_cuda_code(cuda->device_count(count_out));
    return result;
}

PyObject *pcc_py_cuda_driver(PyObject *module, PyObject *Py_UNUSED(unused))
{
    int version = 0;
    int count = 0;
    int result;
    PCC_PY_UNLOCKED(result = driver(&version, &count));
    if (result < 0)
        return pcc_py_raise(PyModule_GetState(module), result, NULL);
    return Py_BuildValue("(ii)", version, count);
}

/* -- Gpus -------------------------------------------------------------------------------------- */

PCC_PY_CLOSES(gpus_close, pcc_gpus_close)

static PyObject *gpus_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Gpus", names))
        return NULL;
    struct pcc_gpus *gpus = NULL;
    int result;
    PCC_PY_UNLOCKED(result = pcc_gpus_open(&gpus));
    return pcc_py_object_new(type, "Gpus", result, gpus, gpus_close);
}

static PyObject *gpu_new(struct pcc_py_state *state, const struct pcc_gpu_info *info)
{
    PyObject *name = PyUnicode_DecodeUTF8(
        info->name, (Py_ssize_t)strnlen(info->name, sizeof(info->name)), "replace");
    if (name == NULL)
        return NULL;
    return pcc_py_result(state, PCC_PY_GPU_INFO,
                         Py_BuildValue("(y#NNKKK)", (const char *)info->uuid,
                                       (Py_ssize_t)sizeof(info->uuid), name,
                                       PyBool_FromLong(info->lost), info->copied_bytes,
                                       info->copies, info->failures));
}

static PyObject *gpus_info(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct pcc_gpu_info infos[GPUS_MAX];
    uint32_t count;
    PCC_PY_CALL(count = pcc_gpus_info(handle, infos, GPUS_MAX));
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list != NULL && i < count && i < GPUS_MAX; i++)
        pcc_py_append(&list, gpu_new(pcc_py_state_of(Py_TYPE(self)), &infos[i]));
    return list;
}

static PyObject *gpus_rest(PyObject *self, PyObject *seconds)
{
    uint64_t unused_ns;
    if (!pcc_py_seconds(seconds, &unused_ns))
        return NULL;
    PCC_PY_RETURN_NONE(pcc_gpus_rest(handle, unused_ns));
}

static PyMethodDef methods[] = {
    {"info", gpus_info, METH_NOARGS, NULL},
    {"rest", gpus_rest, METH_O, NULL},
    {"close", pcc_py_object_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const struct pcc_py_type pcc_py_gpus = {
    .name = "pccheck_native._core.Gpus",
    .doc = "The GPUs that trainers expose memory of.",
    .make = gpus_new,
    .methods = methods,
};
