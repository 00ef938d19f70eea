"""`micronorm reproduce`: the contract of --json, what is shown, what is run and what the exit code says."""

import json
import math
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from micronorm import records
from micronorm.cli import app, reproduce, row_queue
from micronorm.engine import Diverged, Execution
from micronorm.recipes import find
from micronorm.recipes.digits import EPOCHS
from micronorm.recipes.run import Variation, run_recipe
from tests.engine.tiny import contents
from tests.recipes.runs import write_run


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch, tmp_path):
    """An empty package and an empty folder, so that the tests do not depend on what has been measured since."""
    monkeypatch.setattr(reproduce, "packaged", list)
    monkeypatch.setattr(reproduce, "Console", partial(Console, width=200))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(monkeypatch):
    """`micronorm train` replaced by what it leaves behind; returns the list of its calls."""
    calls = []

    def run_recipe(recipe, *, out, variation, execution, data, workers, task, resume, listener, command):
        calls.append(
            (
                recipe.name,
                {
                    "out": str(out),
                    "data": data,
                    "resume": resume,
                    "command": command,
                    "execution": execution,
                    **vars(variation),
                },
            )
        )
        if recipe.row == "bn":
            raise FileNotFoundError("no CIFAR-10 in data")
        if not resume:
            epochs = variation.epochs or recipe.settings.epochs
            write_run(out, recipe.name, seed=variation.seed, settings={"epochs": epochs})
        stopped = recipe.row == "gn-ws"
        return SimpleNamespace(finished=not stopped, steps=12, signal=signal.SIGTERM if stopped else None)

    monkeypatch.setattr(row_queue, "run_recipe", run_recipe)
    monkeypatch.setattr(row_queue, "open_task", lambda task, data, folder, **options: None)
    return calls


@pytest.fixture
def never(monkeypatch):
    monkeypatch.setattr(row_queue, "run_recipe", lambda *args, **options: pytest.fail("something was run"))


def run(*arguments: str):
    return CliRunner().invoke(app, ["reproduce", *arguments])


def rows(*arguments: str) -> list[dict]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.usefixtures("never")
def test_json_is_a_list_of_rows_with_these_keys():
    found = rows("cifar2")
    assert [row["row"] for row in found] == [
        *("bn", "sn", "dn", "bcn-ws"),
        *("micro-bn", "micro-sn", "micro-dn", "micro-bcn-ws", "micro-bcn-ws-step"),
    ]
    for row in found:
        assert set(row) == {"row", "paper", "ours", "seeds", "run", "reason"}
        assert (row["ours"], row["seeds"], row["run"]) == (None, [], None)
    assert found[0]["paper"] == {"top1": 5.2}
    assert found[-1]["paper"] is None
    assert found[0]["reason"] == "not run"
    assert "refers to another paper" in found[2]["reason"]


@pytest.mark.usefixtures("never")
def test_json_holds_the_mean_over_seeds_and_where_the_records_lie(tmp_path):
    for seed, error in ((0, 6.0), (3, 7.0)):
        write_run(tmp_path / "runs" / f"s{seed}", "cifar1/c10-bn", seed=seed, figures={"top1": error})
    (row,) = rows("cifar1", "--rows", "c10-bn")
    assert row == {
        "row": "c10-bn",
        "paper": {"top1": 6.43},
        "ours": {"top1": 6.5},
        "seeds": [0, 3],
        "run": ["runs/s0", "runs/s3"],
    }


@pytest.mark.usefixtures("never")
def test_json_gives_no_figure_of_a_run_that_differs_but_says_why(tmp_path):
    write_run(tmp_path / "elsewhere" / "a", "digits/gn", settings={"epochs": 1})
    (row,) = rows("digits", "--rows", "gn", "--runs", "elsewhere")
    assert (row["ours"], row["run"]) == (None, None)
    assert row["reason"] == f"elsewhere/a does not count: epochs 1 where the recipe has {EPOCHS}"


@pytest.mark.usefixtures("never")
def test_json_has_null_for_a_figure_that_is_not_a_number(tmp_path):
    write_run(tmp_path / "runs" / "a", "digits/gn", figures={"top1": 90.0, "loss": float("inf")})
    (row,) = rows("digits", "--rows", "gn")
    assert row["ours"] == {"top1": 90.0, "loss": None}


