#include "core.h"

#include <unistd.h>

struct pcc_py_state *pcc_py_state_of(PyTypeObject *type)
{
    return PyType_GetModuleState(type);
}

PyObject *pcc_py_object_new(PyTypeObject *type, const char *name, int code, void *handle,
                            void (*close)(void *handle))
{
    if (code < 0)
        return pcc_py_raise(pcc_py_state_of(type), code, NULL);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct pcc_py_object *object = (struct pcc_py_object *)allocate(type, 0);
    if (object == NULL) {
        PCC_PY_UNLOCKED(close(handle));
        return NULL;
    }
    object->lease = (struct pcc_py_lease){
        .handle = handle,
        .close = close,
        .name = name,
        .owner = getpid(),
    };
    return (PyObject *)object;
}

void *pcc_py_enter(PyObject *self)
{
    struct pcc_py_lease *lease = pcc_py_lease(self);
    if (lease->closed || lease->handle == NULL) {
        PyErr_Format(PyExc_ValueError, "this %s is closed", lease->name);
        return NULL;
    }
    if (lease->owner != getpid()) {
        PyErr_Format(PyExc_ValueError,
                     "this %s belongs to the process that opened it, not to a "
                     "forked child",
                     lease->name);
        return NULL;
    }
    lease->users++;
    return lease->handle;
}

/* Closes the C object once it is unwanted and has no user. A forked child only forgets it: the
 * threads that closing would join, and the memory it would unmap, are its parent's. */
static void settle(PyObject *self)
{
    struct pcc_py_lease *lease = pcc_py_lease(self);
    if (!lease->closed || lease->users > 0 || lease->handle == NULL)
        return;
    if (lease->owner == getpid()) {
        lease->users++; /* other threads see it in use until it is gone */
        PCC_PY_UNLOCKED(lease->close(lease->handle));
        lease->users--;
    }
    lease->handle = NULL;
    if (lease->gone != NULL)
        lease->gone(self);
}

void pcc_py_leave(PyObject *self)
{
    PCC_ASSERT(pcc_py_lease(self)->users > 0);
    pcc_py_lease(self)->users--;
    settle(self);
}

void pcc_py_close(PyObject *self)
{
    pcc_py_lease(self)->closed = true;
    settle(self);
}

PyObject *pcc_py_object_close(PyObject *self, PyObject *Py_UNUSED(unused))
{
    pcc_py_close(self);
    Py_RETURN_NONE;
}

/* Calls and borrowers hold references, so no user is left here. */
void pcc_py_object_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    pcc_py_close(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}
