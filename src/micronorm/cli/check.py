"""`micronorm check`: test whether an optimizer step depends on how its samples are split into micro-batches."""

import copy
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor, nn

from micronorm.check import check_cuts, check_start
from micronorm.cli.printing import FAILED, TargetError, print_json, show_report
from micronorm.cli.targets import ANY_CLASSES, Groups, Norm, Target, Weight, attempt, converted, input_channels, resolve
from micronorm.ops.private_api import DropoutNd

_DROPPING = ("StochasticDepth", "DropPath")


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="timm:NAME, torchvision:NAME, recipe:NAME or package.module:factory. A factory returns (model, batch, "
            "loss) or a model. A model alone is checked with random images and a summed cross-entropy.",
        ),
    ],
    batch: Annotated[int, typer.Option(min=2, max=4096, help="The number of random images.")] = 6,
    size: Annotated[int, typer.Option(min=1, max=4096, help="The height and width of the images.")] = 64,
    classes: Annotated[
        int | None, typer.Option(min=1, help="The number of labels. Default: the number of outputs.")
    ] = None,
    norm: Norm = "none",
    groups: Groups = None,
    weight: Weight = "none",
    no_dropout: Annotated[
        bool, typer.Option("--no-dropout", help="Switch off dropout and drop-path, which hide other faults.")
    ] = False,
    lr: Annotated[
        float | None,
        typer.Option(help="Also take 20 steps of SGD at this learning rate on a copy, and warn if the loss jumps."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Test whether a step depends on how its images are split, and name the module that makes it so.

    The check runs one optimizer step whole, in halves and one image at a time, in float64. With --norm or --weight the
    model is converted first. With --lr, a note says whether the loss jumps in the first steps; the exit code
    does not depend on it.

    Exit code 0: the step does not depend on the split. 1: it does. 2: the model or an option is wrong.
    """
    subject = resolve(target, classes=classes or ANY_CLASSES)
    model, data, loss = _subject(subject, batch=batch, size=size, classes=classes)
    model = converted(model, norm, groups, weight)
    if no_dropout:
        _switch_dropout_off(model)
    report = check_cuts(model, data, loss)
    if lr is not None:
        no_jump = f"at lr {lr:g} the loss does not jump in the first steps of SGD"
        report.notes.append(check_start(model, data, loss, lr=lr) or no_jump)
    if as_json:
        print_json({"target": target, **report.to_dict()})
    else:
        words = [finding.where for finding in report.findings] + ["fix:", "evidence:"]
        red, green = r"THE STEP DEPENDS ON THE SPLIT\.", r"the step does not depend on the split\."
        show_report(Console(highlight=False), str(report), bold=words, red=red, green=green)
    raise typer.Exit(0 if report.ok else FAILED)


def _subject(target: Target, *, batch: int, size: int, classes: int | None) -> tuple[nn.Module, tuple, Any]:
    model = target.model
    if target.rest:
        if len(target.rest) != 2:
            values = 1 + len(target.rest)
            raise TargetError(f"a factory must return a model or (model, batch, loss), got {values} values")
        data, loss = target.rest
        attempt(lambda: loss(copy.deepcopy(model), data), "the loss fails on the whole batch")
        return model, data, loss
    model.train()
    channels = input_channels(model)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, channels, size, size, generator=generator)
    with torch.no_grad():
        shape = f"1×{channels}×{size}×{size}"
        output = attempt(
            lambda: copy.deepcopy(model).eval()(images[:1]),
            f"the model fails on an image of {shape}",
            "; try --size, or use a factory of (model, batch, loss)",
        )
    outputs = _logits(output).shape
    if len(outputs) < 2:
        raise TargetError(f"the model returns {tuple(outputs)}, not logits; use a factory of (model, batch, loss)")
    if classes is not None and classes > outputs[1]:
        raise TargetError(f"--classes {classes} is above the model's {outputs[1]} outputs")
    labels = torch.randint(classes or outputs[1], (batch, *outputs[2:]), generator=generator)
    return model, (images, labels), summed_cross_entropy


def _switch_dropout_off(model: nn.Module) -> None:
    """Set the rate of torch's dropouts, torchvision's StochasticDepth and timm's DropPath to zero."""
    for module in model.modules():
        for name in ("p", "drop_prob"):
            rate = getattr(module, name, None)
            dropout = isinstance(module, DropoutNd) or type(module).__name__ in _DROPPING
            if dropout and isinstance(rate, float):
                setattr(module, name, 0.0)


def _logits(output: Any) -> Tensor:
    """Return the logits: torchvision's segmenters return a dictionary, networks with auxiliary heads a tuple."""
    if isinstance(output, dict) and "out" in output:
        output = output["out"]
    elif isinstance(output, tuple) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise TargetError(
            f"the model returns a {type(output).__name__}, not logits; use a factory of (model, batch, loss)"
        )
    return output


def summed_cross_entropy(model: nn.Module, part: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the sum of the cross-entropies and the number of labels."""
    images, labels = part
    return F.cross_entropy(_logits(model(images)), labels, reduction="sum"), labels.numel()
