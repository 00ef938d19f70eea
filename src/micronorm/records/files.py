"""Files of a run directory: rows and documents as JSON, including NaN and infinity, and atomic writes."""

import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
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


PARTIAL = ".partial"
"""The ending of a file's name while `write_atomically` writes it."""


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that, even after a power failure, it is complete: either the old one or the new one.

    After an exception only the old file remains. A killed process may leave a hidden file whose name ends in
    `.partial`; `remove_partials` deletes such files.

    Args:
        path: the file; its folder must exist.
        content: the bytes.

    Raises:
        OSError: the file cannot be written. Names `path` and, if the disk is full, the bytes that it needs.
    """
    target = Path(path)
    refuse_device(target)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with open(partial, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(partial)):
            raise named_error(error, target, len(content)) from error
        raise
    sync_folder(target.parent)


def refuse_device(file: Path) -> None:
    """Raise OSError if the path is a pipe or a device: a rename would put a file in the place of `/dev/null`."""
    if file.exists() and not file.is_file() and not file.is_dir():
        raise OSError(errno.EINVAL, "is a pipe or a device, not a file", str(file))


def named_error(error: OSError, file: Path, needed: int) -> OSError:
    """Return the error of a write with the file's name and, if the disk is full, the bytes that were needed."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(file.parent).free
        reason += f" ({needed:,} bytes needed, {free:,} free); free some space or choose another disk"
    return OSError(error.errno, reason, str(file))


def remove_partials(folder: str | os.PathLike[str]) -> list[Path]:
    """Delete the unfinished files of killed writers in `folder`, and return their paths."""
    found = sorted(Path(folder).glob(f".*{PARTIAL}"))
    for file in found:
        file.unlink(missing_ok=True)
    return found


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk, as after a rename."""
    with suppress(PermissionError):  # Windows cannot open folders, and a folder may be writable but not readable
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
