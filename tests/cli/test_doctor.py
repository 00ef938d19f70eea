"""`micronorm doctor`: what it says, and that a self-test which fails is named and ends with 1."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import micronorm
from micronorm.cli import app, doctor
from micronorm.nn import SPECS, bcn
from micronorm.ops import runtime
from tests.data.miniature import write_binary

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_device(monkeypatch, tmp_path):
    """Show the tests a CPU only and a folder without data, so that results are the same on every machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # The tests run with Triton's interpreter, which users do not have.
    monkeypatch.setattr(runtime, "_problems", {("cpu", None): "kernels need a CUDA device"})
    monkeypatch.setattr(doctor, "search_folders", lambda data: [data or tmp_path / "data"])
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def untested(monkeypatch):
    """Run no self-tests, for tests that do not depend on them."""
    monkeypatch.setattr(doctor, "self_tests", lambda devices: {})


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def findings(*arguments: str) -> dict:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_sound_machine_ends_with_0_and_every_test_says_what_it_found():
    found = findings()
    assert found["ok"] is True
    passed = {test["name"]: test["passed"] for test in found["self_tests"]}
    assert passed == {"law (cpu)": True, "BCN against its equations (cpu, auto)": True}
    assert all(test["detail"] for test in found["self_tests"])
    assert found["environment"]["micronorm"] == micronorm.__version__
    assert found["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


def break_law(monkeypatch):
    broken = replace(doctor.find("digits/bcn-ws"), norm=micronorm.BCN(statistics="batch"))
    monkeypatch.setattr(doctor, "find", lambda name: broken)


def scale_form(monkeypatch, factor: float = 1 + 1e-6):
    right = bcn.batch_channel_norm
    monkeypatch.setattr(bcn, "batch_channel_norm", lambda x, *args, **options: right(x, *args, **options) * factor)


def refuse_law(monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("no\ncheck")

    monkeypatch.setattr(doctor, "check_cuts", refuse)


@pytest.mark.parametrize(
    "damage, name, detail",
    [
        (break_law, "law (cpu)", "THE STEP DEPENDS ON THE SPLIT"),
        (scale_form, "BCN against its equations (cpu, auto)", "differ from the plain equations"),
        (refuse_law, "law (cpu)", "RuntimeError: no check"),
    ],
)
def test_what_is_broken_is_named_and_ends_with_1(monkeypatch, damage, name, detail):
    damage(monkeypatch)
    result = invoke("--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["ok"] is False
    failed = {test["name"]: test["detail"] for test in found["self_tests"] if not test["passed"]}
    assert list(failed) == [name]
    assert detail in failed[name]
    assert result.stderr == f"micronorm doctor: failed: {name}\n"


def test_nan_is_a_failure(monkeypatch):
    scale_form(monkeypatch, torch.nan)
    with pytest.raises(ArithmeticError, match="differ from the plain equations by nan"):
        doctor.check_form("auto", CPU)


def test_every_kernel_is_compared_on_a_device_that_runs_kernels(monkeypatch):
    monkeypatch.setattr(doctor, "kernel_problem", lambda kind, index: None if kind == "cuda" else "no kernels")
    names = list(doctor.self_tests([CPU, torch.device("cuda")]))
    kernels = [f"BCN against its equations (cuda, {kernel})" for kernel in doctor.KERNELS]
    assert names == [
        "law (cpu)",
        "BCN against its equations (cpu, auto)",
        "law (cuda)",
        "BCN against its equations (cuda, auto)",
        *kernels,
    ]


def test_the_self_tests_leave_torch_s_random_numbers_alone():
    before = torch.get_rng_state()
    for test in doctor.self_tests([CPU]).values():
        test()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("untested")
def test_every_layer_is_listed_with_what_computes_it():
    layers = {row["spec"]: row for row in findings()["layers"]}
    assert list(layers) == list(SPECS)
    assert (layers["GN"]["layer"], layers["GN"]["backend"]) == ("GroupNorm", "torch")
    assert layers["WS"]["backend"] == "operations"
    assert layers["BCN"]["backend"] == "one-pass"
    for name in ("BCN", "GN", "LN", "IN", "WS"):
        assert layers[name]["reason"].endswith("; kernels need a CUDA device"), name
    for name in ("BN", "SN", "WN"):  # for which there are none
        assert "kernels" not in layers[name]["reason"]


@pytest.mark.usefixtures("untested")
def test_data_are_found_in_the_folder_given_or_said_to_be_missing(tmp_path):
    place = write_binary(tmp_path / "sets", 10)
    found = findings("--data", str(tmp_path / "sets"))["data"]
    assert found == {"looked_in": [str(tmp_path / "sets")], "found": {"cifar10": str(place)}}
    output = invoke("--data", str(tmp_path / "sets")).output
    assert f"cifar10    {place}" in output
    assert "cifar100   not found" in output


@pytest.mark.usefixtures("untested")
def test_what_is_not_installed_comes_with_the_command_that_installs_it(monkeypatch):
    real = doctor.package_version
    monkeypatch.setattr(doctor, "package_version", lambda name: None if name == "onnxscript" else real(name))
    extras = {next(iter(extra["packages"])): extra for extra in findings()["extras"]}
    assert extras["onnx"]["packages"]["onnxscript"] is None
    assert extras["onnx"]["install"] == "pip install onnx onnxruntime onnxscript"
    assert extras["tensorboard"]["install"] is None
    assert "onnxscript –" in invoke().output


def test_the_extras_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [names_of(needed) for name, needed in project["optional-dependencies"].items() if name != "dev"]
    assert {name for packages, _ in doctor.EXTRAS for name in packages} == set().union(*extras)
    assert set(doctor._REQUIRED) == names_of(project["dependencies"])


def names_of(requirements: list[str]) -> set[str]:
    return {requirement.partition(">")[0] for requirement in requirements}


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("gpu", [None, {"name": "Some GPU", "count": 2, "memory": 2**33}])
def test_the_machine_is_described(monkeypatch, gpu):
    if gpu is not None:
        gpu = {**gpu, "driver": "580.1", "cuda": "13.0", "cudnn": 91900}
    real = doctor.environment
    monkeypatch.setattr(doctor, "environment", lambda: {**real(), "gpu": gpu})
    output = invoke().output
    if gpu is None:
        assert "torch can use none" in output
    else:
        assert "2 × Some GPU, 8 GiB" in output
        assert "driver 580.1, CUDA 13.0, cuDNN 91900" in output


def test_every_result_is_one_whole_line_and_a_file_gets_no_colour(monkeypatch):
    def fail() -> str:
        raise ValueError("a long story " * 20)

    monkeypatch.setattr(doctor, "self_tests", lambda devices: {"fake": fail})
    plain = invoke()
    assert plain.exit_code == 1
    (line,) = (line for line in plain.stdout.splitlines() if line.startswith("  fake"))
    assert line.count("a long story") == 20
    assert "\x1b" not in plain.stdout
    assert "\x1b[31m  fake" in CliRunner().invoke(app, ["doctor"], color=True).stdout


@pytest.mark.parametrize("arguments", [["--data", "no/such/folder"], ["--no-such-option"]])
def test_misuse_ends_with_2(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert arguments[0] in result.stderr
