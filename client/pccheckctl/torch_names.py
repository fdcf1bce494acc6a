"""Names of dtypes, NumPy's and torch's."""

from __future__ import annotations

#: NumPy's dtype strings that torch has, little-endian or of one byte.
NUMPY_TO_TORCH = {
    "|b1": "bool", "|u1": "uint8", "|i1": "int8", "<u2": "uint16", "<i2": "int16",
    "<u4": "uint32", "<i4": "int32", "<u8": "uint64", "<i8": "int64",
    "<f2": "float16", "<f4": "float32", "<f8": "float64", "<c8": "complex64",
    "<c16": "complex128",
}  # fmt: skip
