"""`micronorm bench`: norm + ReLU on this machine, our layer beside PyTorch's own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console

from micronorm.bench import cases, results
from micronorm.bench.cases import CASES, GPU_GROUPS, LAYOUTS, Case
from micronorm.bench.measure import measure
from micronorm.bench.results import ROUTES, BenchResult, BenchSettings
from micronorm.bench.timing import FOOTPRINT, LARGE, PASSES_AT_LEAST, copy_bandwidth
from micronorm.cli.printing import CommandFailed, TargetError, as_options, print_table, say
from micronorm.cli.targets import norm_spec
from micronorm.nn import register

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WIDTH = 240  # of a table that is not printed on a terminal: no line is folded

_Several = list[str] | None


def bench(
    case: Annotated[
        _Several, typer.Option(help="A group of cases (large, small, cpu) or a shape such as 16x64x56x56. Repeatable.")
    ] = None,
    layout: Annotated[
        Literal["nhwc", "nchw"] | None, typer.Option(help="Memory layout: nhwc is channels last. Default: both.")
    ] = None,
    method: Annotated[
        _Several, typer.Option(help="A key of --list, or module:Spec for your own norm. Repeatable.")
    ] = None,
    route: Annotated[
        Literal["eager", "graph"] | None, typer.Option(help="Call by call, or as a CUDA graph. Default: both on a GPU.")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Default: bfloat16 on a GPU, float32 on a CPU."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Timed rounds; use 15 or more for figures to keep.")] = 15,
    device: Annotated[Literal["cuda", "cpu"] | None, typer.Option(help="Default: the GPU if there is one.")] = None,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Leave out the torch.compile cases.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the results to this CSV file.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List cases and methods, and measure nothing.")] = False,
) -> None:
    """Time norm + ReLU, forward and backward: our layer beside BatchNorm, GroupNorm and their compositions.

    At each shape, our layer is first compared with the plain equations in float64. Without a GPU the command measures
    the shapes for the CPU, and says what it skipped.

    Exit code 0: our layer was timed in every mode. 1: it is wrong or failed in one. 2: an option is wrong.
    """
    if listed:
        _list()
        return
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = where.type == "cuda"
    chosen_cases = cases.choose_cases(case or (), on_gpu=on_gpu)
    keys = [_register(word) if ":" in word else word for word in method or ()]
    chosen_methods = cases.choose_methods(keys, on_gpu=on_gpu, compiled=not no_compile)
    layouts = (layout,) if layout else LAYOUTS
    routes = (route,) if route else ROUTES if on_gpu else ("eager",)
    settings = _settings(where, routes, dtype=dtype, rounds=rounds)
    if out is not None:  # raise before the measurement, which may take an hour
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_fifo():  # opening it would wait for its reader
            raise ValueError(f"--out must be a file, {out} is a pipe")
        out.open("a").close()
    options = {"case": case, "layout": layout, "method": method, "route": route, "dtype": dtype, "rounds": rounds}
    options |= {"device": device, "no_compile": no_compile}  # without --out, which names a path
    bandwidth = "" if settings.bandwidth is None else f"{settings.bandwidth / 1e12:.3f}"
    facts = {
        "copy_tb_per_s": bandwidth,
        **results.provenance(where, " ".join(["micronorm", "bench", *as_options(options)])),
    }
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    _print_heading(console, settings, facts, skipped=case is None and device is None and not on_gpu)
    found: list[BenchResult] = []
    for one in chosen_cases:
        new = [result for name in layouts for result in measure(one, name, chosen_methods, settings)]
        results.compare(new)
        _print_table(console, one, new)
        found += new
    if out is not None:
        results.write_csv(out, [results.as_record(result, facts) for result in found])
    faults = [result for result in found if result.method.is_ours and result.fault]
    if faults:
        names = dict.fromkeys(f"{result.method.key} at {result.case.name}" for result in faults)
        raise CommandFailed(f"no time for {', '.join(names)}; see the lines below its table")


# --- options ----------------------------------------------------------------------------------------------------------


def _settings(device: torch.device, routes: Sequence[str], *, dtype: str | None, rounds: int) -> BenchSettings:
    on_gpu = device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; leave it out to measure on the CPU")
    if "graph" in routes and not on_gpu:
        raise ValueError("--route graph: CUDA graphs need a GPU; leave it out to measure on the CPU")
    name = dtype or ("bfloat16" if on_gpu else "float32")
    return BenchSettings(device, DTYPES[name], routes, rounds, copy_bandwidth(device) if on_gpu else None)


# --- output -----------------------------------------------------------------------------------------------------------


def _print_heading(console: Console, settings: BenchSettings, facts: Mapping[str, object], *, skipped: bool) -> None:
    say(console, f"{facts['gpu'] or facts['cpu']}, {facts['threads']} CPU threads, torch {facts['torch']}")
    say(
        console,
        f"norm + ReLU, forward + backward, {settings.dtype_name}; median and quartiles of {settings.rounds} rounds. "
        "Every method takes part once in each round.",
    )
    if settings.bandwidth is not None:
        say(
            console,
            f"Floor: {PASSES_AT_LEAST} passes over memory at {settings.bandwidth / 1e12:.2f} TB/s, the bandwidth of a "
            f"copy in this run. Inputs of {LARGE / 1e6:.0f} MB or more rotate over {FOOTPRINT / 1e6:.0f} MB, beyond "
            "the cache; smaller ones stay in the cache, as in training.",
        )
    say(
        console,
        "÷ BN best: divided by the fastest BN>ReLU, eager, compiled or graph, in either layout. ÷ BN: in that layout "
        "and by that route. saved: activations stored for the backward.",
    )
    if skipped:
        say(console, "No CUDA device: measuring the shapes for a CPU. micronorm bench --list shows those for a GPU.")


def _print_table(console: Console, case: Case, found: Sequence[BenchResult]) -> None:
    columns, lines = results.grid(found)
    right = [column for column in columns if column not in results.LEFT]
    styles = ["red" if result.fault else "bold" if result.method.is_ours else None for result in found]
    print_table(console, columns, lines, right=right, styles=styles, title=results.title(case, found))
    for remark in results.remarks(found):
        say(console, remark)


def _register(target: str) -> str:
    """Register the user's norm spec `module:Spec`, and return the key of its method."""
    spec = norm_spec(target)
    if spec is None:
        raise TargetError(f"{target} names no norm; write module:Spec")
    return register(type(spec)).__name__.lower()


def _list() -> None:
    for group, members in CASES.items():
        typer.echo(f"{group} ({'GPU' if group in GPU_GROUPS else 'CPU'})")
        for case in members:
            typer.echo(f"  {case.name:<18}{case.reason}")
    typer.echo("methods (* measured by default on a GPU, + on a CPU)")
    for method in cases.METHODS:
        marks = ("*" if method in cases.ON_GPU else " ") + ("+" if method in cases.ON_CPU else " ")
        typer.echo(f"  {method.key:<28}{marks}  {method.label}")
