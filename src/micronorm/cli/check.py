"""`micronorm check`: does a step of this model depend on how its samples were cut up?"""

import copy
import json
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn

from micronorm.check import CutsReport, check_cuts
from micronorm.cli.specs import Groups, Norm, Weight, norm_spec, weight_spec
from micronorm.cli.targets import MISUSE, TargetError, resolve
from micronorm.convert import convert
from micronorm.ops.private_api import DropoutNd

DEPENDS = 1
_DROPPING = ("StochasticDepth", "DropPath")


def check(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:factory, torchvision:NAME or timm:NAME. A factory returns (model, batch, loss), or a "
            "model, which is then given random images and a summed cross-entropy."
        ),
    ],
    batch: Annotated[int, typer.Option(min=2, help="How many random images.")] = 6,
    size: Annotated[int, typer.Option(min=1, help="Their height and width.")] = 64,
    classes: Annotated[
        int | None, typer.Option(min=1, help="How many labels; as many as the model has outputs.")
    ] = None,
    norm: Norm = "none",
    groups: Groups = None,
    weight: Weight = "none",
    no_dropout: Annotated[
        bool, typer.Option("--no-dropout", help="Switch dropout and drop-path off first: they would hide the rest.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Run one step whole, halved and one image at a time, and name the first module that makes them differ, and why.

    With --norm or --weight the model is converted first.

    Exit code 0: the step does not depend on the cut. 1: it does. 2: the target or an option is wrong.
    """
    try:
        model, data, loss = _subject(resolve(target), batch=batch, size=size, classes=classes)
        wanted = norm_spec(norm, groups=groups), weight_spec(weight)
        if any(spec is not None for spec in wanted):
            model = convert(model, *wanted)
        if no_dropout:
            _switch_dropout_off(model)
        report = check_cuts(model, data, loss)
    except (TargetError, ValueError, TypeError) as error:
        message = " ".join(str(error).split())
        typer.echo(f"micronorm check: {message}", err=True)
        raise typer.Exit(MISUSE) from None
    if as_json:
        typer.echo(json.dumps({"target": target, **report.to_dict()}, indent=2))
    else:
        _print(Console(highlight=False), report)
    raise typer.Exit(0 if report.ok else DEPENDS)


def _subject(made: nn.Module | tuple, *, batch: int, size: int, classes: int | None) -> tuple[nn.Module, tuple, Any]:
    if isinstance(made, tuple):
        if len(made) != 3:
            raise TargetError(f"a factory returns a model or (model, batch, loss), got {len(made)} values")
        return made
    model = made.train()
    channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, channels, size, size, generator=generator)
    outputs = _logits(_try(model, images[:1])).shape
    if len(outputs) < 2:
        raise TargetError(f"the model gives shape {tuple(outputs)}, not logits; give a factory of (model, batch, loss)")
    if classes is not None and classes > outputs[1]:
        raise TargetError(f"--classes {classes} is more than the model's {outputs[1]} outputs")
    labels = torch.randint(classes or outputs[1], (batch, *outputs[2:]), generator=generator)
    return model, (images, labels), _summed_cross_entropy


def _switch_dropout_off(model: nn.Module) -> None:
    """torch's dropouts, torchvision's StochasticDepth and timm's DropPath, by the attribute that holds their rate."""
    for module in model.modules():
        for name in ("p", "drop_prob"):
            rate = getattr(module, name, None)
            dropout = isinstance(module, DropoutNd) or type(module).__name__ in _DROPPING
            if dropout and isinstance(rate, float):
                setattr(module, name, 0.0)


def _try(model: nn.Module, image: Tensor) -> Any:
    """One forward of a copy in eval mode, to see what comes out."""
    with torch.no_grad():
        try:
            return copy.deepcopy(model).eval()(image)
        except Exception as error:
            shape = "×".join(map(str, image.shape))
            raise TargetError(
                f"the model fails on an image of {shape} ({type(error).__name__}: {error}); try --size, or give a "
                "factory of (model, batch, loss)"
            ) from error


def _logits(output: Any) -> Tensor:
    """The classifier's output: torchvision's segmenters give a dictionary, networks with auxiliary heads a tuple."""
    if isinstance(output, dict) and "out" in output:
        output = output["out"]
    elif isinstance(output, tuple) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise TargetError(
            f"the model gives a {type(output).__name__}, not logits; give a factory of (model, batch, loss)"
        )
    return output


def _summed_cross_entropy(model: nn.Module, part: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    images, labels = part
    return F.cross_entropy(_logits(model(images)), labels, reduction="sum"), labels.numel()


def _print(console: Console, report: CutsReport) -> None:
    text = Text(str(report))
    if console.is_terminal:
        text.highlight_words([f.where for f in report.findings] + ["fix:", "evidence:"], "bold")
        text.highlight_words(["THE STEP DEPENDS ON THE CUT."], "bold red")
        text.highlight_words(["the step does not depend on the cut."], "green")
    # A terminal breaks lines between words; a file gets whole lines, for whoever searches in it.
    console.print(text, soft_wrap=not console.is_terminal)
