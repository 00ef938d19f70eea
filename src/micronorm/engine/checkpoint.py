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
"""The ending of folders in which earlier revisions saved sharded runs. They are refused, and never read."""
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
        raise refusal(
            path,
            "is a sharded checkpoint of an earlier revision, which this one does not read; finish the run with the "
            "revision in its run.json, or start a new run",
        )
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise CheckpointError(f"{path} is not a checkpoint of micronorm: their names are step-NUMBER.DIGEST.pt")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest()[:16] != name[2]:
        raise refusal(path, f"is damaged: its {len(content):,} bytes do not have the digest in its name")
    try:
        state = torch.load(io.BytesIO(content), map_location=map_location, weights_only=True)
    except Exception as error:
        raise refusal(path, f"cannot be read ({type(error).__name__})") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise refusal(path, "holds no checkpoint of micronorm")
    if state.get("version") != VERSION:
        raise refusal(path, f"has another format than {VERSION}, which this version of micronorm reads")
    if not isinstance(state.get("step"), int) or state["step"] != int(name[1]):
        raise refusal(path, "is damaged or from another version of micronorm: it does not hold the step in its name")
    return state


def refusal(path: Path, fault: str) -> CheckpointError:
    """Return the error for an unusable checkpoint: its path, what is wrong with it, and which one to use instead."""
    others = [other.name for other in checkpoints(path.parent) if other != path]
    if others:
        return CheckpointError(f"{path} {fault}; delete it to resume from the one before it, {others[0]}")
    return CheckpointError(f"{path} {fault}; there is no other checkpoint beside it: delete it to start again")


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
