"""`micronorm doctor`: show what is installed and which implementation each layer uses, and test the law and BCN."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from micronorm.bench.measure import deviations, randomize_state
from micronorm.check import check_cuts
from micronorm.cli.check import summed_cross_entropy
from micronorm.cli.printing import CommandFailed, TargetError, one_line, print_json
from micronorm.data.cifar import find_cifar
from micronorm.data.files import search_folders
from micronorm.data.folders import find_folders
from micronorm.engine.environment import environment, package_version
from micronorm.nn import SPECS, BatchChannelNorm
from micronorm.nn.backends import KERNELS, explain_backend, kernel_problem
from micronorm.nn.spec import NormSpec
from micronorm.ops.weight import choose_backend
from micronorm.recipes import find

# Optional packages, and what they are for.
EXTRAS = (
    (("torchvision",), "ImageNet's networks and folders, CIFAR's download"),
    (("timm",), "timm's models by name"),
    (("onnx", "onnxruntime", "onnxscript"), "export to ONNX"),
    (("tensorboard",), "TensorBoard events of a run"),
    (("lightning",), "Lightning's training loop"),
    (("accelerate",), "Accelerate's training loop"),
    (("transformers",), "Hugging Face's Trainer"),
    (("faster-coco-eval",), "COCO's masks and scores: detection"),
    (("av",), "video files"),
    (("nibabel",), "volumes in NIfTI files"),
    (("monai",), "BCN in MONAI's networks"),
    (("nnunetv2",), "BCN in nnU-Net"),
)
TOLERANCE = 1e-10  # of BCN's outputs and gradients against the plain equations, in float64, relative to the maximum
_REQUIRED = ("matplotlib", "numpy", "rich", "safetensors", "scikit-learn", "torch", "typer")


def doctor(
    data: Annotated[Path | None, typer.Option(help="The folder of data sets. Default: ./data and ~/data.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Show installed packages, the implementation of each layer, and data sets found; then run the self-tests.

    The self-tests check that a step of a small network does not depend on how its images are split, and that every
    implementation of BCN that this machine can run computes the equations.

    Exit code 0: no self-test failed. 1: one failed, and is named. 2: an option is wrong.
    """
    if data is not None and not data.is_dir():
        raise TargetError(f"--data must be a folder, got {data}")
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    found = {
        "environment": environment(),
        "packages": {name: package_version(name) for name in (*_REQUIRED, "triton")},
        "extras": [_describe_extra(*extra) for extra in EXTRAS],
        "layers": [row for device in devices for row in explain_layers(device)],
        "data": {
            "looked_in": [str(folder.absolute()) for folder in search_folders(data)],
            "found": {name: str(path) for name, path in find_data(data).items()},
        },
    }
    torch.set_num_threads(1)  # tensors this small gain nothing from a second thread
    found["self_tests"] = [_run(name, test) for name, test in self_tests(devices).items()]
    failed = [test["name"] for test in found["self_tests"] if not test["passed"]]
    if as_json:
        print_json({"ok": not failed, **found})
    else:
        _print(found)
    if failed:
        raise CommandFailed(f"failed: {', '.join(failed)}")


def explain_layers(device: torch.device) -> list[dict[str, str]]:
    """Return which implementation the layer of every spec uses on a device, and why."""
    rows = []
    for name, spec in SPECS.items():
        layer = spec()(16 if issubclass(spec, NormSpec) else nn.Conv2d(16, 16, 3))  # type: ignore[call-arg]
        backend, reason = _explain_layer(layer, device)
        row = {"spec": name, "layer": type(layer).__name__, "device": device.type}
        rows.append(row | {"backend": backend, "reason": reason})
    return rows


def _explain_layer(layer: nn.Module, device: torch.device) -> tuple[str, str]:
    why_no_kernels = kernel_problem(device.type, device.index) or "Triton's interpreter is for tests only"
    if isinstance(layer, BatchChannelNorm | nn.GroupNorm):
        backend, reason = explain_backend(device)
        if isinstance(layer, nn.GroupNorm) and backend != "triton":
            return "torch", f"torch's own group_norm; {why_no_kernels}"
        return backend, reason
    if hasattr(layer, "backend"):  # a standardized weight
        if choose_backend(layer.weight.to(device)) == "triton":  # type: ignore[arg-type]
            return "triton", "a Triton kernel: a launch per layer, or one for all within SharedWeights"
        return "operations", f"plain PyTorch operations; {why_no_kernels}"
    if type(layer).__module__.startswith("torch."):
        return "torch", "torch's own layer"
    return "operations", "plain PyTorch operations"


def _describe_extra(packages: Sequence[str], purpose: str) -> dict[str, Any]:
    versions = {name: package_version(name) for name in packages}
    install = None if all(versions.values()) else f"pip install {' '.join(packages)}"
    return {"packages": versions, "purpose": purpose, "install": install}


