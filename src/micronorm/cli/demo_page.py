"""The demo's page: its first screen says what the library does, in words that a newcomer knows."""

import math
from collections.abc import Mapping
from pathlib import Path

from micronorm.cli.findings import HOW_MEASURED, ROUNDING, Errors
from micronorm.recipes import Recipe, find_table
from micronorm.recipes.digits import STEP_BATCH
from micronorm.recipes.protocols import method
from micronorm.report import Lead, Table, write_page

_WORDS = {"BN": "BatchNorm", "GN": "GroupNorm", "GN+WS": "GroupNorm + WS", "BCN+WS": "BCN + WS"}


def write_demo_page(
    page: Path, errors: Mapping[str, Errors], differences: Mapping[str, float], *, steps: int, size: int
) -> Path:
    """Write the page about the runs in the folder of `page`, and return its path.

    Args:
        page: the HTML file, beside the run directories.
        errors: the wrong answers of each recipe, by its name.
        differences: by recipe, the largest relative difference after training with whole and with split steps.
        steps: how many steps were trained to measure `differences`.
        size: into how many images at a time the steps were split.
    """
    recipes = find_table("digits").rows
    rows = [[_name(recipe), f"{differences[recipe.name]:.0e}"] for recipe in recipes]
    number, meaning = _describe_split(differences["digits/bcn-ws"], steps, size)
    lead = Lead(
        finding=_describe_errors(errors["digits/bcn-ws"], errors["digits/bn"], errors["digits/bn-64"]),
        picture="Test error, by normalization layer and images processed at a time",
        number=number,
        meaning=meaning,
        measured=" ".join((_MEASURED, *HOW_MEASURED, f"For BCN + WS it is {differences['digits/bcn-ws']:.0e}.")),
    )
    split = Table(
        "Does the result depend on how a step is split?",
        ["method", "largest difference"],
        rows,
        f"{steps} steps in float64 with {STEP_BATCH} images at once, and again with {size} at a time: the largest "
        "relative difference in any weight or running statistic. About 1e-14 is rounding.",
    )
    runs = {_name(recipe): page.parent / recipe.row for recipe in recipes}
    return write_page(page, runs=runs, title="micronorm demo", lead=lead, tables=[split])


_MEASURED = (
    "BCN is Batch-Channel Normalization, WS is Weight Standardization. A small ResNet learns handwritten digits of 8×8 "
    f"pixels. Every optimizer step uses {STEP_BATCH} images; the methods differ in how many of them a normalization "
    "layer sees at a time."
)


def _name(recipe: Recipe) -> str:
    short = method(recipe.norm, recipe.weight)
    return f"{_WORDS.get(short, short)}, {recipe.micro_batch} at a time"


def _describe_errors(ours: Errors, single: Errors, batch: Errors) -> str:
    # Wrong answers are rare events: a difference of two counts varies by the root of their sum.
    alike = abs(ours.wrong - batch.wrong) <= 2 * math.sqrt(ours.wrong + batch.wrong)
    relation = "about as many as" if alike else "compared with"
    return (
        f"Trained one image at a time, BatchNorm gets {single.wrong} of {single.images} test images wrong; this "
        f"library's BCN + WS gets {ours.wrong} wrong, {relation} BatchNorm with {STEP_BATCH} at a time ({batch.wrong})."
    )


def _describe_split(difference: float, steps: int, size: int) -> tuple[str, str]:
    """Return the number on the first screen, and what it means."""
    ways = f"whether a step processes its {STEP_BATCH} images at once or {size} at a time"
    if difference <= ROUNDING:
        digits = 15 if difference == 0 else math.floor(-math.log10(difference))
        return f"{digits} digits", (
            f"With BCN + WS the weights after {steps} steps agree to {digits} digits, {ways}. So you can process as "
            "many images at a time as fit into memory, and get the same network up to rounding."
        )
    return f"{difference:.0e}", (
        f"With BCN + WS the weights differ by this much, {ways}. That is more than rounding explains: please run "
        "micronorm doctor and report it."
    )
