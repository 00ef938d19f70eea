"""The `micronorm` command: one module per command parses its options, calls the library and prints the result.

What the commands compute is elsewhere, except the demo's comparison and the self-tests of `micronorm doctor`.
"""

from typing import Annotated

import typer

import micronorm
from micronorm.cli import bench, check, demo, diagnose, doctor, fold, plan, predict, report, reproduce, train
from micronorm.cli.faults import Commands

app = typer.Typer(
    name="micronorm",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # errors of ours show Python's own traceback, which users can paste into a report
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo.demo)
app.command()(train.train)
app.command()(reproduce.reproduce)
app.command()(check.check)
app.command()(diagnose.diagnose)
app.command()(plan.plan)
app.command()(predict.predict)
app.command()(fold.fold)
app.command()(bench.bench)
app.command()(report.report)
app.command()(doctor.doctor)


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