@pytest.mark.usefixtures("never")
def test_a_damaged_run_is_told_of_and_left_out(tmp_path):
    (write_run(tmp_path / "runs" / "a", "digits/gn") / "run.json").write_text("{", "utf-8")
    result = run("digits", "--rows", "gn", "--json")
    assert json.loads(result.stdout)[0]["ours"] is None
    assert "runs/a cannot be read and is left out" in result.stderr


@pytest.mark.usefixtures("never")
def test_without_a_table_the_tables_are_listed():
    result = run()
    assert result.exit_code == 0
    for name in (
        "abl",
        "imagenet_ws",
        "cwn",
        "ind_abl",
        "resnext",
        "imagenet",
        "cifar1",
        "cifar2",
        "quick",
        "micro_batch",
        "digits",
    ):
        assert f" {name} " in result.output
    listed = rows()
    assert listed[0]["table"] == "abl"
    assert listed[0]["rows"][:2] == ["ln", "ln-ws"]


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["fig:distance"], "no figure 'fig:distance'; near it: fig:dist, "),
        (["fig:dist", "--rows", "gn"], "--rows is for tables; fig:dist is a figure"),
        (["fig:dist", "--seed", "1", "--cuda-graph"], "--seed, --cuda-graph is for tables; fig:dist is a figure"),
        (["fig:dist", "--evaluate-every", "5"], "--evaluate-every is for tables; fig:dist is a figure"),
        (["digits", "--dataset", "cifar10"], "--dataset is for figures"),
        (["cifar"], "near it: cifar"),
        (["digits", "--rows", "bcn"], "digits has no row 'bcn'; near it: bn, bcn-ws"),
        (["digits", "--rows", ","], "--rows names no row; digits has bn-64, "),
        (["digits", "--json", "--epochs", "1"], "--json runs nothing"),
        (["--rows", "bn"], "say which table: abl, "),
    ],
)
def test_one_line_says_what_is_wrong(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_what_is_missing_is_announced_run_and_shown(trained):
    result = run("digits", "--rows", "gn, bcn-ws", "--data", "somewhere")
    assert result.exit_code == 0, result.output
    assert [name for name, _ in trained] == ["digits/gn", "digits/bcn-ws"]
    options = trained[0][1]
    assert (options["out"], options["seed"], options["epochs"]) == ("runs/digits/gn/seed-0", 0, None)
    assert (str(options["data"]), options["resume"]) == ("somewhere", False)
    assert options["command"] == "micronorm train digits/gn --seed 0 --out runs/digits/gn/seed-0"
    before, after = result.output.split("To run: digits/bcn-ws")
    assert "not run" in before
    assert "5.00" not in before
    title = "digits/gn (small ResNet, scikit-learn's digits: GN of one image)"
    assert f"To run: {title}, {EPOCHS} epochs, 315 steps of 64 samples, seed 0, into " in before
    assert "runs/digits/gn/seed-0 (2025-01-02, Some CPU, float32)" in after
    assert after.count("5.00") == 2


@pytest.mark.parametrize("agreed", [False, True])
def test_a_person_who_names_only_a_table_is_asked_before_anything_is_trained(trained, monkeypatch, agreed):
    asked = []
    monkeypatch.setattr(reproduce, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    monkeypatch.setattr(typer, "confirm", lambda question: asked.append(question) or agreed)
    result = run("shapes")
    assert result.output.count("To run: shapes/") == result.output.count(", 300 steps of 16 samples, seed 0") == 4
    assert asked == ["Train these rows now?"]
    assert bool(trained) == agreed
    run("shapes", "--rows", "gn", "--seed", "1")  # options say what to train: no question
    assert trained[-1][0] == "shapes/gn"
    assert len(asked) == 1


@pytest.mark.usefixtures("never")
def test_a_task_without_an_error_shows_its_own_figure(tmp_path):
    for row in ("bn", "gn", "gn-ws", "bcn-ws"):
        write_run(tmp_path / "runs" / row, f"shapes/{row}", figures={"accuracy": 92.0, "miou": 55.5})
    output = run("shapes").output
    assert "Figures: mIoU in %" in output
    assert output.count("55.50") == 4


def test_what_has_a_record_is_not_run_again(trained):
    run("digits", "--rows", "gn")
    result = run("digits", "--rows", "gn")
    assert result.exit_code == 0
    assert len(trained) == 1
    assert "To run" not in result.output


def test_a_seed_that_is_asked_for_is_run_beside_others(trained):
    run("digits", "--rows", "gn")
    result = run("digits", "--rows", "gn", "--seed", "4")
    assert [call["seed"] for _, call in trained] == [0, 4]
    assert "5.00 ± 0.00" in result.output
    assert rows("digits", "--rows", "gn")[0]["seeds"] == [0, 4]


def test_other_epochs_are_run_and_kept_but_never_ours(trained):
    result = run("digits", "--rows", "gn", "--epochs", "2")
    assert result.exit_code == 0
    assert f"It has {EPOCHS} epochs: this run is kept, but never counts as ours." in result.output
    assert trained[0][1]["out"] == "runs/digits/gn/seed-0-epochs-2"
    assert trained[0][1]["command"].endswith(" --epochs 2")
    (row,) = rows("digits", "--rows", "gn")
    assert row["ours"] is None
    assert f"epochs 2 where the recipe has {EPOCHS}" in row["reason"]


def test_the_execution_of_a_row_is_the_one_asked_for_and_recorded(trained):
    run("digits", "--rows", "gn", "--dtype", "bfloat16", "--channels-last", "--evaluate-every", "20", "--minutes", "5")
    (_, options) = trained[0]
    assert options["dtype"] == "bfloat16"
    execution = options["execution"]
    assert (execution.channels_last, execution.cuda_graph, execution.evaluate_epochs) == (True, False, 20)
    assert 4.9 < execution.minutes <= 5
    assert options["command"].endswith("--dtype bfloat16 --channels-last --evaluate-every 20")
    run("camvid", "--rows", "gn", "--workers", "3")
    assert trained[1][1]["command"].endswith("--workers 3")


def test_a_queue_ends_when_its_minutes_are_over_and_says_how_to_continue(trained, monkeypatch):
    now = iter([0.0, 1.0, 400.0])  # when the queue starts, before the first row, before the second
    monkeypatch.setattr(row_queue, "time", SimpleNamespace(monotonic=lambda: next(now)))
    result = run("digits", "--rows", "gn,bcn-ws", "--minutes", "5")
    assert [name for name, _ in trained] == ["digits/gn"]
    assert result.exit_code == 1
    assert "The minutes are over before digits/bcn-ws; the same command continues with it." in result.output


def test_a_row_that_diverges_is_reported_in_one_line_and_the_others_run(trained, monkeypatch):
    run_recipe = row_queue.run_recipe

    def diverge_at_bn(recipe, **options):
        if recipe.row == "bn":
            raise Diverged("the loss is nan at step 5;\nlower the learning rate")
        return run_recipe(recipe, **options)

    monkeypatch.setattr(row_queue, "run_recipe", diverge_at_bn)
    result = run("digits", "--rows", "bn,gn")
    assert result.exit_code == 1
    assert "digits/bn could not be run: the loss is nan at step 5; lower the learning rate\n" in result.stderr
    assert [name for name, _ in trained] == ["digits/gn"]


def test_a_finished_run_is_never_written_over(trained):
    for _ in range(2):
        run("digits", "--rows", "gn", "--epochs", "2")
    assert [call["out"] for _, call in trained] == [
        "runs/digits/gn/seed-0-epochs-2",
        "runs/digits/gn/seed-0-epochs-2-2",
    ]


def test_a_run_from_before_the_recipe_changed_is_neither_resumed_nor_changed():
    out = Path("runs/digits/gn/seed-0")
    execution = Execution(device=torch.device("cpu"), steps=1)
    run_recipe(find("digits/gn"), out=out, variation=Variation(seed=0), execution=execution)
    facts = out / records.FACTS
    facts.write_text(facts.read_text().replace("GN(groups=32", "GN(groups=16"))
    before = contents(out)
    result = run("digits", "--rows", "gn")
    assert result.exit_code == 1
    message = "holds a run from before digits/gn changed: norm: GN(groups=16, min_channels_per_group=2, eps=1e-05) → GN"
    assert message in result.stderr
    assert contents(out) == before


def test_an_unfinished_run_is_resumed_in_its_place(trained, tmp_path):
    write_run(tmp_path / "runs" / "digits" / "gn" / "seed-0", "digits/gn", finished=False)
    run("digits", "--rows", "gn")
    assert (trained[0][1]["out"], trained[0][1]["resume"]) == ("runs/digits/gn/seed-0", True)


def test_a_row_without_data_says_so_and_the_others_run(trained):
    result = run("digits", "--rows", "bn,gn")
    assert result.exit_code == 1
    assert "digits/bn could not be run: no CIFAR-10 in data" in result.stderr
    assert [name for name, _ in trained] == ["digits/bn", "digits/gn"]
    assert "5.00" in result.output


def test_a_stopped_run_ends_the_command(trained):
    result = run("digits", "--rows", "gn-ws,bcn-ws")
    assert result.exit_code == 143
    assert "digits/gn-ws was stopped after step 12; run the same command to continue." in result.output
    assert [name for name, _ in trained] == ["digits/gn-ws"]


def test_a_row_that_nobody_can_run_fails_only_where_it_was_named(trained, tmp_path):
    named = run("cifar2", "--rows", "dn")
    assert named.exit_code == 1
    assert "cifar2/dn cannot be run: the paper quotes Dynamic Normalization's figure" in named.output
    for row in ("bn", "sn", "bcn-ws", "micro-bn", "micro-sn", "micro-bcn-ws", "micro-bcn-ws-step"):
        write_run(tmp_path / "runs" / row, f"cifar2/{row}")
    whole = run("cifar2")
    assert whole.exit_code == 0, whole.output
    assert trained == []


def test_what_the_paper_leaves_open_is_told_once_with_the_rows_it_is_about(trained, tmp_path):
    for row in ("rn50-gn", "rn50-bcn-ws-step"):
        write_run(tmp_path / "runs" / row, f"imagenet/{row}", figures={"top1": 24.0, "top5": 7.0})
    write_run(tmp_path / "runs" / "short", "imagenet/rn50-gn", settings={"epochs": 1})
    output = run("imagenet", "--rows", "rn50-gn,rn50-bcn-ws-step").output
    assert "24.81 / 7.46" in output
    assert "24.00 / 7.00" in output
    assert output.count('ours: BCN with statistics="step"') == 1
    assert 'rn50-bcn-ws-step: ours: BCN with statistics="step"' in output
    assert "All rows: the paper does not say, so we chose" in output
    assert "rn50-gn: runs/short does not count: epochs 1 where the recipe has 90." in output
    assert trained == []


def test_a_short_run_is_recorded_and_is_not_ours():
    assert run("digits", "--rows", "gn", "--runs", "kept", "--epochs", "1").exit_code == 0
    place = Path("kept/digits/gn/seed-0-epochs-1")
    record = records.read(place)
    assert record.facts["recipe"] == "digits/gn"
    assert record.facts["settings"]["epochs"] == 1
    assert record.facts["command"] == f"micronorm train digits/gn --seed 0 --out {place} --epochs 1"
    assert record.outcome is not None
    assert record.outcome["finished"] is True
    (found,) = rows("digits", "--rows", "gn", "--runs", "kept")
    assert (found["ours"], found["seeds"], found["run"]) == (None, [], None)
    assert found["reason"] == f"{place} does not count: epochs 1 where the recipe has {EPOCHS}"


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_and_a_whole_one_is_ours_and_not_run_again(monkeypatch):
    place = Path("kept/digits/gn/seed-2")
    whole = "train digits/gn --seed 2 --steps 5 --device cpu --out"
    stopped = CliRunner().invoke(app, [*whole.split(), str(place)])
    assert stopped.exit_code == 0, stopped.output
    assert rows("digits", "--rows", "gn", "--runs", "kept")[0]["reason"] == f"{place} does not count: not finished"

    shown = run("digits", "--rows", "gn", "--runs", "kept", "--seed", "2").output
    record = records.read(place)
    assert record.outcome is not None
    steps = [step["step"] for step in record.steps]
    assert steps == list(range(1, len(steps) + 1))
    (found,) = rows("digits", "--rows", "gn", "--runs", "kept")
    assert found["ours"] == record.outcome["figures"]
    assert math.isfinite(found["ours"]["loss"])
    assert 0 <= found["ours"]["top1"] < 50  # chance is 90
    assert (found["seeds"], found["run"]) == ([2], [str(place)])
    assert "reason" not in found
    assert f"{found['ours']['top1']:.2f}" in shown

    monkeypatch.setattr(row_queue, "run_recipe", lambda *args, **options: pytest.fail("it was run again"))
    assert "To run" not in run("digits", "--rows", "gn", "--runs", "kept").output


def test_a_data_set_that_is_not_there_is_told_of_once_before_the_rows_are_announced(tmp_path):
    result = run("quick", "--rows", "rn20-gn,rn20-bn", "--data", str(tmp_path))
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("micronorm reproduce: cannot find CIFAR-10 in")
    assert line.endswith(". Rows that need it: rn20-gn, rn20-bn")
    assert "To run" not in result.output
    assert not (tmp_path / "runs").exists()
