"""`micronorm plan`: show what a conversion would do to each layer of a model."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from micronorm.cli.faults import one_line
from micronorm.cli.specs import Groups, Norm, Statistics, Weight, norm_spec, weight_spec
from micronorm.cli.targets import resolve_model
from micronorm.convert import Plan
from micronorm.convert import plan as make_plan

NOTHING = 1


def plan(
    target: Annotated[
        str, typer.Argument(help="timm:NAME, torchvision:NAME, or package.module:factory for a model of your own.")
    ],
    norm: Norm = "bcn",
    groups: Groups = None,
    weight: Weight = "ws",
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

    Exit code 0: there is something to convert. 1: there is nothing. 2: the target or an option is wrong.
    """
    try:
        made = make_plan(
            resolve_model(target),
            norm_spec(norm, groups=groups, statistics=statistics),
            weight_spec(weight),
            absorb=absorb or None,
            warm_steps=warm_steps,
            layer_norm=layer_norm,
            fuse=not no_fuse,
        )
    except ValueError as fault:
        if not str(fault).startswith("nothing to convert"):
            raise
        typer.echo(f"micronorm plan: {one_line(fault)}", err=True)
        raise typer.Exit(NOTHING) from None
    console = Console(highlight=False)
    if as_json:
        typer.echo(json.dumps({"target": target, **made.to_dict()}, indent=1, ensure_ascii=False))
    elif console.is_terminal:
        console.print(_table(target, made))
        console.print(made.summary(), markup=False)
    else:
        typer.echo(str(made))


def _table(target: str, plan: Plan) -> Table:
    table = Table(title=target)
    for column in ("name", "type", "becomes", "reason"):
        table.add_column(column, overflow="fold")
    for decision in plan.decisions:
        style = None if decision.becomes is not None else "dim"
        table.add_row(decision.name, decision.type, decision.becomes or "stays", decision.reason, style=style)
    return table