def find_data(folder: Path | str | None = None) -> dict[str, Path]:
    """Return the paths of "cifar10", "cifar100" and "imagenet" below `folder`, or below ./data and ~/data.

    Files are not read.

    Example:
        >>> find_data("no/such/folder")
        {}
    """
    finders = {
        "cifar10": partial(find_cifar, classes=10),
        "cifar100": partial(find_cifar, classes=100),
        "imagenet": find_folders,
    }
    found = {}
    for name, finder in finders.items():
        with contextlib.suppress(FileNotFoundError):
            found[name] = finder(folder)
    return found


# --- self-tests -------------------------------------------------------------------------------------------------------


def self_tests(devices: Sequence[torch.device]) -> dict[str, Callable[[], str]]:
    """Return the tests by name: functions that return what they found, or raise if it is wrong."""
    tests: dict[str, Callable[[], str]] = {}
    for device in devices:
        tests[f"law ({device.type})"] = lambda device=device: check_law(device)
        kernels = KERNELS if kernel_problem(device.type, device.index) is None else ()
        for backend in ("auto", *kernels):
            name = f"BCN against its equations ({device.type}, {backend})"
            tests[name] = lambda device=device, backend=backend: check_form(backend, device)
    return tests


def _run(name: str, test: Callable[[], str]) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        passed, detail = True, test()
    except Exception as error:  # a broken installation may raise anything
        passed, detail = False, f"{type(error).__name__}: {one_line(error)}"
    return {"name": name, "passed": passed, "detail": detail, "seconds": time.perf_counter() - started}


def check_law(device: torch.device) -> str:
    """Run `mn.check_cuts` on the digits' network with BCN and WS, in float64."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 1, 8, 8, generator=generator).to(device)
    model = find("digits/bcn-ws").build(seed=0).to(device).train()
    report = check_cuts(model, (images, torch.arange(6, device=device)), summed_cross_entropy)
    if not report.ok:
        raise ArithmeticError(str(report))
    return f"{report.compared} tensors agree within {report.worst:.1e}, whole, halved and one by one"


def check_form(backend: str, device: torch.device) -> str:
    """Compare BCN's outputs and gradients by `backend` with the plain equations, in float64, in every mode."""
    x = torch.randn(4, 8, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    errors: list[float] = []
    for statistics in ("step", "sequential", "batch"):
        options: dict[str, Any] = {"statistics": statistics, "rate": 0.1, "activation": "relu", "backend": backend}
        layer = BatchChannelNorm(8, 4, **options, device=device, dtype=torch.float64)
        randomize_state(layer)
        errors += [deviation.error for deviation in deviations(layer, x)]
    worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
    if not worst <= TOLERANCE:  # also if it is NaN
        raise ArithmeticError(f"outputs or gradients differ from the plain equations by {worst:.1e}")
    return f"outputs and gradients agree within {worst:.1e}"


# --- output -----------------------------------------------------------------------------------------------------------


def _print(found: dict[str, Any]) -> None:
    own, data = found["environment"], found["data"]
    revision = f", revision {own['revision']}" if own["revision"] else ""
    versions = {"micronorm": f"{own['micronorm']}{revision}", "python": own["python"], "torch": own["torch"]}
    versions |= {name: version or "not installed" for name, version in found["packages"].items() if name != "torch"}
    extras = [
        (
            ", ".join(f"{name} {version or '–'}" for name, version in extra["packages"].items()),
            extra["purpose"],
            extra["install"] or "installed",
        )
        for extra in found["extras"]
    ]
    known = {**dict.fromkeys(("cifar10", "cifar100", "imagenet"), "not found"), **data["found"]}
    places = {"digits": "comes with scikit-learn", **known, "looked in": ", ".join(data["looked_in"])}
    tests = [
        (test["name"], "passed" if test["passed"] else "failed", f"{test['seconds']:.1f} s", test["detail"])
        for test in found["self_tests"]
    ]
    _print_section("Versions", list(versions.items()))
    _print_section("Machine", _machine(own))
    _print_section("Optional", extras)
    _print_section("Layers", [tuple(row.values()) for row in found["layers"]])
    _print_section("Data", list(places.items()))
    _print_section("Self-tests", tests)


def _print_section(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    typer.secho(title, bold=True)
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.secho(f"  {line.rstrip()}", fg="red" if "failed" in row else None)


def _machine(own: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, gpu = own["cpu"], own["gpu"]
    threads = f"{cpu['threads']} threads, torch uses {cpu['torch_threads']}"
    rows = [("system", own["platform"]), ("cpu", f"{cpu['model'] or 'unknown'}: {threads}")]
    if gpu is None:
        return [*rows, ("gpu", "torch can use none")]
    memory = f"{gpu['memory'] / 2**30:.0f} GiB"
    software = f"driver {gpu['driver'] or 'unknown'}, CUDA {gpu['cuda']}, cuDNN {gpu['cudnn']}"
    return [*rows, ("gpu", f"{gpu['count']} × {gpu['name']}, {memory}"), ("gpu software", software)]
