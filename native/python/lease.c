#include <unistd.h>

#include "core.h"

struct pcc_py_state *pcc_py_state_of(PyTypeObject *type)
{
    return PyType_GetModuleState(type);
}

PyObject *pcc_py_object_new(PyTypeObject *type, const char *name, void *handle,
                            void (*close)(void *handle))
{
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

void *pcc_py_enter(struct pcc_py_object *object)
{
    struct pcc_py_lease *lease = &object->lease;
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

/* Closes the C object once it is unwanted and nobody uses it. A forked child only forgets it: the
 * threads that closing would join, and the memory it would unmap, are its parent's. */
static void lease_settle(struct pcc_py_lease *lease)
{
    if (!lease->closed || lease->users > 0 || lease->handle == NULL) {
        return;
    }
    if (lease->owner == getpid()) {
        lease->users++; /* other threads see it in use until it is gone */
        PCC_PY_UNLOCKED(lease->close(lease->handle));
        lease->users--;
    }
    lease->handle = NULL;
}

void pcc_py_leave(struct pcc_py_object *object)
{
    PCC_ASSERT(object->lease.users > 0);
    object->lease.users--;
    lease_settle(&object->lease);
}

void pcc_py_close(struct pcc_py_object *object)
{
    object->lease.closed = true;
    lease_settle(&object->lease);
}

PyObject *pcc_py_object_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    pcc_py_close((struct pcc_py_object *)self);
    Py_RETURN_NONE;
}

/* Calls and borrowers hold references, so no user is left here. */
void pcc_py_object_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    pcc_py_close((struct pcc_py_object *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}
