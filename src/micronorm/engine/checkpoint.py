"""Checkpoint files, written atomically and verified by their digest.

A checkpoint is one file, `step-00000120.3fa9c1d2e4b58677.pt`: the number of completed steps, and the first 16 digits of
the SHA-256 of its bytes. Rank 0 writes it, with every tensor whole, also if the model is sharded. It is written under
another name and renamed, so a file of that name is complete. Its digest is verified before anything is read from it.
The newest two are kept. Files are read with `weights_only=True`: nothing in them is executed.
"""

import hashlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from micronorm.records import write_atomically

FORMAT = "micronorm checkpoint"
VERSION = 1
KEPT = 2
SHARDED = ".sharded"
"""How the names of folders end in which earlier revisions saved sharded runs. They are refused, and never read."""
_NAME = re.compile(r"step-(\d+)\.([0-9a-f]{16})\.pt")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why, and names the one before it."""


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint of `state`, delete all but the newest two, and return its path."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "version": VERSION, "step": step, **state}, buffer)
    content = buffer.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.{hashlib.sha256(content).hexdigest()[:16]}.pt"
    write_atomically(path, content)
    for old in checkpoints(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, newest first."""
    found = [path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name) and path.is_file()]
    return sorted(found, key=lambda path: (path.name, path.stat().st_mtime), reverse=True)


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint of a folder, or None. It may be one that `load` refuses."""
    found = [*checkpoints(folder), *folder.glob(f"step-*{SHARDED}")]
    return max(found, key=lambda path: path.name.split(".")[0], default=None)


def load(path: Path, *, map_location: torch.device | str = "cpu") -> dict[str, Any]:
    """Verify a checkpoint and return its state.

    Raises:
        CheckpointError: the file is truncated, damaged or not a checkpoint; names the checkpoint before it.
    """
    if path.name.endswith(SHARDED):
        raise CheckpointError(
            f"{path} is a sharded checkpoint of an earlier revision, which this one does not read; finish the run with "
            f"the revision in its run.json, or start a new run{_offer(path)}"
        )
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise CheckpointError(f"{path} is not a checkpoint of micronorm: their names are step-NUMBER.DIGEST.pt")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest()[:16] != name[2]:
        raise CheckpointError(
            f"{path} is damaged: its {len(content):,} bytes do not have the digest in its name{_offer(path)}"
        )
    try:
        state = torch.load(io.BytesIO(content), map_location=map_location, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}){_offer(path)}") from error
    _check_format(state, path)
    return state


def _check_format(state: Any, path: Path) -> None:
    """Raise CheckpointError if what was read from `path` is not a checkpoint, or one of another version."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} holds no checkpoint of micronorm{_offer(path)}")
    if state.get("version") != VERSION:
        raise CheckpointError(f"{path} has format {state.get('version')}, this version of micronorm reads {VERSION}")


def _offer(path: Path) -> str:
    """Return what to do about an unusable checkpoint, as the end of a message that names the others beside it."""
    others = [other.name for other in checkpoints(path.parent) if other != path]
    if not others:
        return "; there is no other checkpoint beside it: delete it to start again"
    return f"; delete it to resume from the one before it, {others[0]}"


def digest(state: Any) -> str:
    """Return the SHA-256 over the raw bytes of every tensor and value of a nested state, by their paths.

    Example:
        >>> digest({"a": torch.ones(2)}) == digest({"a": torch.ones(2)})
        True
        >>> digest({"a": torch.ones(2)}) == digest({"a": torch.ones(2, dtype=torch.float64)})
        False
    """
    total = hashlib.sha256()
    for path, value in _leaves(state, ""):
        total.update(path.encode() + b"\0")
        if isinstance(value, Tensor):
            total.update(f"{value.dtype} {tuple(value.shape)}".encode() + b"\0")
            total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            total.update(f"{type(value).__name__} {value!r}".encode() + b"\0")
    return total.hexdigest()


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}/{i}")
    else:
        yield path, value
