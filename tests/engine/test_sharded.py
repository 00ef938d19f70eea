"""Runs over several ranks, resumed on as many, on fewer or on more; and the sharded folders of earlier revisions."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from micronorm import records
from micronorm.engine import journal
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


# --- folders that another program wrote -------------------------------------------------------------------------------

# A pickle that sets pathlib.Path.is_file to torch.float32 when it is read.
REPLACES_IS_FILE = b"\x80\x04cpathlib\nPath\nN}\x8c\x07is_filectorch\nfloat32\ns\x86b."
# A pickle of a path outside the folder, as DCP's storage data may name one.
READS_OUTSIDE = b"\x80\x04ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n(\x8c\x04../xK\x00K\x01tR."


@pytest.mark.parametrize("metadata", [REPLACES_IS_FILE, READS_OUTSIDE, None], ids=["pickle", "outside", "empty"])
@pytest.mark.parametrize("step", [1, 9], ids=["older", "newest"])
def test_a_sharded_folder_is_never_read_and_changes_nothing(tmp_path, metadata, step):
    train(tmp_path, steps=4)
    folder = tmp_path / journal.CHECKPOINTS / f"step-{step:08d}.sharded"
    folder.mkdir()
    if metadata is not None:
        (folder / ".metadata").write_bytes(metadata)
    is_file = Path.is_file
    assert run(tmp_path, model=tiny_model(noise=False), resume=True).finished
    assert contents(folder) == ({} if metadata is None else {".metadata": metadata})
    assert Path.is_file is is_file
