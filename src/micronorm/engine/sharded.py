"""Checkpoints of sharded models: a folder into which every rank writes its own part, by torch's DCP.

`step-00000120.sharded` holds DCP's files, `rest.pt` with everything that is not model or optimizer, and a manifest
with the SHA-256 of each. It is written under another name and renamed when the manifest is complete, so a folder of
that name is complete. It can be read on any number of ranks, sharded or not.

DCP itself unpickles its metadata without a check. Here the metadata may name nothing but DCP's own records, and values
are read with `weights_only=True`: nothing in a folder is executed.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from typing_extensions import override

from micronorm.engine.checkpoint import (
    FORMAT,
    KEPT,
    SHARDED,
    VERSION,
    CheckpointError,
    check_format,
    offer,
    sharded_checkpoints,
)
from micronorm.engine.parallel import on_rank_0
from micronorm.engine.step import Step
from micronorm.records import sync_folder, write_atomically

MANIFEST = "manifest.json"
_REST = "rest.pt"
_METADATA = ".metadata"
_HARMLESS = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "pathlib": ("Path", "PosixPath", "WindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "WindowsPath"),  # the same, from Python 3.13 on
}
"""What DCP's metadata consists of, by module."""


def gather_whole(step: Step) -> dict[str, Any]:
    """Return model and optimizer state with every tensor whole, on rank 0 only. Collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        "model": get_model_state_dict(step.model, options=options),
        "optimizer": get_optimizer_state_dict(step.model, step.optimizer, options=options).get("state", {}),
    }


def scatter_whole(step: Step, state: dict[str, Any]) -> None:
    """Restore what `gather_whole` returned; every rank must have it. Collective."""
    options = StateDictOptions(full_state_dict=True)
    # The optimizer first: torch takes a step with a learning rate of zero to create its state.
    groups = get_optimizer_state_dict(step.model, step.optimizer)["param_groups"]  # on every rank
    optimizer: Any = {"state": state["optimizer"], "param_groups": groups}
    set_optimizer_state_dict(step.model, step.optimizer, optimizer, options=options)
    set_model_state_dict(step.model, state["model"], options=options)


def save(folder: Path, number: int, step: Step, rest: dict[str, Any]) -> Path:
    """Write a checkpoint, one part per rank, and return its path. Collective."""
    path, temporary = folder / f"step-{number:08d}{SHARDED}", folder / f".step-{number:08d}.tmp"

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    on_rank_0(step.parallel, begin)
    model, optimizer = get_state_dict(step.model, step.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=temporary)
    on_rank_0(step.parallel, lambda: _complete(temporary, path, rest))
    return path


def _complete(temporary: Path, path: Path, rest: dict[str, Any]) -> None:
    """Write what is the same for all ranks, and give the folder its name."""
    kind = {"format": FORMAT, "version": VERSION}
    write_atomically(temporary / _REST, lambda file: torch.save({**kind, **rest}, file))
    files = {file.name: _sha256(file) for file in sorted(temporary.iterdir())}
    write_atomically(temporary / MANIFEST, json.dumps({**kind, "files": files}).encode())
    shutil.rmtree(path, ignore_errors=True)
    os.replace(temporary, path)
    sync_folder(path.parent)
    for old in sharded_checkpoints(path.parent)[KEPT:]:
        shutil.rmtree(old)


def verify(path: Path) -> None:
    """Raise CheckpointError if a file of the folder is missing or was changed."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} holds no sharded checkpoint of micronorm: its {MANIFEST} cannot be read{offer(path)}"
        ) from error
    check_format(manifest, path)
    for name in (_METADATA, _REST, *files):
        if name not in files or not (path / name).is_file() or _sha256(path / name) != files[name]:
            raise CheckpointError(f"{path} is damaged: {name} is missing or was changed{offer(path)}")


def load_rest(path: Path) -> dict[str, Any]:
    """Return everything but model and optimizer, after verifying the folder."""
    verify(path)
    try:
        rest = torch.load(path / _REST, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path / _REST} cannot be read ({type(error).__name__}){offer(path)}") from error
    check_format(rest, path)
    return rest


def model_shapes(path: Path) -> dict[str, torch.Size]:
    """Return the shapes of the model's tensors, by name."""
    found = _Reader(path).read_metadata().state_dict_metadata.items()
    tensors = {name: entry for name, entry in found if isinstance(entry, TensorStorageMetadata)}
    return {name.removeprefix("model."): t.size for name, t in tensors.items() if name.startswith("model.")}


def load(path: Path, step: Step) -> None:
    """Read model and optimizer into `step`, on any number of ranks. Collective."""
    # Creates the optimizer's state if it has none yet, so that DCP can read into it.
    model, optimizer = get_state_dict(step.model, step.optimizer)
    state = {"model": model, "optimizer": optimizer}
    alone = step.parallel.world == 1
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as is meant
            dcp.load(state, storage_reader=_Reader(path), planner=_Planner(), no_dist=alone)
    except CheckpointException as error:  # not an Exception, but it ends the run no less cleanly
        raise CheckpointError(f"{path} cannot be read ({error}){offer(path)}") from error
    set_state_dict(step.model, step.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name not in _HARMLESS.get(module_name, ()):
            raise pickle.UnpicklingError(f"{module_name}.{global_name} does not belong into DCP's metadata")
        return super().find_class(module_name, global_name)


class _Reader(dcp.FileSystemReader):
    """DCP's reader, except that metadata may name DCP's own records only."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / _METADATA
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read ({error}){offer(path.parent)}") from error
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    """DCP's planner, except that values that are not tensors are read with `weights_only=True`."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        buffer = io.BytesIO()
        torch.save(plain, buffer)  # DCP now unpickles bytes that were written here
        buffer.seek(0)
        super().load_bytes(read_item, buffer)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
