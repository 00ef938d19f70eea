"""Nested values of tensors and plain numbers as bytes, without pickle: what ranks send one another.

`pack` writes one safetensors blob. Its tensors are numbered; the tensor "json" holds the nesting and the plain values.
"""

import json
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

_TENSOR = "__tensor__"


def pack(value: Any) -> bytes:
    """Return `value` as bytes.

    Args:
        value: None, a bool, number, string or tensor, or dictionaries (with string keys), lists and tuples of these.

    Raises:
        TypeError: it contains anything else.

    Example:
        >>> unpack(pack({"boxes": [torch.ones(2), None], "score": 0.5}))
        {'boxes': [tensor([1., 1.]), None], 'score': 0.5}
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_flatten(value, tensors)).encode()
    tensors["json"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return safetensors.torch.save(tensors)


def unpack(data: bytes) -> Any:
    """Return the value that `pack` turned into bytes; its tensors are on the CPU, and tuples became lists."""
    tensors = safetensors.torch.load(data)
    return _nest(json.loads(tensors.pop("json").numpy().tobytes()), tensors)


def _flatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        number = str(len(tensors))
        # A copy: safetensors refuses tensors that share memory or are not contiguous.
        tensors[number] = value.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: number}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"keys must be strings, got {sorted(map(repr, value))}")
        return {key: _flatten(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_flatten(item, tensors) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"ranks exchange tensors, numbers, strings, lists and dictionaries, got {type(value).__name__}")


def _nest(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _nest(item, tensors) for key, item in value.items()}
    return [_nest(item, tensors) for item in value] if isinstance(value, list) else value
