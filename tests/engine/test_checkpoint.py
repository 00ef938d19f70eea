"""One checkpoint file: written whole or not at all, refused when anything is wrong with it."""

import hashlib
import io
import os
import pickle
from pathlib import Path

import pytest
import torch

from micronorm import records
from micronorm.engine import checkpoint
from micronorm.engine.checkpoint import CheckpointError, checkpoints, digest, load, save
from micronorm.records import files

STATE = {
    "model": {"weight": torch.arange(6.0), "count": torch.tensor(3)},
    "position": {"step": 2},
    "figures": {"a": 1.5},
}


class Killed(BaseException):
    """A kill at a chosen place, as far as files are concerned."""


class Bomb:
    """A pickle of it calls `os.mkdir` when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


def put(folder: Path, step: int, content: bytes) -> Path:
    """A file as `save` would have named it."""
    path = folder / f"step-{step:08d}.{hashlib.sha256(content).hexdigest()[:16]}.pt"
    path.write_bytes(content)
    return path


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_a_state_is_read_back_as_it_was_written(tmp_path):
    state = load(save(tmp_path / "new" / "folder", 2, STATE))
    assert digest({name: state[name] for name in STATE}) == digest(STATE)
    assert state["step"] == 2


def test_the_newest_two_are_kept(tmp_path):
    paths = [save(tmp_path, step, {"n": step}) for step in (9, 10, 100)]
    assert checkpoints(tmp_path) == [paths[2], paths[1]]
    assert sorted(file.name for file in tmp_path.iterdir()) == [paths[1].name, paths[2].name]


@pytest.mark.parametrize("damage", ["truncated", "empty", "first byte", "middle byte", "last byte", "longer"])
def test_a_damaged_file_is_refused_left_alone_and_the_one_before_it_offered(tmp_path, damage):
    before, path = save(tmp_path, 1, STATE), save(tmp_path, 2, STATE)
    content = bytearray(path.read_bytes())
    if damage.endswith("byte"):
        content[{"first": 0, "middle": len(content) // 2, "last": -1}[damage.split()[0]]] ^= 1
    else:
        content = {"truncated": content[:-100], "empty": b"", "longer": content + b"\0"}[damage]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"is damaged: its [\d,]+ bytes .*; delete it to .* {before.name}$"):
        load(path)
    assert path.read_bytes() == bytes(content)
    path.unlink()
    assert load(checkpoints(tmp_path)[0])["step"] == 1


def test_a_damaged_file_without_another_says_so(tmp_path):
    path = save(tmp_path, 2, STATE)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="no other checkpoint beside it: delete it to start again"):
        load(path)


@pytest.mark.parametrize("foreign", [{"weight": torch.ones(2)}, [1, 2], torch.ones(2)])
def test_a_file_of_something_else_under_a_right_name_is_refused(tmp_path, foreign):
    before = save(tmp_path, 1, STATE)
    with pytest.raises(CheckpointError, match=f"holds no checkpoint of micronorm; delete it .* {before.name}$"):
        load(put(tmp_path, 2, saved(foreign)))


def test_bytes_that_are_no_file_of_torch_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(put(tmp_path, 2, b"something else altogether"))


@pytest.mark.parametrize("wrap", [saved, pickle.dumps, lambda bomb: saved({"format": checkpoint.FORMAT, "x": bomb})])
def test_nothing_in_a_file_is_executed(tmp_path, wrap):
    executed = tmp_path / "executed"
    path = put(tmp_path, 2, wrap(Bomb(executed)))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(path)
    assert not executed.exists()


@pytest.mark.parametrize("version", [2, None])
def test_a_checkpoint_of_another_version_is_refused(tmp_path, version):
    with pytest.raises(CheckpointError, match="has another format than 1, which this version of micronorm reads"):
        load(put(tmp_path, 2, saved({"format": checkpoint.FORMAT, "version": version})))


def test_a_file_with_another_name_is_no_checkpoint(tmp_path):
    for name in ("last.pt", "step-2.pt", "step-2.0123.pt", ".step-00000002.0123456789abcdef.pt.11aa22bb.partial"):
        (tmp_path / name).write_bytes(b"")
    assert checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"their names are step-NUMBER\.DIGEST\.pt"):
        load(tmp_path / "last.pt")


@pytest.mark.parametrize("stage", ["open", "write", "fsync", "replace", "sync_folder", "unlink"])
def test_a_kill_at_any_stage_of_writing_leaves_a_whole_newest_checkpoint(tmp_path, monkeypatch, stage):
    for step in (1, 2):
        save(tmp_path, step, STATE)

    def killed(*args: object, **kwargs: object) -> None:
        raise Killed

    def torn(path: Path, content: bytes) -> None:
        path.with_name(f".{path.name}.0123abcd{records.PARTIAL}").write_bytes(content[: len(content) // 2])
        raise Killed

    with monkeypatch.context() as patch:
        if stage == "open":
            patch.setattr(files, "open", killed, raising=False)
        elif stage == "write":
            patch.setattr(checkpoint, "write_atomically", torn)
        elif stage in ("fsync", "replace"):
            patch.setattr(os, stage, killed)
        else:
            patch.setattr(*((files, stage) if stage == "sync_folder" else (Path, stage)), killed)
        if stage in ("fsync", "replace"):  # nobody cleans up after a kill
            patch.setattr(Path, "unlink", lambda *args, **kwargs: None)
        with pytest.raises(Killed):
            save(tmp_path, 3, STATE)
    newest = 3 if stage in ("sync_folder", "unlink") else 2
    assert load(checkpoints(tmp_path)[0])["step"] == newest
    assert len(records.remove_partials(tmp_path)) == (stage in ("write", "fsync", "replace"))
    save(tmp_path, 4, STATE)
    assert [load(path)["step"] for path in checkpoints(tmp_path)] == [4, newest]


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    before = save(tmp_path, 1, STATE)

    def full(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2, STATE)
    assert list(tmp_path.iterdir()) == [before]


def test_a_digest_is_of_bytes_types_shapes_and_names():
    states = [
        {"a": torch.zeros(2)},
        {"a": -torch.zeros(2)},
        {"b": torch.zeros(2)},
        {"a": torch.zeros(2, 1)},
        {"a": torch.zeros(2, dtype=torch.float64)},
        {"a": torch.zeros(1)},
        {"a": [0.0, 0.0]},
        {"a": 0},
        {"a": 0.0},
        {"a": False},
        {"a": "0"},
        {"a": None},
        {},
    ]
    assert len({digest(state) for state in states}) == len(states)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
