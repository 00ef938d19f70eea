"""The sweep, run as a user runs it, over two architectures; and how it judges what goes wrong."""

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

ROOT = Path(__file__).parents[2]
TWO = ("--only", "mobilevit_xxs", "--only", "mixer_s32_224")


@pytest.fixture
def sweep(monkeypatch):
    """The script as a module, with its architectures done in this process."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("sweep")
    monkeypatch.setattr(module, "run_all", lambda todo, workers: (module.sweep_one(*one) for one in todo))
    return module


def rows(out: Path) -> dict[str, dict[str, str]]:
    with out.open(newline="", encoding="utf-8") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """The CSV of one run, and what it printed."""
    out = tmp_path_factory.mktemp("results") / "sweep.csv"
    command = [sys.executable, str(ROOT / "benchmarks" / "sweep.py"), "--out", str(out), "--workers", "1", *TWO]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.mark.slow
def test_a_row_says_what_became_of_an_architecture(finished):
    row = rows(finished[0])["mobilevit_xxs"]
    assert (row["source"], row["family"], row["outcome"], row["checks"]) == ("timm", "mobilevit", "converted", "ok")
    assert (row["pairing"], row["device"]) == ("execution", "meta")
    assert int(row["norms_converted"]) == 32
    assert row["batchnorms_after_convolution_left"] == row["convolutions_directly_before_norm_left"] == "0"
    assert "'" not in row["norms_left_because"].replace("model's", "")  # reasons without the layers' names


@pytest.mark.slow
def test_an_architecture_without_anything_to_convert_says_so(finished):
    row = rows(finished[0])["mixer_s32_224"]
    assert (row["outcome"], row["pairing"]) == ("nothing to convert", "none")
    assert row["detail"].startswith("nothing to convert")


@pytest.mark.slow
def test_the_summary_lies_beside_the_rows_and_is_printed(finished):
    out, printed = finished
    summary = out.with_suffix(".md").read_text(encoding="utf-8")
    assert summary in printed
    assert "| timm mobilevit | 1 of 1 (100%) |" in summary
    assert "## Tracebacks\n\nNone." in summary


@pytest.mark.slow
def test_rows_of_the_same_versions_are_kept_unless_asked_for_again(finished, sweep, capsys):
    out, _ = finished
    before = out.read_text(encoding="utf-8")
    sweep.main(["--out", str(out), *TWO])
    assert capsys.readouterr().out.startswith("0 architectures to do, 2 of 2 already")
    assert out.read_text(encoding="utf-8") == before
    stale = out.with_name("stale.csv")
    stale.write_text(before.replace(rows(out)["mixer_s32_224"]["micronorm"], "0.0.0"), encoding="utf-8")
    sweep.main(["--out", str(stale), "--only", "mixer_s32_224"])
    assert capsys.readouterr().out.startswith("1 architectures to do, 0 of 1 already")
    assert {row["micronorm"] == "0.0.0" for row in rows(stale).values()} == {True, False}


def test_a_pattern_that_matches_nothing_is_an_error(sweep, tmp_path):
    with pytest.raises(SystemExit, match=r"no architecture is called \['resnet19'\]"):
        sweep.main(["--out", str(tmp_path / "sweep.csv"), "--only", "resnet19"])
    assert not list(tmp_path.iterdir())


class OwnForward(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input) + 1


class Raising(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)

    def named_modules(self, *args, **kwargs):
        raise KeyError("broken")


def test_a_model_with_a_batchnorm_that_is_refused_and_one_that_raises_are_failures(sweep, monkeypatch):
    models = {"own": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), OwnForward(8)), "raising": Raising}
    monkeypatch.setattr(sweep, "build", lambda source, name: models[name]())
    refused, raised = found = [sweep.sweep_one("timm", name, "family") for name in models]
    assert (refused.outcome, raised.outcome) == ("refused", "traceback")
    assert refused.detail.startswith("nothing to convert. Looked at")
    assert raised.detail.startswith("KeyError: 'broken'")
    assert "| timm family | 0 of 2 (0%) | 0 | 0% | none 2 |" in sweep.summary(found, command="here")
