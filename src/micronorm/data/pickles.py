"""Read pickled byte arrays without executing anything in the file.

A pickle is a program that the usual reader runs. Here a file may only name what a NumPy array of bytes needs, and these
names stand for inert objects that store the values. The rest of the format (numbers, strings, lists, dictionaries)
needs no names. Strings of Python 2, in which CIFAR was written, are returned as bytes.
"""

import io
import math
import pickle
from typing import Any

import torch
from torch import Tensor


class _Type:
    """Stands for numpy.dtype: stores the type code."""

    __slots__ = ("code",)

    def __init__(self, code: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and alignment, which bytes do not have."""


class _Array:
    """Stands for an array: stores version, shape, dtype, order and bytes."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def tensor(self) -> Tensor:
        """Return the array as a uint8 tensor. Raise ValueError for any other dtype."""
        _, shape, kind, fortran, data = self.state
        if not isinstance(kind, _Type) or text(kind.code) != "u1" or fortran or not isinstance(data, bytes):
            raise ValueError("its array does not hold bytes in C order")
        if not all(isinstance(n, int) and n >= 0 for n in shape) or math.prod(shape) != len(data):
            raise ValueError(f"its array of shape {shape} comes with {len(data)} bytes")
        # torch.frombuffer does not accept an empty buffer
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return values.reshape(shape)


# Instances without attributes, because a pickle can set the attributes of functions and classes.
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
    """Stands for _codecs.encode: Python 3 writes bytes in the protocols of Python 2 as text to be encoded."""

    __slots__ = ()

    def __call__(self, value: str, encoding: str) -> bytes:
        if text(encoding) != "latin1":
            raise ValueError(f"it names the encoding {encoding!r}")
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
        """Return the object that stands for a name, or raise ValueError."""
        try:
            return _ADMITTED[module_name, global_name]
        except KeyError:
            raise ValueError(f"it names {module_name}.{global_name}, which no array needs; not executed") from None


def read_pickle(data: bytes) -> dict[str, Any]:
    """Return the dictionary in a pickle, its byte arrays as uint8 tensors.

    Raises:
        ValueError: the file names anything but a NumPy array of bytes, or is not a pickle of a dictionary.

    Example:
        >>> read_pickle(pickle.dumps({"labels": [3, 8]}, protocol=2))
        {'labels': [3, 8]}
        >>> read_pickle(pickle.dumps({"labels": print}, protocol=2))
        Traceback (most recent call last):
            ...
        ValueError: it names __builtin__.print, which no array needs; not executed
    """
    try:
        value = _Reader(io.BytesIO(data), encoding="bytes", fix_imports=False).load()
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, not a dictionary")
        return {text(key): entry.tensor() if isinstance(entry, _Array) else entry for key, entry in value.items()}
    except ValueError:
        raise
    except Exception as error:  # a damaged pickle can raise any error
        raise ValueError(f"it is not a readable pickle ({type(error).__name__}: {error})") from error


def text(value: Any) -> str:
    """Return a string of Python 2 or 3 as str."""
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
