/* Cheap "is it still what it was" for what a training script holds: dicts by the identity of their
 * keys and values, tensors by address, shape, strides and type. Nothing here runs Python code, and
 * as few objects as possible are touched: they are cold when training just used the caches.
 *
 * Tensors are looked at by the C exchange interface of DLPack 1.2, which their library offers as a
 * capsule; no header of that library is needed. */
#include "core.h"

#include <stddef.h>

#define CAPSULE_NAME "dlpack_exchange_api"
#define DIMENSIONS_MAX 64
#define DLPACK_MAJOR 1
#define AHEAD 8 /* how many tensors ahead memory is asked for */
#define LINE_BYTES 64

/* -- DLPack's ABI, as far as it is used -- */

struct dl_tensor {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t dimension_count;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } type;
    const int64_t *shape;
    const int64_t *strides; /* in elements */
    uint64_t offset_bytes;
};

struct dl_exchange {
    uint32_t major, minor;
    struct dl_exchange *previous;
    void (*unused[3])(void);
    int (*look)(void *object, struct dl_tensor *out); /* fills *out; owns nothing */
};

_Static_assert(sizeof(struct dl_tensor) == 48 && sizeof(void *) == 8, "the ABI of DLPack 1");

/* -- geometry -- */

struct geometry { /* whole words without gaps, so that comparing words is comparison */
    uint64_t address;
    uint64_t device;                   /* type and number */
    uint64_t dimensions_type;          /* how many, and of which type */
    int64_t sizes[2 * DIMENSIONS_MAX]; /* shape, then strides */
};

#define WORD_BYTES ((Py_ssize_t)sizeof(uint64_t))
#define HEAD_WORDS ((Py_ssize_t)offsetof(struct geometry, sizes) / WORD_BYTES)

static const struct dl_exchange *exchange_of(PyObject *capsule)
{
    const struct dl_exchange *api = PyCapsule_GetPointer(capsule, CAPSULE_NAME);
    if (api != NULL && (api->major != DLPACK_MAJOR || api->look == NULL)) {
        PyErr_SetString(PyExc_ValueError, "another version of DLPack");
        return NULL;
    }
    return api;
}

/* The words used of *out; -1 with an exception. *near_out is some address in the memory that was
 * looked at: mostly, shapes lie inside of their tensors. */
static Py_ssize_t geometry_of(const struct dl_exchange *api, PyObject *tensor, struct geometry *out,
                              uint64_t *near_out)
{
    struct dl_tensor seen;
    if (api->look(tensor, &seen) != 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "not a tensor that DLPack describes");
        return -1;
    }
    if (seen.dimension_count < 0 || seen.dimension_count > DIMENSIONS_MAX) {
        PyErr_SetString(PyExc_ValueError, "a tensor of too many dimensions");
        return -1;
    }
    *near_out = (uintptr_t)seen.shape;
    out->address = (uintptr_t)seen.data + seen.offset_bytes;
    out->device = (uint64_t)(uint32_t)seen.device_type << 32 | (uint32_t)seen.device_id;
    out->dimensions_type = (uint64_t)seen.dimension_count << 32 | (uint32_t)seen.type.code << 24 |
                           (uint32_t)seen.type.bits << 16 | seen.type.lanes;
    for (int32_t i = 0; i < seen.dimension_count; i++) {
        out->sizes[i] = seen.shape[i];
        out->sizes[seen.dimension_count + i] = seen.strides[i];
    }
    return HEAD_WORDS + 2 * seen.dimension_count;
}

PyObject *pcc_py_tensor_geometry(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *tensors;
    struct geometry now;
    if (!PyArg_ParseTuple(args, "OO!:tensor_geometry", &capsule, &PyList_Type, &tensors))
        return NULL;
    const struct dl_exchange *api = exchange_of(capsule);
    if (api == NULL)
        return NULL;
    /* First all the addresses to ask for ahead of time, then all geometries. */
    const Py_ssize_t count = PyList_Size(tensors);
    PyObject *near = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(uint64_t));
    PyObject *packed PCC_PY_OWNED(pcc_py_drop) = Py_BuildValue("[N]", near);
    for (Py_ssize_t i = 0; packed != NULL && i < count; i++) {
        uint64_t *place = (uint64_t *)(void *)PyBytes_AsString(near) + i;
        const Py_ssize_t used = geometry_of(api, PyList_GetItem(tensors, i), &now, place);
        pcc_py_append(&packed,
                      used < 0 ? NULL
                               : PyBytes_FromStringAndSize((const char *)&now, used * WORD_BYTES));
    }
    PyObject *empty PCC_PY_OWNED(pcc_py_drop) =
        packed != NULL ? PyBytes_FromStringAndSize(NULL, 0) : NULL;
    return empty != NULL ? PyObject_CallMethod(empty, "join", "O", packed) : NULL;
}

/* Waiting for memory is most of the time, so it is asked for some tensors ahead: only a hint, which
 * harms nothing where it is wrong. */
static void ask_for(PyObject *tensors, const uint64_t *near, Py_ssize_t i)
{
    const uintptr_t inside = near[i];
    __builtin_prefetch(PyList_GetItem(tensors, i));
    __builtin_prefetch((const void *)(inside - LINE_BYTES));
    __builtin_prefetch((const void *)inside);
    __builtin_prefetch((const void *)(inside + LINE_BYTES));
}

