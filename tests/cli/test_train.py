"""`micronorm train`: the law through the command line, kills, signals, and what is refused."""

import os
import random
import shlex
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from micronorm import records
from micronorm.cli import app
from micronorm.cli.targets import find_recipe
from micronorm.cli.train import _launcher
from micronorm.engine.checkpoint import checkpoints
from micronorm.engine.settings import Execution
from micronorm.recipes import find
from micronorm.recipes.networks import NETWORKS
from micronorm.recipes.run import Variation, run_recipe
from tests.engine.tiny import contents
from tests.processes import finish, micronorm, start
from tests.tolerances import assert_close_to_max, tolerance

STEPS = 4
DOUBLE = ("--step-batch", "32", "--dtype", "float64")
SHORT = ("train", "digits", "--step-batch", "200", "--epochs", "2", "--save-every", "2")  # two epochs of seven steps


def train(out: Path, *, dtype: str = "float64", resume: bool = False, **execution: Any) -> dict[str, torch.Tensor]:
    """Steps of 32 digits, cut as `execution` says; the weights they led to."""
    cpu = Execution(device=torch.device("cpu"), **{"steps": STEPS, **execution})
    variation = Variation(step_batch=32, dtype=dtype)
    run_recipe(find("digits"), out=out, variation=variation, execution=cpu, resume=resume)
    return weights(out)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(out / "model.safetensors")


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, tol: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close_to_max(actual[name], value, tol=tol)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights after the steps, computed on one rank without a cut."""
    return train(tmp_path_factory.mktemp("whole"), micro_batch=32)


def test_the_record_holds_the_papers_figure_and_what_the_network_says_of_some_images(tmp_path):
    train(tmp_path / "ours", dtype="float32", steps=1)
    record = records.read(tmp_path / "ours")
    assert record.facts["paper"] is None
    assert record.facts["title"] == find("digits").title
    assert len(record.predictions) == 16
    theirs = replace(find("digits"), paper={"top1": 6.31})
    run_recipe(theirs, out=tmp_path / "theirs", execution=Execution(device=torch.device("cpu"), steps=1))
    assert records.read(tmp_path / "theirs").facts["paper"] == {"top1": 6.31}


# --- cuts ------------------------------------------------------------------------------------------------------------


def test_a_run_that_recomputes_ends_with_the_same_digest_and_records_it(tmp_path):
    for name, recompute in (("plain", False), ("sparing", True)):
        train(tmp_path / name, dtype="float32", micro_batch=16, recompute=recompute, steps=2)
    plain, sparing = (records.read(tmp_path / name) for name in ("plain", "sparing"))
    assert plain.outcome is not None
    assert sparing.outcome is not None
    assert sparing.outcome["digest"] == plain.outcome["digest"]
    assert (plain.facts["execution"]["recompute"], sparing.facts["execution"]["recompute"]) == (False, True)


def test_a_run_is_observed_by_an_option_that_its_resumption_is_told_to_repeat(tmp_path):
    how = ("--step-batch", "16", "--steps", "3", "--device", "cpu", "--observe", "2")
    done = CliRunner().invoke(app, ["train", "digits", *how, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "--observe 2" in done.output.split("to continue:")[1]
    looks = records.read(tmp_path).diagnostics
    assert [row["step"] for row in looks] == [1, 3]
    assert {layer["kind"] for layer in looks[0]["layers"].values()} == {"norm", "weight"}


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_a_run_does_not_depend_on_the_micro_batch(tmp_path, whole, micro_batch):
    cut = train(tmp_path, micro_batch=micro_batch)
    assert_same(cut, whole, tol=tolerance("fifty_steps", torch.float64))
    assert {row["micro_batch"] for row in records.read(tmp_path).steps} == {micro_batch}


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_a_float32_step_does_not_depend_on_the_micro_batch(tmp_path, micro_batch):
    one = train(tmp_path / "whole", dtype="float32", micro_batch=32, steps=1)
    cut = train(tmp_path / "cut", dtype="float32", micro_batch=micro_batch, steps=1)
    assert_same(cut, one, tol=tolerance("one_step", torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("ranks, parallel", [(2, "fsdp"), (4, "ddp")])
def test_a_run_does_not_depend_on_the_number_of_ranks(tmp_path, whole, ranks, parallel):
    options = ("--out", str(tmp_path / "run"), "--parallel", parallel, "--micro-batch", "5", "--steps", str(STEPS))
    options += ("--observe", "2")  # on rank 0, which must not wait for the others on its account
    processes = start(micronorm, "train", "digits", *DOUBLE, *options, log=tmp_path / "log", ranks=ranks)
    assert finish(processes) == [0] * ranks, (tmp_path / "log").read_text()
    assert_same(weights(tmp_path / "run"), whole, tol=tolerance("fifty_steps", torch.float64))
    record = records.read(tmp_path / "run")
    assert record.facts["execution"]["ranks"] == ranks
    assert [row["step"] for row in record.diagnostics] == [1, 3]
    kinds = {layer["kind"] for row in record.diagnostics for layer in row["layers"].values()}
    assert kinds == ({"norm"} if parallel == "fsdp" else {"norm", "weight"})  # a shard is no weight to look at


# --- kills and signals -----------------------------------------------------------------------------------------------


def wait_for_steps(out: Path, steps: int) -> None:
    end = time.monotonic() + 90
    while not (out / records.STEPS).exists() or (out / records.STEPS).read_bytes().count(b"\n") < steps:
        assert time.monotonic() < end, f"{steps} steps did not come"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> tuple[records.Record, float]:
    """A run that nothing happened to, and how many seconds it took."""
    folder = tmp_path_factory.mktemp("short")
    began = time.monotonic()
    processes = start(micronorm, *SHORT, "--out", str(folder / "run"), log=folder / "log")
    assert finish(processes) == [0], (folder / "log").read_text()
    return records.read(folder / "run"), time.monotonic() - began


def assert_ended_alike(out: Path, expected: records.Record) -> None:
    record = records.read(out)
    assert record.outcome == expected.outcome
    assert [row["step"] for row in record.steps] == list(range(1, 15))
    assert [row["loss"] for row in record.steps] == [row["loss"] for row in expected.steps]
    assert [row["epoch"] for row in record.epochs] == [0, 1]


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_same_digest(tmp_path, short):
    expected, seconds = short
    out, log = tmp_path / "run", tmp_path / "log"
    for _ in range(3):
        processes = start(micronorm, *SHORT, "--out", str(out), "--resume", log=log)
        processes[0].join(random.uniform(0, seconds))
        processes[0].kill()
        assert finish(processes)[0] in (0, -signal.SIGKILL), log.read_text()
    assert finish(start(micronorm, *SHORT, "--out", str(out), "--resume", log=log)) == [0], log.read_text()
    assert_ended_alike(out, expected)


@pytest.mark.slow
def test_ctrl_c_and_sigterm_save_exit_with_their_code_and_say_how_to_go_on(tmp_path, short):
    out, arguments = tmp_path / "run", (*SHORT, "--out", str(tmp_path / "run"))
    for number, steps in ((signal.SIGINT, 1), (signal.SIGTERM, 5)):
        log = tmp_path / f"{number}.log"
        processes = start(micronorm, *arguments, log=log)
        wait_for_steps(out, steps)
        os.kill(processes[0].pid or 0, number)
        assert finish(processes) == [128 + number], log.read_text()
        outcome = records.read(out).outcome
        assert outcome is not None
        assert not outcome["finished"]
        *_, hint = log.read_text().splitlines()
        assert hint == f"to continue: micronorm train digits/bcn-ws --out {out} --resume --save-every 2"
        arguments = shlex.split(hint)[3:]
    assert finish(start(micronorm, *arguments, log=tmp_path / "log")) == [0], (tmp_path / "log").read_text()
    assert_ended_alike(out, short[0])


@pytest.mark.slow
def test_a_signal_to_one_of_four_ranks_stops_all_and_one_rank_goes_on(tmp_path, whole):
    out, log = tmp_path / "run", tmp_path / "log"
    processes = start(micronorm, "train", "digits", *DOUBLE, "--out", str(out), log=log, ranks=4)
    wait_for_steps(out, 1)
    os.kill(processes[2].pid or 0, signal.SIGTERM)
    assert finish(processes) == [128 + signal.SIGTERM] * 4, log.read_text()
    done = len(records.read(out).steps)
    went_on = train(out, resume=True, steps=done + 2)
    expected = whole if done + 2 == STEPS else train(tmp_path / "whole", steps=done + 2)
    assert_same(went_on, expected, tol=tolerance("fifty_steps", torch.float64))


# --- what is refused, and what is said -------------------------------------------------------------------------------


def command(*arguments: object) -> tuple[int, str]:
    """Exit code and what was printed, on one line."""
    result = CliRunner().invoke(app, ["train", "digits", "--device", "cpu", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that was stopped after three of seven steps."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    code, said = command("--step-batch", 200, "--epochs", 1, "--steps", 3, "--save-every", 2, "--out", out)
    assert code == 0
    assert "3 steps; on the test samples: loss" in said
    assert f"to continue: micronorm train digits/bcn-ws --out {out} --resume" in said
    return out


@pytest.fixture
def out(tmp_path, stopped) -> Path:
    """A copy of that run."""
    return shutil.copytree(stopped, tmp_path / "run")


def test_a_resumed_run_keeps_its_options_and_a_finished_one_is_left_alone(out):
    code, said = command("--out", out, "--resume")
    assert code == 0
    assert "7 steps; on the test samples: loss" in said
    assert "to continue" not in said
    record, before = records.read(out), contents(out)
    assert [row["step"] for row in record.steps] == list(range(1, 8))
    assert record.facts["settings"]["step_batch"] == 200
    code, said = command("--out", out, "--resume")
    assert code == 0
    assert "nothing is left to do: 7 of 7 steps are done" in said
    assert contents(out) == before


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "already holds a run"),
        (("--resume", "--lr", "0.5"), "other settings: optimizer.lr: 0.1 → 0.5;"),
        (("--resume", "--step-batch", "64", "--seed", "1"), "step_batch: 200 → 64, seed: 0 → 1;"),
        (("--resume", "--dtype", "float64"), "dtype: float32 → float64;"),
    ],
)
def test_what_contradicts_the_run_in_the_folder_is_refused(out, arguments, message):
    before = contents(out)
    code, said = command("--out", out, *arguments)
    assert code == 2
    assert said.startswith("micronorm train: ")
    assert message in said
    assert contents(out) == before


def test_another_recipe_is_refused(out):
    result = CliRunner().invoke(app, ["train", "digits/gn", "--out", str(out), "--resume"])
    assert result.exit_code == 2
    assert "holds a run of digits/bcn-ws, not of digits/gn" in " ".join(result.output.split())


def test_a_damaged_checkpoint_is_refused_and_can_be_deleted(out):
    newer, older = checkpoints(out / "checkpoints")
    newer.write_bytes(newer.read_bytes()[:-7])
    before = contents(out)
    code, said = command("--out", out, "--resume")
    assert code == 2
    assert f"{newer} is damaged" in said
    assert said.endswith(f"delete it to resume from the one before it, {older.name}")
    assert contents(out) == before
    newer.unlink()
    code, _ = command("--out", out, "--resume")
    assert code == 0
    assert [row["step"] for row in records.read(out).steps] == list(range(1, 8))


def test_there_is_nothing_to_resume_in_a_new_folder_and_the_run_begins(tmp_path):
    code, said = command("--out", tmp_path / "new", "--resume", "--steps", 1)
    assert code == 0
    assert f"no checkpoint in {tmp_path / 'new'}: the run starts with its first step" in said
    assert "1 step; on the test samples: loss" in said


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--micro-batch", "0"), "--micro-batch must be auto or a number of samples from 1 on, got '0'"),
        (("--dtype", "int8"), "'int8' is not one of"),
        (("--size", "32"), "digits has no option --size: leave it out"),
        (("--cuda-graph",), "leave --cuda-graph out"),
        (("--device", "gpu"), "--device must be cpu, cuda or cuda:N, got 'gpu'"),
        (("--device", "mps"), "--device must be cpu, cuda or cuda:N, got 'mps'"),
        (("--device", "cuda:99"), "--device cuda:99: torch can use"),
        (("--workers", "2"), "digits has no option --workers: leave it out"),
        (("--unverified",), "digits has no option --unverified: leave it out"),
        (("--compile", "--recompute"), "recompute has no effect in compiled code"),
        (("--data", "."), "digits has no option --data: leave it out"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, arguments, message):
    code, said = command("--out", tmp_path / "run", *arguments)
    assert code == 2
    assert message in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("under", ["", "below"])
def test_a_file_in_the_place_of_the_run_directory_is_refused(tmp_path, under):
    (tmp_path / "file").write_text("precious")
    code, said = command("--out", tmp_path / "file" / under, "--steps", 1)
    assert code == 2
    assert said.startswith("micronorm train: ")
    assert str(tmp_path / "file") in said
    assert (tmp_path / "file").read_text() == "precious"


def test_a_download_that_fails_ends_the_run_with_one_sentence(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", fail)
    arguments = ["train", "cifar1/c10-bn", "--data", str(tmp_path), "--download", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith("micronorm train: fetching https://www.cs.toronto.edu/")
    assert "failed (no route); try again" in line


def test_the_hint_keeps_what_makes_a_run_fast_or_fit(tmp_path):
    options = ["--micro-batch", "7", "--channels-last", "--recompute", "--parallel", "fsdp", "--evaluate-every", "3"]
    code, said = command("--out", tmp_path, "--steps", 1, *options)
    assert code == 0
    _, hint = said.split("to continue: micronorm train ")
    assert hint.startswith(f"digits/bcn-ws --out {tmp_path} --resume ")
    given = hint.split("--resume ")[1].split()
    assert sorted(given) == sorted([*options, "--device", "cpu"])


def test_the_hint_of_ranks_on_one_machine_is_for_as_many(monkeypatch):
    assert _launcher() == ["micronorm"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert shlex.join(_launcher()) == "torchrun --nproc-per-node 4 -m micronorm"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two machines: what joins them is not known here
    assert _launcher() == ["micronorm"]


OWN = """
from dataclasses import replace
from torch import nn
from micronorm import recipes
from micronorm.recipes.networks import NETWORKS

