"""`micronorm doctor`: show what is installed and which implementation each layer uses, and run the self-tests."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from micronorm.cli.faults import FAILED
from micronorm.cli.selftest import SelfTestResult, run_tests, self_tests
from micronorm.cli.targets import TargetError
from micronorm.data.search import find_data, search_folders
from micronorm.engine.environment import environment
from micronorm.nn import SPECS, BatchChannelNorm
from micronorm.nn.backends import explain_backend, kernel_problem
from micronorm.nn.spec import NormSpec
from micronorm.ops.weight import choose_backend

# Optional packages, and what they are for.
EXTRAS = (
    (("torchvision",), "ImageNet's networks and folders, CIFAR's download"),
    (("timm",), "timm's models by name"),
    (("onnx", "onnxruntime", "onnxscript"), "export to ONNX"),
    (("tensorboard",), "TensorBoard events of a run"),
    (("lightning",), "Lightning's training loop"),
    (("accelerate",), "Accelerate's training loop"),
    (("transformers",), "Hugging Face's Trainer"),
)
_REQUIRED = ("matplotlib", "numpy", "rich", "safetensors", "scikit-learn", "torch", "typer")


def doctor(
    data: Annotated[Path | None, typer.Option(help="The folder of data sets; default ./data and ~/data.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Show installed packages, the implementation of each layer, and data sets found; then run the self-tests.

    Exit code 0: no self-test failed. 1: one failed, and is named. 2: an option is wrong.
    """
    if data is not None and not data.is_dir():
        raise TargetError(f"--data must be a folder, got {data}")
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    found = {
        "environment": environment(),
        "packages": {name: _version(name) for name in (*_REQUIRED, "triton")},
        "extras": [_describe_extra(*extra) for extra in EXTRAS],
        "layers": [row for device in devices for row in explain_layers(device)],
        "data": {
            "looked_in": [str(folder.absolute()) for folder in search_folders(data)],
            "found": {name: str(path) for name, path in find_data(data).items()},
        },
    }
    torch.set_num_threads(1)  # tensors this small gain nothing from a second thread
    results = run_tests(self_tests(devices))
    failed = [result.name for result in results if result.status == "failed"]
    if as_json:
        tests = [asdict(result) for result in results]
        typer.echo(json.dumps({"ok": not failed, **found, "self_tests": tests}, indent=1, ensure_ascii=False))
    else:
        _print(found, results)
    if failed:
        typer.echo(f"micronorm doctor: failed: {', '.join(failed)}", err=True)
        raise typer.Exit(FAILED)


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


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _describe_extra(packages: Sequence[str], purpose: str) -> dict[str, Any]:
    versions = {name: _version(name) for name in packages}
    install = None if all(versions.values()) else f"pip install {' '.join(packages)}"
    return {"packages": versions, "purpose": purpose, "install": install}


def _print(found: dict[str, Any], results: Sequence[SelfTestResult]) -> None:
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
    tests = [(result.name, result.status, f"{result.seconds:.1f} s", result.detail) for result in results]
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
