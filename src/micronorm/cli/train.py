"""`micronorm train RECIPE`: the run that memory, a kill or the number of GPUs cannot spoil."""

import os
import shlex
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from micronorm import records
from micronorm.cli.progress import TrainingProgress
from micronorm.cli.targets import MISUSE
from micronorm.diagnostics.observe import observe as observe_model
from micronorm.engine.listener import Listener
from micronorm.engine.loop import train as train_model
from micronorm.engine.parallel import own_device
from micronorm.engine.settings import DTYPES, Execution, Outcome, Settings
from micronorm.recipes import Recipe, find
from micronorm.tasks.classification import open_classification

FAILED = 1


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Where a run departs from its recipe; None leaves what the recipe says. A resumed run keeps its own."""

    step_batch: int | None = None
    epochs: int | None = None
    lr: float | None = None
    dtype: str | None = None
    seed: int | None = None
    size: int | None = None
    unverified: bool | None = None

    def apply(self, settings: Settings) -> Settings:
        """The recipe's settings with these in their place."""
        given: dict[str, Any] = {
            "step_batch": self.step_batch,
            "epochs": self.epochs,
            "seed": self.seed,
            "dtype": None if self.dtype is None else DTYPES[self.dtype],
            "optimizer": None if self.lr is None else replace(settings.optimizer, lr=self.lr),  # type: ignore[type-var]
        }
        return replace(settings, **{name: value for name, value in given.items() if value is not None})

    def over(self, earlier: "Variation") -> "Variation":
        """These where they are given, else the earlier ones."""
        mine = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(earlier, **{name: value for name, value in mine.items() if value is not None})


def run_recipe(
    recipe: Recipe,
    *,
    out: Path | None,
    variation: Variation | None = None,
    execution: Execution | None = None,
    data: Path | None = None,
    download: bool = False,
    workers: int = 0,
    resume: bool = False,
    model: nn.Module | None = None,
    listener: Listener | None = None,
    command: str = "",
) -> Outcome:
    """Train one recipe into a run directory.

    `model` is for callers who want to look at the network or to begin elsewhere: what `recipe.build` gave, perhaps
    changed, which is then trained in place. Without a record (`out=None`), if it was changed.

    Raises:
        FileNotFoundError: the data set is not where it was looked for.
        FileExistsError: `out` holds a run already, and `resume` was not asked for.
        ValueError: settings that do not go together, or with the run to be resumed.
    """
    variation = variation or Variation()
    if resume and out is not None and (out / records.FACTS).exists():
        earlier = records.read(out).facts
        if earlier["recipe"] != recipe.name:
            raise ValueError(f"{out} holds a run of {earlier['recipe']}, not of {recipe.name}; give another --out")
        variation = variation.over(Variation(**earlier.get("variation", {})))
    settings = variation.apply(recipe.settings)
    execution = execution or Execution()
    if model is None:
        model = recipe.build(settings.seed)
    task = open_classification(
        recipe.data,
        data,
        device=_data_device(recipe, execution),
        download=download,
        workers=workers,
        size=variation.size,
        verify=not variation.unverified,
        classes=recipe.classes,
    )
    asked = {f.name: getattr(variation, f.name) for f in fields(variation)}
    facts = {"recipe": recipe.name, "command": command, "variation": asked, "definition": recipe.definition()}
    facts |= {"title": recipe.title, "paper": None if recipe.paper is None else dict(recipe.paper)}
    facts["data"] = {"name": recipe.data, "train": len(task.train), "test": len(task.test)}
    if variation.unverified:
        facts["data"]["verified"] = False
    outcome = train_model(
        model,
        task,
        settings,
        execution,
        out=out,
        resume=resume,
        facts=facts,
        listener=listener,
        observer=observe_model,
    )
    # Shards go through collective forwards, and compiled code would be compiled again for one image.
    cheap = execution.parallel != "fsdp" and not execution.compile and outcome.signal is None
    # Predictions that are there belong to a finished run that was resumed: nothing has changed.
    if cheap and outcome.first and out is not None and not (out / records.PREDICTIONS).exists():
        records.write_predictions(out, task.examples(model))
    return outcome


