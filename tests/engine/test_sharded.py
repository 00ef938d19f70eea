"""Runs over several ranks, resumed on as many, on fewer or on more; and folders that something happened to."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from micronorm import records
from micronorm.engine import checkpoint, journal, sharded
from micronorm.engine.checkpoint import FORMAT, CheckpointError
from tests.engine.test_checkpoint import Bomb
from tests.engine.tiny import STEPS, contents, run, tiny_model
from tests.processes import finish, start
from tests.tolerances import assert_close_to_max, tolerance

FULL = "No space left on device"


def train(out: Path, **options: Any) -> None:
    run(out, model=tiny_model(noise=False), **options)


def on_two_ranks(folder: Path) -> None:
    """All that needs two ranks, in one start of them."""
    dist.init_process_group("gloo")
    for kind in ("fsdp", "ddp"):
        train(folder / f"{kind}-whole", parallel=kind)
        train(folder / f"{kind}-to-one", parallel=kind, steps=4)
        train(folder / f"{kind}-from-one", parallel=kind, resume=True)
        for step in (1, 3, 4):
            train(folder / f"{kind}-cut", parallel=kind, steps=step, resume=True)
        train(folder / f"{kind}-cut", parallel=kind, resume=True)
        _fill_the_disk(folder / f"{kind}-full", kind)
    _ = shutil.copytree(folder / "fsdp-to-one", folder / "fsdp-to-ddp") if dist.get_rank() == 0 else None
    dist.barrier()
    train(folder / "fsdp-to-ddp", parallel="ddp", resume=True)
    dist.barrier()
    dist.destroy_process_group()


def _fill_the_disk(out: Path, kind: str) -> None:
    """Rank 0 cannot write its second checkpoint; the others are told, and the run goes on later."""
    replace = os.replace

    def full(source: str, target: str) -> None:
        if "step-00000003" in str(target):
            raise OSError(FULL)
        replace(source, target)

    os.replace = full
    try:
        with pytest.raises(OSError, match=FULL):
            train(out, parallel=kind)
    finally:
        os.replace = replace
    train(out, parallel=kind, resume=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder of the runs on two ranks, and of those that went on from there or before on one."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "one")
    for kind in ("fsdp", "ddp"):
        train(folder / f"{kind}-from-one", steps=4)
    assert finish(start(on_two_ranks, folder, log=folder / "log", ranks=2)) == [0, 0], (folder / "log").read_text()
    for kind in ("fsdp", "ddp"):
        shutil.copytree(folder / f"{kind}-to-one", folder / f"{kind}-left")
        train(folder / f"{kind}-to-one", resume=True)
    return folder


def digest_of(out: Path) -> str:
    outcome = records.read(out).outcome
    assert outcome is not None
    assert outcome["finished"]
    return outcome["digest"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_run_cut_and_resumed_on_as_many_ranks_ends_with_the_same_digest(runs, kind):
    expected = digest_of(runs / f"{kind}-whole")
    assert digest_of(runs / f"{kind}-cut") == expected
    steps = [row["step"] for row in records.read(runs / f"{kind}-cut").steps]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_checkpoint_that_could_not_be_written_is_an_error_on_every_rank_and_the_run_goes_on_later(runs, kind):
    assert digest_of(runs / f"{kind}-full") == digest_of(runs / f"{kind}-whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["fsdp-whole", "fsdp-to-one", "fsdp-from-one", "fsdp-to-ddp", "ddp-whole", "ddp-to-one", "ddp-from-one"],
)
def test_ranks_may_come_and_go_and_so_may_shards(runs, name):
    expected = safetensors.torch.load_file(runs / "one" / journal.WEIGHTS)
    actual = safetensors.torch.load_file(runs / name / journal.WEIGHTS)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert_close_to_max(actual[key], value, tol=tolerance("fifty_steps", torch.float64))
    ours, theirs = records.read(runs / name), records.read(runs / "one")
    assert [row["step"] for row in ours.steps] == list(range(1, STEPS + 1))
    for mine, other in zip(ours.steps, theirs.steps, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-10)
        assert mine["samples"] == other["samples"]


# --- folders that something happened to ------------------------------------------------------------------------------


@pytest.fixture
def left(runs, tmp_path) -> Path:
    """A run of two sharded ranks that was stopped after four steps."""
    return Path(shutil.copytree(runs / "fsdp-left", tmp_path / "run"))


def newest_of(left: Path) -> Path:
    path = checkpoint.newest(left / journal.CHECKPOINTS)
    assert path is not None
    assert path.name == "step-00000004.sharded"
    return path


def sign(folder: Path) -> None:
    """A manifest that agrees with what lies in the folder."""
    files = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir() if f.name != sharded.MANIFEST}
    (folder / sharded.MANIFEST).write_text(json.dumps({"format": FORMAT, "version": 1, "files": files}))


def assert_refused_and_the_one_before_it_used(left: Path, message: str, runs: Path) -> None:
    before = contents(left)
    with pytest.raises(CheckpointError, match=rf"(?s){message}.*; delete it to resume from .* step-00000003\.sharded$"):
        train(left, resume=True)
    assert contents(left) == before
    shutil.rmtree(newest_of(left))
    train(left, resume=True)
    expected = safetensors.torch.load_file(runs / "one" / journal.WEIGHTS)
    for key, value in safetensors.torch.load_file(left / journal.WEIGHTS).items():
        assert_close_to_max(value, expected[key], tol=tolerance("fifty_steps", torch.float64))


@pytest.mark.parametrize("name", [".metadata", "rest.pt", "__0_0.distcp", "__1_0.distcp"])
@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_a_damaged_part_is_refused_by_name(left, name, how):
    file = newest_of(left) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if how == "flipped" else content[:-1])
    if how == "missing":
        file.unlink()
    with pytest.raises(CheckpointError, match=rf"is damaged: {name} is missing or was changed; delete it to resume"):
        sharded.load_rest(newest_of(left))


@pytest.mark.parametrize("manifest", [None, "", "{", "[]", "{}", '{"files": 3}', '{"files": "ab"}'])
def test_a_folder_without_a_manifest_that_can_be_read_is_refused(left, manifest):
    file = newest_of(left) / sharded.MANIFEST
    file.unlink() if manifest is None else file.write_text(manifest)
    with pytest.raises(CheckpointError, match=r"its manifest.json cannot be read; delete it to resume"):
        sharded.load_rest(newest_of(left))


def test_a_folder_of_something_else_is_refused(left):
    folder = newest_of(left)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read; delete it to resume"):
        sharded.load_rest(folder)
    torch.save({"weight": torch.ones(2)}, folder / "rest.pt")
    (folder / ".metadata").write_bytes(b"")
    sign(folder)
    with pytest.raises(CheckpointError, match="holds no checkpoint of micronorm; delete it to resume"):
        sharded.load_rest(folder)


def test_damage_stops_the_run_untouched_and_the_one_before_it_can_be_used(left, runs):
    file = newest_of(left) / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert_refused_and_the_one_before_it_used(left, "is damaged: __1_0.distcp is missing or was changed", runs)


def test_nothing_in_the_metadata_is_executed(left, runs, tmp_path):
    executed = tmp_path / "executed"
    (newest_of(left) / ".metadata").write_bytes(pickle.dumps(Bomb(executed)))
    sign(newest_of(left))
    assert_refused_and_the_one_before_it_used(left, "posix.mkdir does not belong into DCP's metadata", runs)
    assert not executed.exists()


def test_nothing_in_the_rest_is_executed(left, tmp_path):
    executed = tmp_path / "executed"
    torch.save(Bomb(executed), newest_of(left) / "rest.pt")
    sign(newest_of(left))
    with pytest.raises(CheckpointError, match=r"rest\.pt cannot be read"):
        sharded.load_rest(newest_of(left))
    assert not executed.exists()


def test_nothing_among_the_values_is_executed(left, runs, tmp_path):
    """DCP keeps what is no tensor as pickles among the tensors: one of them is made to point to a bomb."""
    executed = tmp_path / "executed"
    folder = newest_of(left)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    entry = next(v for k, v in metadata.storage_data.items() if k.fqn.startswith("optimizer.param_groups"))
    bomb = tmp_path / "bomb"
    torch.save(Bomb(executed), bomb)
    file = folder / entry.relative_path
    content = file.read_bytes()
    object.__setattr__(entry, "offset", len(content))
    object.__setattr__(entry, "length", len(bomb.read_bytes()))
    file.write_bytes(content + bomb.read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(folder)
    assert_refused_and_the_one_before_it_used(left, "step-00000004.sharded cannot be read", runs)
    assert not executed.exists()


def test_another_model_is_refused_and_left_as_it_is(left):
    before, model = contents(left), tiny_model(channels=6, noise=False)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"is of another model: .* '0.bias', \(4,\) there and \(6,\) here"):
        run(left, model=model, resume=True)
    assert contents(left) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_what_a_killed_writer_left_is_removed(left):
    torn = left / journal.CHECKPOINTS / ".step-00000005.tmp"
    shutil.copytree(newest_of(left), torn)
    (torn / sharded.MANIFEST).unlink()
    train(left, resume=True, steps=5)
    assert not torn.exists()
