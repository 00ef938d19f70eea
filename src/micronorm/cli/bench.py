"""`micronorm bench`: norm + ReLU, ours beside its peers, on this machine."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from micronorm.bench import cases, peers, plot, table
from micronorm.bench.cases import CASES, GPU_GROUPS, LAYOUTS, Case
from micronorm.bench.measure import Settings, measure
from micronorm.bench.rows import ROUTES, Row, compare, to_csv
from micronorm.bench.timing import copy_bandwidth
from micronorm.cli.targets import MISUSE
from micronorm.engine.environment import environment
from micronorm.records import write_atomically

FAULTY = 1
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_Several = list[str] | None


def bench(
    case: Annotated[
        _Several, typer.Option(help="A group of cases (large, small, cpu) or a shape such as 16x64x56x56. Repeatable.")
    ] = None,
    layout: Annotated[_Several, typer.Option(help="nhwc or nchw. Repeatable; both unless given.")] = None,
    method: Annotated[_Several, typer.Option(help="A contestant by its key, see --list. Repeatable.")] = None,
    route: Annotated[_Several, typer.Option(help="graph (CUDA) or eager. Repeatable.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 on a GPU and float32 on a CPU unless given.")] = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds; 15 or more for figures to keep.")] = 15,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; the GPU where there is one.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of torch; its own choice unless given.")] = None,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Leave out what torch.compile makes.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this CSV file.")] = None,
    plots: Annotated[Path | None, typer.Option("--plot", help="Write plots into this folder (matplotlib).")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List cases and contestants, and measure nothing.")] = False,
) -> None:
    """Time norm + ReLU, forward and backward: ours beside BatchNorm, GroupNorm and what they compose to.

    Every form of ours is first compared with the plain equations in float64 at that shape and dtype. Without a GPU the
    CPU's shapes are measured, and what was left out is said.

    Exit code 0: every row of ours has its figure. 1: one is wrong or failed. 2: an option is wrong.
    """
    if listed:
        _list()
        return
    try:
        chosen = _choose(case, layout, method, route, device, no_compile)
        settings = _settings(chosen, dtype=dtype, rounds=rounds, threads=threads)
        if out is not None:
            _check_file(out)
        if plots is not None:
            plot.load_pyplot()
            _check_folder("--plot", plots)
    except (ValueError, ImportError) as fault:
        typer.echo(f"micronorm bench: {fault}", err=True)
        raise typer.Exit(MISUSE) from None
    single = {"dtype": dtype, "rounds": rounds, "device": device, "threads": threads, "no_compile": no_compile}
    command = _command(case, layout, method, route, **single)
    facts = _facts(settings, command)
    rows = _run(chosen, settings, facts, tell=case is None and device is None)
    if out is not None:
        write_atomically(out, to_csv(rows, facts).encode())
    if plots is not None:
        where = facts["gpu"] or facts["cpu"]
        plot.draw(rows, plots, caption=f"{where}, torch {facts['torch']}, {str(facts['date'])[:10]}")
    faults = [row for row in rows if row.method.is_ours and row.fault]
    if faults:
        names = dict.fromkeys(f"{row.method.key} at {row.case.name}" for row in faults)
        typer.echo(f"micronorm bench: no figure for {', '.join(names)}: see its rows", err=True)
        raise typer.Exit(FAULTY)


# --- what is asked for ------------------------------------------------------------------------------------------------


class _Chosen:
    """What to measure, and on which device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cases: list[Case] = []
        self.methods: list[peers.Method] = []
        self.layouts: Sequence[str] = LAYOUTS
        self.routes: Sequence[str] = ROUTES

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def _choose(
    case: _Several, layout: _Several, method: _Several, route: _Several, device: str | None, no_compile: bool
) -> _Chosen:
    available = torch.cuda.is_available()
    name = device or ("cuda" if available else "cpu")
    if name not in ("cuda", "cpu"):
        raise ValueError(f"--device is cuda or cpu, got {name!r}")
    if name == "cuda" and not available:
        raise ValueError("--device cuda: torch finds no CUDA device here; leave it out to measure on the CPU")
    chosen = _Chosen(torch.device(name))
    chosen.cases = cases.choose_cases(case or (), on_gpu=chosen.on_gpu)
    chosen.methods = peers.choose_methods(method or (), on_gpu=chosen.on_gpu, compiled=not no_compile)
    if not chosen.methods:
        raise ValueError("--no-compile leaves none of the methods that were named")
    chosen.layouts = _members("--layout", layout, LAYOUTS)
    chosen.routes = _members("--route", route, ROUTES if chosen.on_gpu else ("eager",))
    return chosen


def _members(option: str, wanted: _Several, known: Sequence[str]) -> Sequence[str]:
    for value in wanted or ():
        if value not in known:
            hint = "; CUDA graphs need a GPU" if value == "graph" else ""
            raise ValueError(f"{option} must be {' or '.join(known)}, got {value!r}{hint}")
    return [value for value in known if value in wanted] if wanted else known