def _data_device(recipe: Recipe, execution: Execution) -> torch.device | str:
    """Where batches appear: small sets are kept on the GPU, files are decoded on the CPU."""
    if recipe.data == "imagenet":
        return "cpu"
    return own_device(execution.device)


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe, such as digits or cifar1/c10-bcn-ws; see `reproduce`.")],
    step_batch: Annotated[int | None, typer.Option(min=1, help="Samples per optimizer step, over all ranks.")] = None,
    micro_batch: Annotated[
        str, typer.Option(help="Samples per forward and backward; auto begins with what fits into memory.")
    ] = "auto",
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after so many steps; --resume goes on.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Save and stop after so many minutes; --resume goes on.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the training samples.")] = None,
    lr: Annotated[float | None, typer.Option(min=0.0, help="The learning rate that the schedule scales.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; the half types use autocast.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**31, help="Of weights, order and augmentation.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run directory; runs/RECIPE-SEED unless given.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the directory.")
    ] = False,
    data: Annotated[Path | None, typer.Option(help="Where the data set lies; ./data and ~/data unless given.")] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch CIFAR where it is not found.")] = False,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Take CIFAR's files as they are, such as a miniature of one's own.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode image files.")] = 0,
    size: Annotated[int | None, typer.Option(min=1, help="Height and width of ImageNet's crops; 224.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the GPU where there is one.")] = None,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Images in NHWC.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the model with torch.compile.")] = False,
    cuda_graph: Annotated[bool, typer.Option("--cuda-graph", help="Capture the whole step, one GPU only.")] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute activations again in the backward: less memory, the same bits.")
    ] = False,
    parallel: Annotated[str, typer.Option(help="How ranks share the model: ddp or fsdp.")] = "ddp",
    save_every: Annotated[int | None, typer.Option(min=1, help="Steps between checkpoints within an epoch.")] = None,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Epochs between evaluations; the last is evaluated.")] = 1,
    observe: Annotated[
        int | None, typer.Option(min=1, help="Look into the network every so many steps: diagnostics.jsonl, events.")
    ] = None,
) -> None:
    """Train a recipe. The micro-batch, the ranks, kills and out-of-memory errors change nothing but rounding.

    Several GPUs: torchrun --nproc-per-node 4 -m micronorm train RECIPE. Ctrl-C and SIGTERM finish the step, save and
    say how to go on.

    Exit code 0: trained as far as asked. 1: the run failed. 2: a name or an option is wrong. 130, 143: interrupted.
    """
    try:
        found = find(recipe)
        variation = Variation(
            step_batch=step_batch,
            epochs=epochs,
            lr=lr,
            dtype=dtype,
            seed=seed,
            size=size,
            unverified=unverified or None,
        )
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if unverified and not found.data.startswith("cifar"):
            raise ValueError(f"--unverified is for CIFAR's files, {found.name} is of {found.data}: leave it out")
        execution = Execution(
            micro_batch=_micro_batch(micro_batch),
            device=None if device is None else _device(device),
            channels_last=channels_last,
            compile=compiled,
            cuda_graph=cuda_graph,
            recompute=recompute,
            parallel=parallel,  # type: ignore[arg-type]
            steps=steps,
            minutes=minutes,
            save_steps=save_every,
            evaluate_epochs=evaluate_every,
            observe=observe,
        )
    except ValueError as fault:
        raise _said(fault, MISUSE) from None
    folder = out or Path("runs") / f"{found.name.replace('/', '-')}-{seed or 0}"
    console = Console(highlight=False)
    try:
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
    except (ValueError, TypeError, FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as fault:
        raise _said(fault, MISUSE) from None
    except (OSError, ImportError, MemoryError) as fault:  # a download, a full disk; no torchvision
        raise _said(fault, FAILED) from None
    if outcome.first:
        again = ["train", found.name, "--out", str(folder), "--resume"]
        again += [] if data is None else ["--data", str(data)]  # the record does not say where the data lay
        _print_outcome(console, outcome, folder, [*_launcher(), *again, *execution_options(execution, workers)])
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)


def _micro_batch(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--micro-batch must be auto or a number of samples from 1 on, got {text!r}")
    return int(text)


def _device(text: str) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: there is none, or none that this machine can use.
    """
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")  # as useless as an unknown one
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {text!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"{count} GPU{'s' * (count > 1)}, from cuda:0 on" if count else "no GPU"
        raise ValueError(f"--device {text}: torch can use {found}; `micronorm doctor` says what is installed")
    return device


def _said(fault: BaseException, code: int) -> typer.Exit:
    typer.echo(f"micronorm train: {' '.join(str(fault).split())}", err=True)
    return typer.Exit(code)


def _launcher() -> list[str]:
    """How this process was started, where the ranks are all of this machine; elsewhere the launcher's user knows."""
    ranks, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return ["torchrun", "--nproc-per-node", str(ranks), "-m", "micronorm"] if ranks == here > 1 else ["micronorm"]


def execution_options(execution: Execution, workers: int = 0) -> list[str]:
    """The options of a run that its record does not bring back: those that only make it fast or fit."""
    usual, options = Execution(), [] if not workers else ["--workers", str(workers)]
    names = {"channels_last": "--channels-last", "compile": "--compile", "cuda_graph": "--cuda-graph"}
    names |= {
        "recompute": "--recompute",
        "micro_batch": "--micro-batch",
        "device": "--device",
        "parallel": "--parallel",
    }
    names |= {"save_steps": "--save-every", "evaluate_epochs": "--evaluate-every", "observe": "--observe"}
    for field, option in names.items():
        value = getattr(execution, field)
        if value != getattr(usual, field):
            options += [option] if value is True else [option, str(value)]
    return options


_FIGURES = {"top1": "top-1 error {:.4g} %", "top5": "top-5 error {:.4g} %"}


def _print_outcome(console: Console, outcome: Outcome, folder: Path, again: list[str]) -> None:
    shown = [_FIGURES.get(name, name + " {:.4g}").format(value) for name, value in outcome.figures.items()]
    figures = f"{', '.join(shown)} on the test samples" if shown else ""
    say = console.print if console.is_terminal else typer.echo
    say(f"{outcome.steps} steps; {figures or 'not evaluated'}")
    say(f"state {outcome.digest[:16]}; {folder / 'model.safetensors'}")
    if not outcome.finished:
        say(f"to go on: {shlex.join(again)}")
