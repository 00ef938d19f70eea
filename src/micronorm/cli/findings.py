"""The demo's findings as sentences, each computed from the measured figures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from micronorm import records

ROUNDING = 1e-10
"""The largest difference between split and whole steps that rounding in float64 explains: the tests' tolerance."""

HOW_MEASURED = (
    "Chance is two standard deviations of the difference of two error counts a and b, 2·sqrt(a + b). One seed, one "
    "small data set, the same settings for every method: a demonstration, not a benchmark.",
    "Differences are the largest in any weight or running statistic, relative to the largest entry of its tensor, in "
    "float64.",
)


@dataclass(frozen=True)
class Errors:
    """How many of the test images a method classified wrong."""

    method: str
    wrong: int
    images: int

    @classmethod
    def read(cls, method: str, folder: Path) -> "Errors":
        """Read them from the record of a finished run."""
        record = records.read(folder)
        assert record.outcome is not None
        images = record.facts["data"]["test"]
        return cls(method, round(record.outcome["figures"]["top1"] * images / 100), images)


def compare_two(baseline: Errors, ours: Errors) -> str:
    """Say how many test images the two methods got wrong.

    Example:
        >>> compare_two(Errors("BN (1 image)", 106, 500), Errors("BCN+WS (1 image)", 3, 500))
        'BN (1 image) gets 106 of 500 test images wrong, BCN+WS (1 image) gets 3 wrong.'
    """
    return (
        f"{baseline.method} gets {baseline.wrong} of {baseline.images} test images wrong, "
        f"{ours.method} gets {ours.wrong} wrong."
    )


def rank_methods(results: Sequence[Errors]) -> str:
    """Say which methods are worse than the best one by more than chance.

    Example:
        >>> rank_methods([Errors("A", 5, 500), Errors("B", 50, 500)])
        'Worse than A by more than chance: B.'
    """
    best, *others = sorted(results, key=lambda result: result.wrong)
    # Wrong answers are rare events: a count varies by its root, a difference of two counts by the root of their sum.
    worse = [r.method for r in others if r.wrong - best.wrong > 2 * math.sqrt(r.wrong + best.wrong)]
    if not worse:
        return "No method is worse than another by more than chance."
    return f"Worse than {best.method} by more than chance: {', '.join(worse)}."


def describe_split(ours: str, difference: float, baseline: str, broken: float, *, steps: int, sizes: str) -> str:
    """Say what splitting the steps changes in our method, and in the baseline.

    Args:
        ours: The method whose result must not depend on the split.
        difference: Its largest difference between split and whole steps.
        baseline: The method to compare it with.
        broken: The baseline's largest difference.
        steps: The number of optimizer steps.
        sizes: The two ways of splitting, such as "64 images at once and 7 at a time".
    """
    if difference <= ROUNDING:
        digits = 15 if difference == 0 else math.floor(-math.log10(difference))
        law = f"{ours} gives the same result for any split: {sizes} agree to {digits} digits after {steps} steps."
    else:  # also if it is NaN
        law = (
            f"{ours} depends on the split: {sizes} differ by {difference:.0e} after {steps} steps, more than rounding "
            "explains. Please run `micronorm doctor` and report it."
        )
    if not math.isfinite(broken):
        return law
    return f"{law} For {baseline} the same split changes weights or statistics by {100 * broken:.0f} %."
