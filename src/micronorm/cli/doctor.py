"""`micronorm doctor`: show what is installed and where kernels run, and test one training step on each device."""

import re
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import torch
import typer

from micronorm.check import check_cuts
from micronorm.cli.check import summed_cross_entropy
from micronorm.cli.printing import CommandFailed, one_line, print_json
from micronorm.engine.environment import environment, package_version
from micronorm.nn import BatchChannelNorm
from micronorm.nn.backends import explain_backend
from micronorm.recipes import find

TOLERANCE = 1e-10  # of gradients against those of the plain equations, in float64, relative to the maximum


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Show versions, the machine and where kernels run; then test a step on each device.

    The test checks that a step of a small network does not depend on how its images are split, and that its gradients
    are those of the plain equations.

    Exit code 0: no test failed. 1: one failed, and is named. 2: an option is wrong.
    """
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    found: dict[str, Any] = {
        "environment": environment(),
        "packages": {extra: {name: package_version(name) for name in names} for extra, names in packages().items()},
    }
    torch.set_num_threads(1)  # tensors this small gain nothing from a second thread
    found["devices"] = [_examine(device) for device in devices]
    failed = [row["device"] for row in found["devices"] if not row["passed"]]
    if as_json:
        print_json({"ok": not failed, **found})
    else:
        _print(found)
    if failed:
        raise CommandFailed(f"the test of a step failed on {', '.join(failed)}")


def packages() -> dict[str, list[str]]:
    """Return the packages that micronorm needs, under "", and those of each of its extras. Triton comes with torch."""
    found: dict[str, list[str]] = {"": ["triton"]}
    try:
        requirements = metadata.requires("micronorm") or []
    except metadata.PackageNotFoundError:  # it runs from its source without being installed
        requirements = ["torch"]
    for requirement in requirements:
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == .(\w+)", requirement)
        if name is not None:
            found.setdefault(extra[1] if extra else "", []).append(name[0])
    found.pop("dev", None)
    return found


def _examine(device: torch.device) -> dict[str, Any]:
    """Return what computes BCN on a device and why, whether the test passed, and what it found."""
    backend, reason = explain_backend(device)
    try:
        passed, detail = True, check_step(device)
    except Exception as error:  # a broken installation may raise anything
        passed, detail = False, f"{type(error).__name__}: {one_line(error)}"
    return {"device": device.type, "backend": backend, "reason": reason, "passed": passed, "detail": detail}


def check_step(device: torch.device) -> str:
    """Check a step of the digits' network with BCN and WS in float64; raise ArithmeticError if it is wrong.

    Its result must not depend on the split of its images, and its gradients must be those of the plain equations.
    """
    images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)).to(device)
    batch = images.double(), torch.arange(6, device=device)
    model = find("digits/bcn-ws").build(seed=0).to(device).double().train()
    report = check_cuts(model, batch, summed_cross_entropy)
    if not report.ok:
        raise ArithmeticError(str(report))
    gradients = []
    for backend in ("reference", "auto"):
        for layer in model.modules():
            if isinstance(layer, BatchChannelNorm):
                layer.backend = backend
        gradients.append(torch.autograd.grad(summed_cross_entropy(model, batch)[0], list(model.parameters())))
    pairs = zip(*gradients, strict=True)
    worst = torch.stack([(actual - right).abs().max() / right.abs().max() for right, actual in pairs]).max().item()
    if not worst <= TOLERANCE:  # also if it is NaN
        raise ArithmeticError(f"gradients differ from those of the plain equations by {worst:.1e}")
    return f"steps agree within {report.worst:.1e} in any split, gradients with the plain equations within {worst:.1e}"


# --- output -----------------------------------------------------------------------------------------------------------


def _print(found: dict[str, Any]) -> None:
    own = found["environment"]
    revision = f", revision {own['revision']}" if own["revision"] else ""
    required, *extras = found["packages"].items()
    versions = {"micronorm": f"{own['micronorm']}{revision}", "python": own["python"], **required[1]}
    optional = []
    for extra, names in extras:
        missing = [name for name, version in names.items() if version is None]
        state = f"pip install {' '.join(missing)}" if missing else "installed"
        optional.append((extra, ", ".join(f"{name} {version or '–'}" for name, version in names.items()), state))
    backends = [(row["device"], row["backend"], row["reason"]) for row in found["devices"]]
    tests = [(row["device"], "passed" if row["passed"] else "failed", row["detail"]) for row in found["devices"]]
    _print_section("Versions", [(name, version or "not installed") for name, version in versions.items()])
    _print_section("Machine", _machine(own))
    _print_section("Optional", optional)
    _print_section("BCN is computed by", backends)
    _print_section("Test of a step", tests)


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