def small(*, classes):
    layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, classes))

NETWORKS["small"] = small
first = replace(recipes.find("digits"), table="mine", row="first", network="small")
"""


def test_a_recipe_is_named_as_in_other_commands_too():
    assert find_recipe("recipe:digits/gn") is find_recipe("digits/gn")


def test_a_recipe_of_ones_own_is_trained_from_its_file(tmp_path, monkeypatch):
    (tmp_path / "my_recipes.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setitem(NETWORKS, "small", None)

    def command(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, list(arguments))
        return result.exit_code, " ".join(result.output.split())

    code, output = command("train", "my_recipes.py:first", "--steps", "1")
    assert code == 0, output
    assert "to continue: micronorm train my_recipes.py:first --out runs/mine-first-0 --resume" in output
    assert records.read("runs/mine-first-0").facts["recipe"] == "mine/first"
    code, output = command("fold", "runs/mine-first-0", "--out", "x.safetensors")
    assert (code, "--model FILE.py:NAME" in output) == (1, True), output
    code, output = command("fold", "runs/mine-first-0", "--model", "my_recipes.py:first", "--out", "x.safetensors")
    assert code == 0, output
    assert command("train", "my_recipes.py:small")[0] == 2
    assert "must be a recipes.Recipe, got function" in command("train", "my_recipes.py:small")[1]


def test_a_recipe_of_ones_own_with_torchs_layers_only_is_folded_and_planned_as_it_is(tmp_path, monkeypatch):
    plain = 'plain = replace(recipes.find("digits/bn-64"), table="mine", row="plain", network="small")'
    (tmp_path / "plain_recipes.py").write_text(f"{OWN}\n{plain}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setitem(NETWORKS, "small", None)

    def command(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, list(arguments))
        return result.exit_code, " ".join(result.output.split())

    assert command("train", "plain_recipes.py:plain", "--steps", "1")[0] == 0
    run, model = "runs/mine-plain-0", "plain_recipes.py:plain"
    code, output = command("fold", run, "--model", model, "--onnx", "x.onnx", "--size", "8", "8")
    assert code == 0, output
    code, output = command("fold", run, "--model", model, "--norm", "gn", "--onnx", "x.onnx")
    assert (code, "leave out --norm" in output) == (2, True), output
    code, output = command("plan", "plain_recipes.py:first")
    assert (code, "BatchChannelNorm(8/" in output) == (0, True), output
