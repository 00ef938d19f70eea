"""`micronorm doctor`: what is installed here, which implementation each layer takes, and whether it works."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from micronorm.cli.selftest import Result, run_tests, self_tests
from micronorm.cli.targets import MISUSE
from micronorm.data.search import find_data, search_folders
from micronorm.engine.environment import environment
from micronorm.nn import SPECS, BatchChannelNorm
from micronorm.nn.backends import explain_backend, kernel_problem
from micronorm.nn.spec import NormSpec
from micronorm.ops.weight import choose_backend

FAILED = 1

_STYLES = {"passed": "green", "failed": "bold red", "absent": "dim"}


@dataclass(frozen=True)
class Extra:
    """Packages that micronorm can do without."""

    packages: tuple[str, ...]
    purpose: str
    install: str


EXTRAS = (
    Extra(("torchvision",), "ImageNet's networks and folders, CIFAR's download", "pip install 'micronorm[models]'"),
    Extra(("timm",), "timm's models by name", "pip install 'micronorm[models]'"),
    Extra(("onnx", "onnxruntime", "onnxscript"), "export to ONNX", "pip install 'micronorm[onnx]'"),
    Extra(("matplotlib",), "plots of micronorm bench", "pip install 'micronorm[plot]'"),
    Extra(("tensorboard",), "events of a run", "pip install 'micronorm[tensorboard]'"),
    Extra(("lightning",), "Lightning's loop", "pip install 'micronorm[lightning]'"),
    Extra(("accelerate",), "Accelerate's loop", "pip install 'micronorm[accelerate]'"),
    Extra(("transformers",), "Hugging Face's Trainer", "pip install 'micronorm[transformers]'"),
)
_REQUIRED = ("numpy", "rich", "safetensors", "scikit-learn", "torch", "typer")


def doctor(
    data: Annotated[Path | None, typer.Option(help="Where data sets lie; ./data and ~/data unless given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Say what is installed, what each layer would run on and why, and which data sets are found; and test the rest.

    Exit code 0: every self-test that has something to test passed. 1: one failed, and is named. 2: an option is wrong.
    """
    if data is not None and not data.is_dir():
        typer.echo(f"micronorm doctor: --data must be a folder, there is none at {data}", err=True)
        raise typer.Exit(MISUSE)
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    found = {
        "environment": environment(),
        "packages": {name: _version(name) for name in (*_REQUIRED, "triton")},
        "extras": [_look_up(extra) for extra in EXTRAS],
        "layers": [row for device in devices for row in explain_layers(device)],
        "data": {
            "looked_in": [str(folder.absolute()) for folder in search_folders(data)],
            "found": {name: str(path) for name, path in find_data(data).items()},
        },
    }
    torch.set_num_threads(1)  # tensors this small gain nothing from a second thread, and on busy cores wait for it
    results = run_tests(self_tests(devices))
    failed = [result.name for result in results if result.status == "failed"]
    if as_json:
        tests = [asdict(result) for result in results]
        typer.echo(json.dumps({"ok": not failed, **found, "self_tests": tests}, indent=1, ensure_ascii=False))
    else:
        _print(Console(highlight=False), found, results)
    if failed:
        typer.echo(f"micronorm doctor: failed: {', '.join(failed)}", err=True)
        raise typer.Exit(FAILED)


_OPERATIONS = ("operations", "plain PyTorch operations")


