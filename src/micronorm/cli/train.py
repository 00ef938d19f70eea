"""`micronorm train RECIPE`: train a recipe into a run directory."""

import os
import shlex
import sys
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console

from micronorm.cli.printing import TrainingProgress, as_options, figure_text, say
from micronorm.cli.targets import find_recipe
from micronorm.engine.settings import Execution, Outcome
from micronorm.recipes.run import Variation, run_recipe

Dtype = Annotated[
    Literal["float32", "float64", "bfloat16", "float16"] | None,
    typer.Option(help="Default: the recipe's. Half types use autocast."),
]
_run = partial(typer.Option, rich_help_panel="The run")
_data = partial(typer.Option, rich_help_panel="Data")
_speed = partial(typer.Option, rich_help_panel="Speed and memory: the result changes by rounding only")


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="digits, cifar1/c10-bcn-ws, …: `micronorm reproduce` lists them. Or file.py:name for one of your own.",
        ),
    ],
    step_batch: Annotated[int | None, typer.Option(min=1, help="Samples per optimizer step, over all ranks.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the training samples.")] = None,
    lr: Annotated[float | None, typer.Option(min=0.0, help="Learning rate, which the schedule scales.")] = None,
    dtype: Dtype = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**31, help="Seed of weights, order and augmentation.")] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Height and width of the training crops.")] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Start from the weights of a checkpoint: safetensors, or a torch state dict.")
    ] = None,
    out: Annotated[Path | None, _run(help="Run directory. Default: runs/RECIPE-SEED.")] = None,
    resume: Annotated[bool, _run("--resume", help="Continue from the newest checkpoint in the directory.")] = False,
    steps: Annotated[int | None, _run(min=1, help="Stop after this many steps; --resume continues.")] = None,
    minutes: Annotated[float | None, _run(min=0.0, help="Stop after this many minutes; --resume continues.")] = None,
    save_every: Annotated[
        int | None, _run(min=1, help="Steps between checkpoints. Default: ten minutes, and each evaluation.")
    ] = None,
    evaluate_every: Annotated[int, _run(min=1, help="Epochs between evaluations; always after the last.")] = 1,
    observe: Annotated[
        int | None, _run(min=1, help="Steps between measurements of the layers, for the report.")
    ] = None,
    data: Annotated[Path | None, _data(help="Folder of the data set. Default: ./data and ~/data.")] = None,
    download: Annotated[bool, _data("--download", help="Download CIFAR if it is not found.")] = False,
    unverified: Annotated[
        bool, _data("--unverified", help="Accept CIFAR files with other checksums, such as a miniature.")
    ] = False,
    workers: Annotated[int, _data(min=0, help="Processes that decode image files.")] = 0,
    micro_batch: Annotated[
        str, _speed(help="Samples per forward and backward. auto: as many as fit into memory.")
    ] = "auto",
    device: Annotated[str | None, _speed(help="cpu, cuda, cuda:1. Default: the GPU if there is one.")] = None,
    channels_last: Annotated[bool, _speed("--channels-last", help="Store images in NHWC, volumes in NDHWC.")] = False,
    compiled: Annotated[bool, _speed("--compile", help="Compile the model with torch.compile.")] = False,
    cuda_graph: Annotated[
        bool, _speed("--cuda-graph", help="Capture the whole step as a CUDA graph, on one GPU.")
    ] = False,
    recompute: Annotated[
        bool, _speed("--recompute", help="Recompute activations in the backward: less memory, the same bits.")
    ] = False,
    parallel: Annotated[
        Literal["ddp", "fsdp"], _speed(help="How ranks share the model: ddp (replicas) or fsdp (shards).")
    ] = "ddp",
) -> None:
    """Train a recipe into a run directory, which `micronorm report` turns into a page.

    The first group of options overrides the recipe. Several GPUs: torchrun --nproc-per-node 4 -m micronorm train
    RECIPE. Ctrl-C and SIGTERM finish the step or stop the evaluation, save a checkpoint and print the command that
    continues the run. A step that runs out of memory is repeated in smaller pieces.

    Exit code 0: trained as requested. 1: the run failed. 2: a name or an option is wrong. 3: the loss or a weight is
    not finite. 130, 143: interrupted.
    """
    console = Console(highlight=False)
    found = find_recipe(recipe)
    variation = Variation(
        step_batch=step_batch,
        epochs=epochs,
        lr=lr,
        dtype=dtype,
        seed=seed,
        size=size,
        unverified=unverified or None,
        weights=None if weights is None else str(weights),
    )
    execution = Execution(
        micro_batch=_micro_batch(micro_batch),
        device=find_device(device),
        channels_last=channels_last,
        compile=compiled,
        cuda_graph=cuda_graph,
        recompute=recompute,
        parallel=parallel,
        steps=steps,
        minutes=minutes,
        save_steps=save_every,
        evaluate_epochs=evaluate_every,
        observe=observe,
    )
    folder = out or Path("runs") / f"{found.name.replace('/', '-')}-{seed or 0}"
    outcome = run_recipe(
        found,
        out=folder,
        variation=variation,
        execution=execution,
        data=data,
        download=download,
        workers=workers,
        resume=resume,
        listener=TrainingProgress(console),
        command=shlex.join(["micronorm", *sys.argv[1:]]),
    )
    if outcome.first:
        name = recipe if ":" in recipe else found.name
        # The record does not contain the data folder.
        options = as_options({"out": folder, "resume": True, "data": data}) + execution_options(execution, workers)
        _print_outcome(console, outcome, folder, [*_launcher(), "train", name, *options])
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)


def _micro_batch(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--micro-batch must be auto or a number of samples from 1 on, got {text!r}")
    return int(text)


def find_device(text: str | None) -> torch.device | None:
    """Return the device of that name, or None for None. Raise ValueError if this machine cannot use it."""
    if text is None:
        return None
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")  # refused below
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {text!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"{count} GPU{'s' * (count > 1)}, from cuda:0 on" if count else "no GPU"
        raise ValueError(f"--device {text}: torch can use {found}; `micronorm doctor` says what is installed")
    return device


def _launcher() -> list[str]:
    """Return how this process was started, if all ranks are on this machine; the launcher of several is not known."""
    ranks, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return ["torchrun", "--nproc-per-node", str(ranks), "-m", "micronorm"] if ranks == here > 1 else ["micronorm"]


def execution_options(execution: Execution, workers: int = 0) -> list[str]:
    """Return the options that a resumed run does not take from its record: those of speed and memory."""
    names = {"save_steps": "save_every", "evaluate_epochs": "evaluate_every"}
    given = {"workers": workers or None}
    for name, usual in vars(Execution()).items():
        value = getattr(execution, name)
        if value != usual and name not in ("steps", "minutes"):
            given[names.get(name, name)] = value
    return as_options(given)


def _print_outcome(console: Console, outcome: Outcome, folder: Path, resume_command: list[str]) -> None:
    figures = ", ".join(starmap(figure_text, outcome.figures.items()))
    steps = f"{outcome.steps} step{'s' * (outcome.steps != 1)}"
    say(console, f"{steps}; {f'on the test samples: {figures}' if figures else 'not evaluated'}")
    say(console, f"weights: {folder / 'model.safetensors'}; digest of the final state: {outcome.digest[:16]}")
    if not outcome.finished:
        say(console, f"to continue: {shlex.join(resume_command)}")
