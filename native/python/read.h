/* Verified reads of one checkpoint: the three methods of Volume that move bytes. */
#ifndef PCC_PY_READ_H
#define PCC_PY_READ_H

#include "core.h"

PyObject *pcc_py_volume_read(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_volume_read_into(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_volume_verify(PyObject *self, PyObject *args, PyObject *kwargs);

#endif
