"""The demo's findings as sentences computed from the measured figures, for the terminal and for the demo's page."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from micronorm import records
from micronorm.recipes import Recipe, find_table
from micronorm.recipes.digits import STEP_BATCH
from micronorm.recipes.protocols import method
from micronorm.report import Lead, Table, write_page

ROUNDING = 1e-10
"""The largest difference between split and whole steps that rounding in float64 explains: the tests' tolerance."""

HOW_MEASURED = (
    '"About as many" allows for chance: 2·sqrt(a + b) for error counts a and b. One seed, one small data set and the '
    "same settings for all methods make this a demonstration, not a benchmark.",
    "Weights are compared in float64, relative to the largest entry of each tensor.",
)

_MEASURED = (
    "BCN is Batch-Channel Normalization, WS is Weight Standardization. A small ResNet learns handwritten digits of 8×8 "
    f"pixels. Every optimizer step uses {STEP_BATCH} images; the methods differ in how many of them a normalization "
    "layer sees at a time."
)
_WORDS = {"BN": "BatchNorm", "GN": "GroupNorm", "GN+WS": "GroupNorm + WS", "BCN+WS": "BCN + WS"}


@dataclass(frozen=True)
class Errors:
    """How many of the test images a method classified wrong."""

    wrong: int
    images: int

    @property
    def percent(self) -> float:
        """The test error."""
        return 100 * self.wrong / self.images

    @classmethod
    def read(cls, folder: Path) -> "Errors":
        """Read them from the record of a finished run."""
        record = records.read(folder)
        assert record.outcome is not None
        images = record.facts["data"]["test"]
        return cls(round(record.outcome["figures"]["top1"] * images / 100), images)


@dataclass(frozen=True)
class DemoFindings:
    """What the demo found: a sentence on each of three questions, and the numbers behind the second.

    `differences` are, by recipe, the largest relative differences after `steps` steps with all images at once and with
    `size` at a time. `number` says in few words what the split changes for BCN + WS.
    """

    errors: str
    number: str
    split: str
    baseline: str
    differences: Mapping[str, float]
    steps: int
    size: int


def findings(errors: Mapping[str, Errors], differences: Mapping[str, float], *, steps: int, size: int) -> DemoFindings:
    """Return the findings from the errors and differences of each recipe, by its name."""
    batch, single, ours = "digits/bn-64", "digits/bn", "digits/bcn-ws"
    sentence = describe_errors(errors[ours], errors[single], errors[batch])
    split = describe_split(differences[ours], steps=steps, size=size)
    return DemoFindings(sentence, *split, describe_baseline(differences[batch]), differences, steps, size)


def name_of(recipe: Recipe) -> str:
    """Return the method and how many images its statistics cover: "BatchNorm, 64 at a time"."""
    short = method(recipe.norm, recipe.weight)
    return f"{_WORDS.get(short, short)}, {recipe.micro_batch} at a time"


def describe_errors(ours: Errors, single: Errors, batch: Errors) -> str:
    """Compare BCN + WS with BatchNorm over one image and with BatchNorm over the images of a step.

    Example:
        >>> describe_errors(Errors(3, 500), Errors(106, 500), Errors(4, 500)).split(", ")[-1]
        'about as many as BatchNorm with 64 at a time (4).'
    """
    # Wrong answers are rare events: a count varies by its root, a difference of two counts by the root of their sum.
    alike = abs(ours.wrong - batch.wrong) <= 2 * math.sqrt(ours.wrong + batch.wrong)
    relation = "about as many as" if alike else "compared with"
    return (
        f"Trained one image at a time, BatchNorm gets {single.wrong} of {single.images} test images wrong and BCN + WS "
        f"gets {ours.wrong}, {relation} BatchNorm with {STEP_BATCH} at a time ({batch.wrong})."
    )


def describe_split(difference: float, *, steps: int, size: int) -> tuple[str, str]:
    """Return by how much splitting the steps changes BCN + WS, in a few words, and the sentence about it.

    Example:
        >>> describe_split(7e-15, steps=20, size=7)[0]
        '14 digits'
    """
    ways = f"whether a step processes its {STEP_BATCH} images at once or {size} at a time"
    if difference <= ROUNDING:
        digits = 15 if difference == 0 else math.floor(-math.log10(difference))
        return f"{digits} digits", (
            f"With BCN + WS the weights after {steps} steps agree to {digits} digits, {ways}. So use as many at a time "
            "as fit into memory."
        )
    return f"{difference:.0e}", (  # also if it is NaN
        f"With BCN + WS the weights after {steps} steps differ by {difference:.0e}, depending on {ways}. That is more "
        "than rounding explains: please run micronorm doctor and report it."
    )


def describe_baseline(difference: float) -> str:
    """Say by how much the same split changes BatchNorm."""
    if not math.isfinite(difference):
        return "With BatchNorm the same split makes the training diverge."
    return f"With BatchNorm the same split changes weights or running statistics by {100 * difference:.0f} %."


def write_demo_page(page: Path, found: DemoFindings) -> Path:
    """Write the page about the runs in the folder of `page`, and return its path."""
    recipes = find_table("digits").rows
    lead = Lead(
        finding=found.errors,
        picture="Test error, by normalization layer and images processed at a time",
        number=found.number,
        meaning=found.split,
        measured=" ".join((_MEASURED, *HOW_MEASURED, found.baseline)),
    )
    split = Table(
        "Does the result depend on how a step is split?",
        ["method", "largest difference"],
        [[name_of(recipe), _format_difference(found.differences[recipe.name])] for recipe in recipes],
        f"{found.steps} steps in float64 with {STEP_BATCH} images at once, and again with {found.size} at a time: the "
        "largest relative difference in any weight or running statistic. About 1e-14 is rounding. Rounding grows for "
        "BatchNorm over one image, because some of its gradients cancel almost completely.",
    )
    runs = {name_of(recipe): page.parent / recipe.row for recipe in recipes}
    return write_page(page, runs=runs, title="micronorm demo", lead=lead, tables=[split])


def _format_difference(value: float) -> str:
    return f"{value:.0e}" if value < 0.01 else f"{value:.2g}"
