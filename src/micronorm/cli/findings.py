"""The demo's findings as sentences computed from the measured figures, for its terminal output and its page."""

import math
from dataclasses import dataclass
from pathlib import Path

from micronorm import records
from micronorm.recipes import Recipe
from micronorm.recipes.digits import STEP_BATCH
from micronorm.recipes.protocols import method

ROUNDING = 1e-10
"""The largest difference between split and whole steps that rounding in float64 explains: the tests' tolerance."""

HOW_MEASURED = (
    '"About as many" allows for chance: 2·sqrt(a + b) for error counts a and b. One seed, one small data set and the '
    "same settings for all methods make this a demonstration, not a benchmark.",
    "Weights are compared in float64, relative to the largest entry of each tensor.",
)

_WORDS = {"BN": "BatchNorm", "GN": "GroupNorm", "GN+WS": "GroupNorm + WS", "BCN+WS": "BCN + WS"}


@dataclass(frozen=True)
class Errors:
    """How many of the test images a method classified wrong."""

    wrong: int
    images: int

    @classmethod
    def read(cls, folder: Path) -> "Errors":
        """Read them from the record of a finished run."""
        record = records.read(folder)
        assert record.outcome is not None
        images = record.facts["data"]["test"]
        return cls(round(record.outcome["figures"]["top1"] * images / 100), images)


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
