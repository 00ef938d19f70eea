"""The sweep, run as a user runs it, over two architectures; and how it judges what goes wrong."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "benchmarks" / "sweep.py")
    command = [sys.executable, script, "--out", str(out), "--workers", "1", *arguments]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def rows(out: Path) -> dict[str, dict[str, str]]:
    with out.open(newline="", encoding="utf-8") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """The CSV of one run, and what it printed."""
    out = tmp_path_factory.mktemp("results") / "sweep.csv"
    done = run(out, "--only", "mobilevit_xxs", "--only", "mixer_s32_224")
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
def test_rows_of_the_same_versions_are_kept_unless_asked_for_again(finished):
    out, _ = finished
    before = out.read_text(encoding="utf-8")
    kept = run(out, "--only", "mobilevit_xxs", "--only", "mixer_s32_224")
    assert kept.stdout.startswith("0 architectures to do, 2 of 2 already")
    assert out.read_text(encoding="utf-8") == before
    stale = out.with_name("stale.csv")
    stale.write_text(before.replace(rows(out)["mixer_s32_224"]["micronorm"], "0.0.0"), encoding="utf-8")
    assert run(stale, "--only", "mixer_s32_224").stdout.startswith("1 architectures to do, 0 of 1 already")
    assert {row["micronorm"] == "0.0.0" for row in rows(stale).values()} == {True, False}


@pytest.mark.slow
def test_a_pattern_that_matches_nothing_is_an_error(tmp_path):
    done = run(tmp_path / "sweep.csv", "--only", "resnet19")
    assert done.returncode == 1
    assert "no architecture is called ['resnet19']" in done.stderr


FAULTS = """
import sweep, timm
from torch import nn

class Own(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1

class Raising(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
    def named_modules(self, *args, **kwargs):
        raise KeyError("broken")

models = {"own": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Own(8)), "raising": Raising}
sweep.build = lambda source, name: models[name]()
for name in models:
    row = sweep.sweep_one("timm", name, "family")
    print(row.outcome, "|", row.detail)
print(sweep.summary([sweep.sweep_one("timm", name, "family") for name in models], command="here"))
"""


@pytest.mark.slow
def test_a_model_with_a_batchnorm_that_is_refused_and_one_that_raises_are_failures():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    refused, raised, *summary = done.stdout.splitlines()
    assert refused.startswith("refused | nothing to convert. Looked at")
    assert raised.startswith("traceback | KeyError: 'broken'")
    assert "| timm family | 0 of 2 (0%) | 0 | 0% | none 2 |" in summary
