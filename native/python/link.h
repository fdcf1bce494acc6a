/* Link: link.c has its life and saving, link_wait.c waits and loads, link_device.c the GPUs. */
#ifndef PCC_PY_LINK_H
#define PCC_PY_LINK_H

#include "core.h"

/* NULL with ValueError when it is closed; else to be left again. */
struct pcc_client *pcc_py_link_enter(PyObject *self);
void pcc_py_link_leave(PyObject *self);
/* Leaves; None or the exception of `result`. */
PyObject *pcc_py_link_leave_with(PyObject *self, int result);

/* A wait is made of slices. True after an expired one when the wait should go on; false with an
 * exception otherwise. */
bool pcc_py_link_goes_on(PyObject *self);
uint64_t pcc_py_link_slice_end(uint64_t deadline_ns);

PyObject *pcc_py_link_wait_read(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_link_wait_copied(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_link_wait_durable(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_link_wait_global(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_link_load_start(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_link_load_wait(PyObject *self, PyObject *args, PyObject *kwargs);

PyObject *pcc_py_link_device_open(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_link_staging(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_link_staging_trim(PyObject *self, PyObject *unused);
PyObject *pcc_py_link_stage(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_link_mark(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_link_hold(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_link_reached(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_link_capturing(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_link_expose(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_link_exposure_holds(PyObject *self, PyObject *unused);

#endif
