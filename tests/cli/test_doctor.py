"""`micronorm doctor`: what it says, and that a test of a step which fails is named and ends with 1."""

import json
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import micronorm
from micronorm.cli import app, doctor
from micronorm.ops import runtime

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Show the tests a CPU only, so that results are the same on every machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # The tests run with Triton's interpreter, which users do not have.
    monkeypatch.setattr(runtime, "_problems", {("cpu", None): "kernels need a CUDA device"})


@pytest.fixture
def untested(monkeypatch):
    """Test no step, for tests that do not depend on it."""
    monkeypatch.setattr(doctor, "check_step", lambda device: "not tested")


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def findings(*arguments: str) -> dict:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_sound_machine_ends_with_0_and_says_what_the_test_found():
    found = findings()
    assert found["ok"] is True
    (cpu,) = found["devices"]
    assert (cpu["device"], cpu["backend"], cpu["passed"]) == ("cpu", "one-pass", True)
    assert cpu["reason"].endswith("; kernels need a CUDA device")
    assert cpu["detail"].startswith("steps agree within")
    assert found["environment"]["micronorm"] == micronorm.__version__
    assert found["packages"][""]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


def break_law(monkeypatch):
    broken = replace(doctor.find("digits/bcn-ws"), norm=micronorm.BCN(statistics="batch"))
    monkeypatch.setattr(doctor, "find", lambda name: broken)


def scale_gradients(monkeypatch, factor: float = 1 + 1e-6):
    right = torch.autograd.grad
    calls = iter((1.0, factor))
    monkeypatch.setattr(doctor, "check_cuts", lambda *_: SimpleNamespace(ok=True, worst=0.0))
    scaled = lambda *args: [gradient * scale for scale in [next(calls)] for gradient in right(*args)]  # noqa: E731
    monkeypatch.setattr(torch.autograd, "grad", scaled)


def refuse_law(monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("no\ncheck")

    monkeypatch.setattr(doctor, "check_cuts", refuse)


@pytest.mark.parametrize(
    "damage, detail",
    [
        (break_law, "THE STEP DEPENDS ON THE SPLIT"),
        (scale_gradients, "gradients differ from those of the plain equations by 1.0e-06"),
        (partial(scale_gradients, factor=torch.nan), "gradients differ from those of the plain equations by nan"),
        (refuse_law, "RuntimeError: no check"),
    ],
)
def test_what_is_broken_is_named_and_ends_with_1(monkeypatch, damage, detail):
    damage(monkeypatch)
    result = invoke("--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["ok"] is False
    (cpu,) = found["devices"]
    assert not cpu["passed"]
    assert detail in cpu["detail"]
    assert result.stderr == "micronorm doctor: the test of a step failed on cpu\n"


def test_the_test_leaves_torch_s_random_numbers_alone():
    before = torch.get_rng_state()
    doctor.check_step(CPU)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("untested")
def test_what_is_not_installed_comes_with_the_command_that_installs_it(monkeypatch):
    real = doctor.package_version
    monkeypatch.setattr(doctor, "package_version", lambda name: None if name == "onnxscript" else real(name))
    assert findings()["packages"]["onnx"]["onnxscript"] is None
    output = invoke().output
    assert "onnxscript –" in output
    assert "pip install onnxscript\n" in output


def test_the_packages_are_those_that_the_project_names():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {name: names_of(needed) for name, needed in project["optional-dependencies"].items() if name != "dev"}
    expected = {"": {*names_of(project["dependencies"]), "triton"}, **extras}
    assert {extra: set(names) for extra, names in doctor.packages().items()} == expected


def test_a_package_that_is_not_installed_names_torch_alone(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: doctor.metadata.distribution("no-such-package"))
    assert doctor.packages() == {"": ["triton", "torch"]}


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
    def fail(device: torch.device) -> str:
        raise ValueError("a long story " * 20)

    monkeypatch.setattr(doctor, "check_step", fail)
    plain = invoke()
    assert plain.exit_code == 1
    (line,) = (line for line in plain.stdout.splitlines() if line.startswith("  cpu  failed"))
    assert line.count("a long story") == 20
    assert "\x1b" not in plain.stdout
    assert "\x1b[31m  cpu  failed" in CliRunner().invoke(app, ["doctor"], color=True).stdout


@pytest.mark.parametrize("arguments", [["--no-such-option"], ["--data"]])
def test_misuse_ends_with_2(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert arguments[0] in result.stderr
