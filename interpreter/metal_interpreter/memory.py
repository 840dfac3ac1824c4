# SPDX-License-Identifier: Apache-2.0
"""Finds the addresses of MLX arrays, so that kernels read and write the arrays without copies.

numpy cannot view bfloat16, but the buffer protocol gives the address of any array. A kernel that
writes to an input, such as a KV pool, changes the array in place, as on a GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import mlx.core as mx


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


_STRIDES = 0x18  # PyBUF_STRIDES
_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_PyBuffer),)


@dataclass(frozen=True)
class View:
    """An evaluated array's address, shape and strides; valid while the array exists."""

    address: int  # 0 for an empty array
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements

    @property
    def row_contiguous(self) -> bool:
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True


def view(array: mx.array) -> View:
    """Evaluates an array and returns its address; MLX raises inside mx.compile and the like."""
    mx.eval(array)
    if array.size == 0:
        return View(0, tuple(array.shape), (0,) * array.ndim)
    raw = _PyBuffer()
    _get(array, ctypes.byref(raw), _STRIDES)
    try:
        ndim = raw.ndim
        strides = tuple(s // raw.itemsize for s in raw.strides[:ndim]) if ndim else ()
        return View(raw.buf or 0, tuple(array.shape), strides)
    finally:
        _release(ctypes.byref(raw))


def row_contiguous(array: mx.array) -> tuple[mx.array, View]:
    """Returns the array, or a row-contiguous copy of it if necessary, and the result's view."""
    seen = view(array)
    if seen.row_contiguous:
        return array, seen
    array = mx.contiguous(array)
    return array, view(array)


def allocate(shape: tuple[int, ...], dtype: mx.Dtype, init_value: float | None) -> mx.array:
    """Returns a new evaluated array, filled with `init_value`.

    If that is None, fills it with 0xFF bytes (NaN in every float format), because Metal does not
    clear new buffers.
    """
    if init_value is not None:
        return mx.full(shape, mx.array(init_value, dtype=dtype))
    array = mx.zeros(shape, dtype=dtype)
    address = view(array).address
    if address:
        ctypes.memset(address, 0xFF, array.nbytes)
    return array
