"""Checkpoints of sharded models: a folder in which every rank has written its own part, by torch's DCP.

`step-00000120.sharded` holds DCP's files, `rest.pt` with everything that is not model or optimizer, and a manifest
with the SHA-256 of each. It is written under another name and renamed when the manifest is complete; a folder of that
name is complete. It can be read on any number of ranks, sharded or not.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from micronorm.engine.checkpoint import FORMAT, KEPT, VERSION, CheckpointError
from micronorm.engine.step import Step

MANIFEST = "manifest.json"
_REST = "rest.pt"
_SUFFIX = ".sharded"


def save(folder: Path, number: int, step: Step, rest: dict[str, Any]) -> Path:
    """Write one part per rank. Collective."""
    path, temporary = folder / f"step-{number:08d}{_SUFFIX}", folder / f".step-{number:08d}.tmp"
    first = step.parallel.rank == 0
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    step.parallel.barrier()
    model, optimizer = get_state_dict(step.model, step.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=temporary)
    step.parallel.barrier()
    if first:
        torch.save({"format": FORMAT, "version": VERSION, **rest}, temporary / _REST)
        files = {file.name: _sha256(file) for file in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_text(json.dumps({"format": FORMAT, "version": VERSION, "files": files}))
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
        for old in checkpoints(folder)[KEPT:]:
            shutil.rmtree(old)
    step.parallel.barrier()
    return path


def checkpoints(folder: Path) -> list[Path]:
    """The sharded checkpoints of a folder, newest first."""
    return sorted(folder.glob(f"step-*{_SUFFIX}"), reverse=True) if folder.is_dir() else []


def verify(path: Path) -> None:
    """Refuse a folder in which something is missing or not as it was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} holds no sharded checkpoint of micronorm: its manifest cannot be read"
        ) from error
    for name, expected in files.items():
        if not (path / name).is_file() or _sha256(path / name) != expected:
            others = [other.name for other in checkpoints(path.parent) if other != path]
            offer = f"delete it to resume from {others[0]}" if others else "there is no other beside it"
            raise CheckpointError(f"{path} is damaged: {name} is missing or was changed; {offer}")


def load_rest(path: Path) -> dict[str, Any]:
    """Everything but model and optimizer, after the folder was found to be whole."""
    verify(path)
    return torch.load(path / _REST, map_location="cpu", weights_only=True)


def load(path: Path, step: Step) -> None:
    """Read model and optimizer into `step`, whatever its ranks. Collective."""
    # Makes the optimizer's state where there is none yet, so that there is something to read into.
    model, optimizer = get_state_dict(step.model, step.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=path, no_dist=step.parallel.world == 1)
    set_state_dict(step.model, step.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