def explain_layers(device: torch.device) -> list[dict[str, str]]:
    """Of every spec's layer: what computes it on a device, and why."""
    rows = []
    why_no_kernels = kernel_problem(device.type, device.index) or "the interpreter of kernels is for tests"
    for name, spec in SPECS.items():
        layer = spec()(16 if issubclass(spec, NormSpec) else nn.Conv2d(16, 16, 3))  # type: ignore[call-arg]
        if isinstance(layer, BatchChannelNorm | nn.GroupNorm):
            backend, reason = explain_backend(device)
            if isinstance(layer, nn.GroupNorm) and backend != "triton":
                backend, reason = "torch", f"torch's own group_norm; {why_no_kernels}"
        elif hasattr(layer, "backend"):  # a standardized weight
            by_kernel = choose_backend(layer.weight.to(device)) == "triton"  # type: ignore[arg-type]
            backend, reason = "triton", "a Triton kernel: a launch per layer, or one for all within SharedWeights"
            if not by_kernel:
                backend, reason = _OPERATIONS[0], f"{_OPERATIONS[1]}; {why_no_kernels}"
        elif type(layer).__module__.startswith("torch."):
            backend, reason = "torch", "torch's own layer"
        else:
            backend, reason = _OPERATIONS
        rows.append(
            {
                "spec": name,
                "layer": type(layer).__name__,
                "device": device.type,
                "backend": backend,
                "reason": reason,
            }
        )
    return rows


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _look_up(extra: Extra) -> dict[str, Any]:
    versions = {name: _version(name) for name in extra.packages}
    return {
        "packages": versions,
        "purpose": extra.purpose,
        "install": None if all(versions.values()) else extra.install,
    }


# --- what is printed --------------------------------------------------------------------------------------------------


def _print(console: Console, found: dict[str, Any], results: Sequence[Result]) -> None:
    _section(console, "Versions", _versions(found))
    _section(console, "Machine", _machine(found["environment"]))
    extras = [
        (
            ", ".join(f"{name} {version or '–'}" for name, version in extra["packages"].items()),
            extra["purpose"],
            extra["install"] or "installed",
        )
        for extra in found["extras"]
    ]
    _section(console, "Optional", extras)
    layers = [(row["spec"], row["layer"], row["device"], row["backend"], row["reason"]) for row in found["layers"]]
    _section(console, "Layers", layers)
    _section(console, "Data", _data(found["data"]))
    tests = [(result.name, result.status, f"{result.seconds:.1f} s", result.detail) for result in results]
    _section(console, "Self-tests", tests)


def _section(console: Console, title: str, rows: Sequence[tuple[str, ...]]) -> None:
    if not console.is_terminal:  # whole lines, for whoever searches in them
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        typer.echo(f"{title}")
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            typer.echo("  " + "  ".join(cells).rstrip())
        return
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE)
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(table)


def _versions(found: dict[str, Any]) -> list[tuple[str, str]]:
    own = found["environment"]
    revision = f", revision {own['revision']}" if own["revision"] else ""
    versions = [("micronorm", f"{own['micronorm']}{revision}"), ("python", own["python"]), ("torch", own["torch"])]
    others = {name: version for name, version in found["packages"].items() if name != "torch"}
    return [*versions, *((name, version or "not installed") for name, version in others.items())]


def _machine(own: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, gpu = own["cpu"], own["gpu"]
    threads = f"{cpu['threads']} threads, torch uses {cpu['torch_threads']}"
    rows = [("system", own["platform"]), ("cpu", f"{cpu['model'] or 'unknown'}: {threads}")]
    if gpu is None:
        return [*rows, ("gpu", "none that torch can use")]
    memory = f"{gpu['memory'] / 2**30:.0f} GiB"
    software = f"driver {gpu['driver'] or 'unknown'}, CUDA {gpu['cuda']}, cuDNN {gpu['cudnn']}"
    return [*rows, ("gpu", f"{gpu['count']} × {gpu['name']}, {memory}"), ("gpu software", software)]


def _data(data: dict[str, Any]) -> list[tuple[str, str]]:
    known = {"digits": "comes with scikit-learn", **data["found"]}
    missing = [name for name in ("cifar10", "cifar100", "imagenet") if name not in known]
    rows = [*known.items(), *((name, "not found") for name in missing)]
    return [*rows, ("looked in", ", ".join(data["looked_in"]))]
