# SPDX-License-Identifier: Apache-2.0
"""Addresses of MLX arrays, so that kernels work on the arrays themselves.

numpy cannot view bfloat16, but the buffer protocol gives the address of any array. Kernels that
write through an input, as those of a KV pool do on a GPU, write into the array itself.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import mlx.core as mx


class _PyBuffer(ctypes.Structure):
    """Py_buffer of Python's C API."""

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
    """Where an evaluated array lies; valid while the array lives."""

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
    """Evaluates `array`; MLX refuses that inside a transformation such as mx.compile."""
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
    """The array, copied if its rows do not follow each other, and its view."""
    seen = view(array)
    if seen.row_contiguous:
        return array, seen
    array = mx.contiguous(array)
    return array, view(array)


def allocate(shape: tuple[int, ...], dtype: mx.Dtype, init_value: float | None) -> mx.array:
    """An evaluated array of our own: full of `init_value`, or of 0xFF bytes (a NaN in every float
    format), because Metal does not clear what it allocates."""
    if init_value is not None:
        return mx.full(shape, mx.array(init_value, dtype=dtype))
    array = mx.zeros(shape, dtype=dtype)
    address = view(array).address
    if address:
        ctypes.memset(address, 0xFF, array.nbytes)
    return array
