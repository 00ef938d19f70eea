"""The `micronorm` command: one module per command parses its options, calls the library and prints the result.

What the commands compute is elsewhere, except the demo's comparison and the test of a step in `micronorm doctor`.
"""

import inspect
from typing import Annotated

import typer

import micronorm
from micronorm.cli import bench, check, demo, diagnose, doctor, fold, plan, predict, report, reproduce, train
from micronorm.cli.printing import Commands

app = typer.Typer(
    name="micronorm",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # errors of ours show Python's own traceback, which users can paste into a report
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS = (
    demo.demo,
    train.train,
    reproduce.reproduce,
    check.check,
    diagnose.diagnose,
    plan.plan,
    predict.predict,
    fold.fold,
    bench.bench,
    report.report,
    doctor.doctor,
)


def _reflow(text: str) -> str:
    """Join the lines of each paragraph, so that a terminal of any width breaks them where it needs to."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


for _command in _COMMANDS:
    app.command(help=_reflow(_command.__doc__ or ""))(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"micronorm {micronorm.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train vision networks one image at a time: Weight Standardization and Batch-Channel Normalization."""


def main() -> None:
    """Run the command line. The console script calls this function."""
    app()
