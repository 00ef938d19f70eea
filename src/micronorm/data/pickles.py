"""Pickled byte arrays read without executing what the file brings.

A pickle is a program, and the usual reader runs it. Here the only names that a file may call are those of a NumPy array
of bytes, and even they are not NumPy's own but inert stand-ins that keep the values. The rest of the format (numbers,
strings, lists, dictionaries) needs no names. Strings of Python 2, in which CIFAR was written, come out as bytes.
"""

import io
import math
import pickle
from typing import Any

import torch
from torch import Tensor


class _Type:
    """The dtype of an array: the code it was written with."""

    __slots__ = ("code",)

    def __init__(self, code: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment, which a byte does not have."""


class _Array:
    """An array as its pickle describes it: version, shape, dtype, order and bytes."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def tensor(self) -> Tensor:
        """The array as a uint8 tensor; ValueError for any other kind."""
        _, shape, kind, fortran, data = self.state
        if not isinstance(kind, _Type) or text(kind.code) != "u1" or fortran or not isinstance(data, bytes):
            raise ValueError("its array does not hold bytes in C order")
        if not all(isinstance(n, int) and n >= 0 for n in shape) or math.prod(shape) != len(data):
            raise ValueError(f"its array of shape {shape} comes with {len(data)} bytes")
        # torch.frombuffer refuses to read nothing
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return values.reshape(shape)


# Callables rather than classes or functions, without attributes: a file can write nothing into them.
class _MakeArray:
    __slots__ = ()

    def __call__(self, kind: Any, shape: Any, code: Any) -> _Array:
        return _Array()


class _MakeType:
    __slots__ = ()

    def __call__(self, code: Any, align: Any = 0, copy: Any = 1) -> _Type:
        return _Type(code)


class _ArrayKind:
    __slots__ = ()


class _Encode:
    """How Python 3 writes bytes in the protocols of Python 2: as text that is to be encoded."""

    __slots__ = ()

    def __call__(self, value: str, encoding: str) -> bytes:
        if text(encoding) != "latin1":
            raise ValueError(f"it asks for the encoding {encoding!r}")
        return value.encode("latin1")


_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _MakeArray(),
    ("numpy._core.multiarray", "_reconstruct"): _MakeArray(),
    ("numpy", "ndarray"): _ArrayKind(),
    ("numpy", "dtype"): _MakeType(),
    ("_codecs", "encode"): _Encode(),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The stand-in for a name, or ValueError."""
        try:
            return _ADMITTED[module_name, global_name]
        except KeyError:
            raise ValueError(f"it asks for {module_name}.{global_name}, which no array needs; not executed") from None


def read_pickle(data: bytes) -> dict[str, Any]:
    """The dictionary that a pickle holds, its byte arrays as uint8 tensors.

    Raises ValueError, with the name, where the file asks for anything but a NumPy array of bytes; and where it is not a
    pickle of a dictionary.

    Example:
        >>> read_pickle(pickle.dumps({"labels": [3, 8]}, protocol=2))
        {'labels': [3, 8]}
        >>> read_pickle(pickle.dumps({"labels": print}, protocol=2))
        Traceback (most recent call last):
            ...
        ValueError: it asks for __builtin__.print, which no array needs; not executed
    """
    try:
        value = _Reader(io.BytesIO(data), encoding="bytes", fix_imports=False).load()
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, not a dictionary")
        return {text(key): entry.tensor() if isinstance(entry, _Array) else entry for key, entry in value.items()}
    except ValueError:
        raise
    except Exception as error:  # a damaged program can fail in any way
        raise ValueError(f"it is not a readable pickle ({type(error).__name__}: {error})") from error


def text(value: Any) -> str:
    """A string of Python 2 or 3."""
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
