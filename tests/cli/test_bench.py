"""`micronorm bench`: what it prints and writes, what it leaves out, and what exit code says what."""

import csv
from functools import partial

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from micronorm.bench.cases import CASES, METHODS, ON_CPU, Case
from micronorm.cli import app, bench
from micronorm.nn import SPECS, bcn

TINY = ["--case", "2x8x6x6", "--rounds", "2"]
FEW = ["--method", "bcn-step", "--method", "bn"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """The CPU alone, so that the tests see the same everywhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments])


def read(path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_method_is_measured_in_both_layouts_and_written(tmp_path):
    out = tmp_path / "new" / "tiny.csv"
    result = run(*TINY, "--case", "16x1024", "--out", str(out))
    assert result.exit_code == 0, result.output
    rows = read(out)
    got = {(r["shape"], r["layout"], r["method"], r["mode"]) for r in rows}
    assert got == {(s, lay, m.name, m.mode) for s in ("2x8x6x6", "16x1024") for lay in ("nhwc", "nchw") for m in ON_CPU}
    assert len(rows) == len(got)
    printed = [line for line in result.stdout.splitlines() if line.lstrip().startswith(("BCN", "BN", "GN"))]
    assert len(printed) == len(rows)


def test_a_row_tells_how_to_repeat_it_and_not_whose_machine_it_was(tmp_path):
    out = tmp_path / "tiny.csv"
    options = ("--layout", "nhwc", "--dtype", "bfloat16", "--device", "cpu")
    assert run(*TINY, *FEW, *options, "--out", str(out)).exit_code == 0
    for row in read(out):
        assert row["command"] == (
            "micronorm bench --case 2x8x6x6 --layout nhwc --method bcn-step --method bn --dtype bfloat16 --rounds 2 "
            "--device cpu"
        )
        assert all(row[name] for name in ("cpu", "threads", "torch", "micronorm", "python", "date", "groups"))
        assert (row["gpu"], row["dtype"]) == ("", "bfloat16")
        assert row["date"].endswith("+00:00")
        assert str(tmp_path) not in "".join(row.values())


def test_without_a_gpu_it_says_so_and_measures_the_cpu_s_shapes(monkeypatch):
    monkeypatch.setitem(CASES, "cpu", (Case((2, 4, 5, 5), "tiny", "cpu"),))
    result = run(*FEW, "--rounds", "2")
    assert result.exit_code == 0
    assert "No CUDA device: measuring the shapes for a CPU." in result.stdout
    assert "2x4x5x5, 1 groups: tiny" in result.stdout


def test_where_a_shape_was_asked_for_no_gpu_is_missed():
    assert "No CUDA device" not in run(*TINY, *FEW).stdout


def test_a_norm_of_the_users_own_is_timed_by_module_and_spec(monkeypatch, tmp_path, request):
    (tmp_path / "own_norms.py").write_text(
        "import dataclasses, torch, micronorm as mn\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Plain(mn.NormSpec):\n"
        "    def __call__(self, num_channels, *, dims=2): return torch.nn.GroupNorm(1, num_channels)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    request.addfinalizer(lambda: SPECS.pop("Plain", None))
    result = run(*TINY, "--method", "own_norms:Plain", "--layout", "nchw")
    assert result.exit_code == 0, result.output
    assert "Plain>ReLU" in result.output
    wrong = run(*TINY, "--method", "own_norms:Missing")
    assert wrong.exit_code == 2
    assert wrong.output.startswith("micronorm bench: own_norms has no 'Missing'")


def test_a_wrong_contestant_prints_its_error_gets_no_figure_and_ends_with_1(monkeypatch, tmp_path):
    right = bcn.batch_channel_norm
    monkeypatch.setattr(bcn, "batch_channel_norm", lambda *args, **options: right(*args, **options) * 1.001)
    out = tmp_path / "tiny.csv"
    result = run(*TINY, *FEW, "--layout", "nchw", "--out", str(out))
    assert result.exit_code == 1
    assert result.stderr == "micronorm bench: no time for bcn-step at 2x8x6x6; see the lines below its table\n"
    ours, bn = read(out)
    assert ours["median_ms"] == ""
    assert ours["fault"].startswith("wrong: output is 1.0")
    assert ours["fault"] in result.stdout
    assert float(bn["median_ms"]) > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--case", "large"], "the cases 'large' are for a GPU"),
        (["--case", "2x8x0"], "two to five positive sizes as in 16x64x56x56"),
        (["--method", "bn2"], "no method 'bn2'; there are bcn-step"),
        (["--route", "graph"], "--route graph: CUDA graphs need a GPU"),
        (["--device", "cuda"], "finds no CUDA device here"),
        (["--method", "bn-compiled", "--no-compile"], "--no-compile leaves none of the methods"),
    ],
)
def test_one_line_says_what_is_wrong_with_the_options(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [("--layout", "nwhc"), ("--dtype", "float8"), ("--rounds", "1"), ("--device", "tpu"), ("--route", "slow")],
)
def test_a_value_that_an_option_does_not_have_is_refused(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"Invalid value for '{arguments[0]}'" in result.stderr


def test_what_cannot_be_written_is_said_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "measure", lambda *args: pytest.fail("measured"))
    file, folder = tmp_path / "file", tmp_path / "folder.csv"
    file.touch()
    folder.mkdir()
    for arguments, message in (
        (["--out", str(file / "rows.csv")], f"{file}: File exists"),
        (["--out", str(file / "deeper" / "rows.csv")], f"{file / 'deeper'}: Not a directory"),
        (["--out", str(folder)], f"{folder}: Is a directory"),
    ):
        result = run(*TINY, *FEW, *arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith(f"micronorm bench: {message}")
        assert len(result.stderr.strip().splitlines()) == 1


def test_a_terminal_gets_a_table(monkeypatch):
    monkeypatch.setattr(bench, "Console", partial(Console, force_terminal=True, width=160))
    output = run(*TINY, *FEW).stdout
    assert "─" in output
    assert "\x1b[1m" in output


def test_the_list_names_every_case_and_method():
    output = run("--list").stdout
    for case in (case for cases in CASES.values() for case in cases):
        assert f"  {case.name} " in output
    listed = {line.split()[0] for line in output.splitlines() if line.startswith("  ")}
    assert {method.key for method in METHODS} <= listed
