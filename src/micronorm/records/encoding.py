"""Rows and documents as JSON, including NaN and infinity."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

Row = dict[str, Any]

_LARGEST = 2**63


def encode_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as one line."""
    return json.dumps(_encode(row, "row"), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def encode_document(value: Mapping[str, Any]) -> bytes:
    """Return a document as an indented file."""
    return json.dumps(_encode(value, "value"), indent=2, allow_nan=False).encode() + b"\n"


def _encode(value: Any, where: str) -> Any:
    """Return the value as JSON can store it; json itself would turn keys into strings and write bare NaN."""
    if isinstance(value, Mapping):
        if _stands_for_float(value):
            raise ValueError(f"{where}: {dict(value)} would be read back as a float")
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where}: keys must be str, got {key!r}")
        return {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise ValueError(f"{where}: an integer must lie between ±2^63, got one of {value.bit_length()} bits")
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"{where}: a {type(value).__name__} is no JSON value; take .item() of a tensor, str() of a path")


def _stands_for_float(value: Mapping[Any, Any]) -> bool:
    return value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf")


def _decode(row: Row) -> Any:
    return float(row["float"]) if _stands_for_float(row) else row


def parse(data: bytes, where: str) -> Row:
    """Return the JSON object in a line or document. Raise ValueError, starting with `where`, for anything else."""
    try:
        value = json.loads(data, object_hook=_decode, parse_constant=_refuse, parse_int=_parse_int)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a JSON object was expected, got {type(value).__name__}")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _parse_int(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) >= _LARGEST:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def read_file(file: Path) -> bytes:
    """Return the content of a file. Raise ValueError for a folder or a pipe, which could be read forever."""
    if not file.is_file():
        raise ValueError(f"{file} is not a regular file")
    return file.read_bytes()


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether a value is an int from 0 on, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is an int or a float; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
