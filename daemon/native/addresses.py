"""Addresses of Python buffers, for native code."""

import ctypes
from typing import Final

_PyBUF_SIMPLE: Final = 0


class _Buffer(ctypes.Structure):
    """CPython's Py_buffer (C API, "Buffer structure")."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_Buffer),)
_release.restype = None


def address_of(data: object) -> int:
    """Return the address of a buffer's first byte, writable or not. Raises TypeError if `data` is not a buffer.

    The address stays valid for as long as the caller keeps the bytes from being moved or freed.
    """
    buffer = _Buffer()
    _get(data, ctypes.byref(buffer), _PyBUF_SIMPLE)
    address = buffer.buf
    # Releasing at once lets Python resize the object; the address remains valid while nothing does.
    _release(ctypes.byref(buffer))
    return int(address or 0)