def _settings(chosen: _Chosen, *, dtype: str | None, rounds: int, threads: int | None) -> Settings:
    name = dtype or ("bfloat16" if chosen.on_gpu else "float32")
    if name not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    if rounds < 2:
        raise ValueError(f"--rounds must be at least 2 for quartiles, got {rounds}")
    if threads is not None and threads < 1:
        raise ValueError(f"--threads must be positive, got {threads}")
    if threads is not None:
        torch.set_num_threads(threads)
    bandwidth = copy_bandwidth(chosen.device) if chosen.on_gpu else None
    return Settings(chosen.device, DTYPES[name], chosen.routes, rounds, bandwidth)


def _check_file(out: Path) -> None:
    if out.suffix != ".csv":
        raise ValueError(f"--out writes CSV, got {out.name!r}; name it something.csv")
    if out.is_dir():
        raise ValueError(f"--out writes a file, {out} is a folder; name a file in it, {out / 'rows.csv'}")
    _check_folder("--out", out.parent)


def _check_folder(option: str, folder: Path) -> None:
    """Make a folder and try to write there: before the measurement, which may take an hour."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".micronorm-"):
            pass
    except OSError as fault:
        raise ValueError(f"{option} cannot write into {folder}: {fault.strerror}; name another folder") from None


def _command(case: _Several, layout: _Several, method: _Several, route: _Several, **single: Any) -> str:
    """The command that repeats this, rebuilt from its options: a typed one could hold a path."""
    words = ["micronorm", "bench"]
    for name, values in (("case", case), ("layout", layout), ("method", method), ("route", route)):
        words += [word for value in values or () for word in (f"--{name}", value)]
    for name, value in single.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value not in (None, False):
            words += [option, str(value)]
    return " ".join(words)


def _facts(settings: Settings, command: str) -> dict[str, object]:
    """What every row says of the run."""
    found = environment()
    gpu: Mapping[str, Any] = (found["gpu"] or {}) if settings.device.type == "cuda" else {}
    return {
        "gpu": torch.cuda.get_device_name(settings.device) if gpu else None,
        "cpu": found["cpu"]["model"],
        "cores": found["cpu"]["threads"],
        "threads": found["cpu"]["torch_threads"],
        "copy_tb_per_s": None if settings.bandwidth is None else f"{settings.bandwidth / 1e12:.3f}",
        "torch": found["torch"],
        "triton": _version("triton"),
        "cuda": gpu.get("cuda"),
        "cudnn": gpu.get("cudnn"),
        "micronorm": found["micronorm"],
        "python": found["python"],
        "date": found["date"],
        "revision": found["revision"],
        "command": command,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- the run and what is printed --------------------------------------------------------------------------------------


def _run(chosen: _Chosen, settings: Settings, facts: Mapping[str, object], *, tell: bool) -> list[Row]:
    console = Console(highlight=False)
    where = facts["gpu"] or f"{facts['cpu']}, {facts['threads']} threads"
    for line in (f"{where}, torch {facts['torch']}", *table.heading(settings)):
        _say(console, line)
    if tell and not chosen.on_gpu:
        _say(console, skipped())
    rows: list[Row] = []
    with peers.one_rank(chosen.methods):
        for case in chosen.cases:
            found = list(_rows_of(case, chosen, settings))
            compare(found)
            _print(console, case, found)
            rows += found
    for line in table.verdicts(rows):
        _say(console, line)
    return rows


def _rows_of(case: Case, chosen: _Chosen, settings: Settings) -> Iterator[Row]:
    for layout in chosen.layouts:
        yield from measure(case, layout, chosen.methods, settings)


def skipped() -> str:
    """What a machine without a GPU leaves out, and why."""
    shapes = "; ".join(f"{group}: {', '.join(case.name for case in CASES[group])}" for group in GPU_GROUPS)
    left = [method.key for method in peers.ON_GPU if method not in peers.ON_CPU]
    return (
        f"No CUDA device: skipped the GPU's shapes ({shapes}), the route by CUDA graph, the multiples of the traffic "
        f"floor, and the contestants {', '.join(left)}. The CPU's shapes follow."
    )


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


def _print(console: Console, case: Case, rows: Sequence[Row]) -> None:
    if not console.is_terminal:
        typer.echo("\n" + "\n".join(table.as_text(case, rows)))
        return
    columns, lines = table.grid(rows)
    grid = Table(title=table.title(case, rows), box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        grid.add_column(column, justify="left" if column in table.LEFT else "right", overflow="fold")
    for row, line in zip(rows, lines, strict=True):
        ours = "red" if row.fault else "bold"
        grid.add_row(*line, style=ours if row.method.is_ours else "dim" if row.fault else None)
    console.print(grid)
    for remark in table.remarks(rows):
        _say(console, remark)


def _list() -> None:
    for group, members in CASES.items():
        typer.echo(f"{group} ({'GPU' if group in GPU_GROUPS else 'CPU'})")
        for case in members:
            typer.echo(f"  {case.name:<18}{case.reason}")
    typer.echo("methods (* on a GPU, + on a CPU unless --method is given)")
    for method in peers.METHODS:
        marks = ("*" if method in peers.ON_GPU else " ") + ("+" if method in peers.ON_CPU else " ")
        typer.echo(f"  {method.key:<28}{marks}  {method.label}")
