"""`micronorm plan`: show what a conversion would do to each layer of a model."""

from typing import Annotated, Any

import typer
from rich.console import Console
from torch import nn

from micronorm.cli.printing import CommandFailed, TargetError, print_json, print_table
from micronorm.cli.targets import ANY_CLASSES, Groups, Statistics, norm_spec, resolve, weight_spec
from micronorm.convert import plan as make_plan
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.networks import build_network


def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="timm:NAME, torchvision:NAME, package.module:factory for a model of your own, or recipe:NAME for the "
            "conversion of a recipe.",
        ),
    ],
    norm: Annotated[
        str | None, typer.Option(help="bcn, gn, bn, …, module:Spec or none. Default: bcn, or the recipe's own.")
    ] = None,
    groups: Groups = None,
    weight: Annotated[
        str | None, typer.Option(help="ws, wn, cwn, module:Spec or none. Default: ws, or the recipe's own.")
    ] = None,
    statistics: Statistics = None,
    absorb: Annotated[
        bool, typer.Option("--absorb", help="Keep the mean and scale of each pretrained kernel.")
    ] = False,
    warm_steps: Annotated[
        int, typer.Option(min=0, help="Start as the given network and become BCN over this many steps.")
    ] = 0,
    layer_norm: Annotated[bool, typer.Option("--layer-norm", help="Convert layer norms too.")] = False,
    no_fuse: Annotated[
        bool, typer.Option("--no-fuse", help="Do not fuse activations and additions into the norms.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show what converting a model would do to each convolution and normalization, and why. Nothing is changed.

    Exit code 0: there is something to convert. 1: there is nothing. 2: the model or an option is wrong.
    """
    try:
        made = make_plan(
            *_subject(target, norm, weight, groups=groups, statistics=statistics),
            absorb=absorb or None,
            warm_steps=warm_steps,
            layer_norm=layer_norm,
            fuse=not no_fuse,
        )
    except ValueError as fault:
        if not str(fault).startswith("nothing to convert"):
            raise
        raise CommandFailed(str(fault)) from None
    console = Console(highlight=False)
    if as_json:
        print_json({"target": target, **made.to_dict()})
    elif console.is_terminal:
        rows = [(one.name, one.type, one.becomes or "stays", one.reason) for one in made.decisions]
        styles = ["dim" if one.becomes is None else None for one in made.decisions]
        print_table(console, ("name", "type", "becomes", "reason"), rows, styles=styles, title=target)
        console.print(made.summary(), markup=False)
    else:
        typer.echo(str(made))


def _subject(
    target: str, norm: str | None, weight: str | None, **options: Any
) -> tuple[nn.Module, NormSpec | None, WeightSpec | None]:
    """Return the model and the specs to plan with. A recipe gives its plain network, and its specs by default."""
    specs = norm_spec(norm or "bcn", **options), weight_spec(weight or "ws")
    model, _, recipe = resolve(target, classes=ANY_CLASSES)
    if recipe is None:
        return model, *specs
    if norm is None and any(value is not None for value in options.values()):
        raise TargetError("--groups and --statistics change the recipe's norm: name one with --norm too")
    network = build_network(recipe.network, classes=recipe.classes or ANY_CLASSES)
    return network, recipe.norm if norm is None else specs[0], recipe.weight if weight is None else specs[1]