/* A loop, because there are few words: a call of memcmp takes longer. */
static bool same_words(const struct geometry *now, const uint64_t *then, Py_ssize_t count)
{
    const uint64_t *words = (const uint64_t *)(const void *)now;
    for (Py_ssize_t i = 0; i < count; i++)
        if (words[i] != then[i])
            return false;
    return true;
}

/* Compares with the `left` words at `then`. False also when that cannot be decided: the caller then
 * compares in another way. */
static bool geometry_holds(const struct dl_exchange *api, PyObject *tensors, const uint64_t *then,
                           Py_ssize_t left)
{
    struct geometry now;
    uint64_t unused;
    const Py_ssize_t count = PyList_Size(tensors);
    const uint64_t *near = then;
    if (left < count)
        return false;
    then += count;
    left -= count;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            ask_for(tensors, near, i + AHEAD);
        const Py_ssize_t used = geometry_of(api, PyList_GetItem(tensors, i), &now, &unused);
        if (used < 0) {
            PyErr_Clear();
            return false;
        }
        if (used > left || !same_words(&now, then, used))
            return false;
        then += used;
        left -= used;
    }
    return left == 0;
}

PyObject *pcc_py_same_geometry(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *tensors, *then;
    if (!PyArg_ParseTuple(args, "OO!S:same_geometry", &capsule, &PyList_Type, &tensors, &then))
        return NULL;
    const struct dl_exchange *api = exchange_of(capsule);
    if (api == NULL)
        return NULL;
    const uint64_t *words = (const uint64_t *)(void *)PyBytes_AsString(then); /* aligned */
    return PyBool_FromLong(geometry_holds(api, tensors, words, PyBytes_Size(then) / WORD_BYTES));
}

/* -- attributes -- */

PyObject *pcc_py_integers(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *getter, *tensors;
    if (!PyArg_ParseTuple(args, "OO!:integers", &getter, &PyList_Type, &tensors))
        return NULL;
    /* The slot itself: Python would look the attribute up for each tensor. */
    const descrgetfunc get = (descrgetfunc)PyType_GetSlot(Py_TYPE(getter), Py_tp_descr_get);
    if (get == NULL)
        return PyErr_Format(PyExc_TypeError, "integers: not a descriptor");
    const Py_ssize_t count = PyList_Size(tensors);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    if (packed == NULL)
        return NULL;
    int64_t *place = (int64_t *)(void *)PyBytes_AsString(packed); /* aligned */
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *tensor = PyList_GetItem(tensors, i);
        PyObject *value PCC_PY_OWNED(pcc_py_drop) =
            tensor != NULL ? get(getter, tensor, (PyObject *)Py_TYPE(tensor)) : NULL;
        place[i] = value != NULL ? PyLong_AsLongLong(value) : -1;
        if (place[i] == -1 && PyErr_Occurred()) {
            Py_DECREF(packed);
            return NULL;
        }
    }
    return packed;
}

/* -- identity -- */

/* The next object that is expected; NULL at the end. Borrowed, and never dereferenced. */
static PyObject *next_of(PyObject *flat, Py_ssize_t *at)
{
    return *at < PyTuple_Size(flat) ? PyTuple_GetItem(flat, (*at)++) : NULL;
}

static bool dict_holds(PyObject *dict, PyObject *flat, Py_ssize_t *at)
{
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value))
        if (next_of(flat, at) != key || next_of(flat, at) != value)
            return false;
    return true;
}

static bool list_holds(PyObject *list, PyObject *flat, Py_ssize_t *at)
{
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++)
        if (next_of(flat, at) != PyList_GetItem(list, i))
            return false;
    return true;
}

PyObject *pcc_py_same_items(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *holders, *flat;
    Py_ssize_t at = 0;
    if (!PyArg_ParseTuple(args, "O!O!:same_items", &PyList_Type, &holders, &PyTuple_Type, &flat))
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(holders); i++) {
        PyObject *holder = PyList_GetItem(holders, i);
        const bool is_dict = PyDict_Check(holder);
        if (!is_dict && !PyList_Check(holder))
            return PyErr_Format(PyExc_TypeError, "same_items: neither a dict nor a list");
        if (!(is_dict ? dict_holds : list_holds)(holder, flat, &at) ||
            next_of(flat, &at) != holder) /* so that no item moved from one to the next */
            Py_RETURN_FALSE;
    }
    return PyBool_FromLong(at == PyTuple_Size(flat));
}

PyObject *pcc_py_same_values(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *dicts, *keys, *flat;
    Py_ssize_t at = 0;
    if (!PyArg_ParseTuple(args, "O!O!O!:same_values", &PyList_Type, &dicts, &PyTuple_Type, &keys,
                          &PyTuple_Type, &flat))
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(dicts); i++) {
        PyObject *dict = PyList_GetItem(dicts, i);
        for (Py_ssize_t k = 0; k < PyTuple_Size(keys); k++) {
            PyObject *value = PyDict_GetItemWithError(dict, PyTuple_GetItem(keys, k));
            if (value == NULL && PyErr_Occurred())
                return NULL;
            if (value == NULL || next_of(flat, &at) != value)
                Py_RETURN_FALSE;
        }
    }
    return PyBool_FromLong(at == PyTuple_Size(flat));
}
