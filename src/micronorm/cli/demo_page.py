"""The demo's page: its first screen says what the library does, in words that a newcomer knows."""

from collections.abc import Mapping
from pathlib import Path

from micronorm.cli.findings import (
    HOW_MEASURED,
    Errors,
    describe_baseline,
    describe_errors,
    describe_split,
    name_of,
)
from micronorm.recipes import find_table
from micronorm.recipes.digits import STEP_BATCH
from micronorm.report import Lead, Table, write_page

_MEASURED = (
    "BCN is Batch-Channel Normalization, WS is Weight Standardization. A small ResNet learns handwritten digits of 8×8 "
    f"pixels. Every optimizer step uses {STEP_BATCH} images; the methods differ in how many of them a normalization "
    "layer sees at a time."
)


def write_demo_page(
    page: Path, errors: Mapping[str, Errors], differences: Mapping[str, float], *, steps: int, size: int
) -> Path:
    """Write the page about the runs in the folder of `page`, and return its path.

    Args:
        page: The HTML file, beside the run directories.
        errors: The wrong answers of each recipe, by its name.
        differences: By recipe, the largest relative difference after training with whole and with split steps.
        steps: How many steps were trained to measure `differences`.
        size: How many images at a time the split steps processed.
    """
    recipes = find_table("digits").rows
    number, meaning = describe_split(differences["digits/bcn-ws"], steps=steps, size=size)
    lead = Lead(
        finding=describe_errors(errors["digits/bcn-ws"], errors["digits/bn"], errors["digits/bn-64"]),
        picture="Test error, by normalization layer and images processed at a time",
        number=number,
        meaning=meaning,
        measured=" ".join((_MEASURED, *HOW_MEASURED, describe_baseline(differences["digits/bn-64"]))),
    )
    split = Table(
        "Does the result depend on how a step is split?",
        ["method", "largest difference"],
        [[name_of(recipe), _format_difference(differences[recipe.name])] for recipe in recipes],
        f"{steps} steps in float64 with {STEP_BATCH} images at once, and again with {size} at a time: the largest "
        "relative difference in any weight or running statistic. About 1e-14 is rounding. Rounding grows for BatchNorm "
        "over one image, because some of its gradients cancel almost completely.",
    )
    runs = {name_of(recipe): page.parent / recipe.row for recipe in recipes}
    return write_page(page, runs=runs, title="micronorm demo", lead=lead, tables=[split])


def _format_difference(value: float) -> str:
    return f"{value:.0e}" if value < 0.01 else f"{value:.2g}"
