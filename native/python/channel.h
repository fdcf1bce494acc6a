/* Channel: channel.c has its life and what it borrows, channel_calls.c the plain calls. */
#ifndef PCC_PY_CHANNEL_H
#define PCC_PY_CHANNEL_H

#include "core.h"
#include "daemon/pcc_tenant.h"

/* Borrows, as a user of their leases: pool, events and GPUs for its life, volumes from bind() to
 * unbind(), the volume of a load until the next load. Each goes after the channel has let go of it,
 * whatever order their owners close them in. */
struct pcc_py_channel {
    struct pcc_py_object base;
    PyObject *pool;
    PyObject *events;
    PyObject *gpus;    /* or NULL */
    PyObject *bound;   /* list of volumes */
    PyObject *loading; /* or NULL */
    uint64_t load_calls;
    uint64_t load_returns;
};

/* NULL with ValueError when it is closed; else to be left again. */
struct pcc_tenant *pcc_py_channel_enter(PyObject *self);
void pcc_py_channel_leave(PyObject *self);
/* Leaves; None or the exception of `result`. */
PyObject *pcc_py_channel_leave_with(PyObject *self, int result);

extern PyMethodDef pcc_py_channel_methods[];

PyObject *pcc_py_channel_close(PyObject *self, PyObject *unused);
PyObject *pcc_py_channel_bind(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_channel_unbind(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_channel_load(PyObject *self, PyObject *args, PyObject *kwargs);

#endif
