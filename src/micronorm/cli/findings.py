"""What the demo's figures show and what they do not, in sentences that follow from the figures alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from micronorm import records

AS_ROUNDING = 10.0
"""Times the control's difference, up to which another cut's is like it. float32 runs part in jumps, whenever rounding
turns a ReLU on or off: of three seeds after one epoch the factor was 13, 1 and 0.1."""


@dataclass(frozen=True)
class Result:
    """What one run came to."""

    method: str
    wrong: int
    images: int

    @classmethod
    def read(cls, method: str, folder: Path) -> "Result":
        """From the record of a finished run."""
        record = records.read(folder)
        assert record.outcome is not None
        images = record.facts["data"]["test"]
        return cls(method, round(record.outcome["figures"]["top1"] * images / 100), images)


@dataclass(frozen=True)
class Repeated:
    """One run trained again: in micro-batches of `size`, and begun one unit in the last place apart as a control.

    `cut` and `control` hold how far they were from the first run after `steps`.
    """

    method: str
    size: int
    steps: Sequence[int]
    cut: Sequence[float]
    control: Sequence[float]
    cut_error: float
    control_error: float


def compare_methods(results: Sequence[Result]) -> list[str]:
    """Which methods are told apart by their test errors.

    Example:
        >>> compare_methods([Result("A", 5, 500), Result("B", 50, 500)])[1]
        'The choice of test images alone moves ... by up to about 2·sqrt(a+b): B did worse than A by more than that.'
    """
    counts = {result.method: result.wrong for result in results}
    images = results[0].images
    ranked = sorted(counts, key=lambda method: counts[method])
    best = counts[ranked[0]]
    # Wrong answers are rare events: a count varies by its root, a difference of two counts by the root of their sum.
    behind = [method for method in ranked if counts[method] - best > 2 * math.sqrt(counts[method] + best)]
    rest = [method for method in ranked if method not in behind]
    if behind:
        apart = f"{_and(behind)} did worse than {ranked[0]} by more than that"
        apart += f"; {_and(rest)} are not told apart." if len(rest) > 1 else "."
    else:
        apart = "no two methods here are further apart than that."
    return [
        f"Wrong of {images} test images: {', '.join(f'{method}: {counts[method]}' for method in ranked)}. One image is "
        f"{100 / images:.1f} points.",
        f"The choice of test images alone moves the difference of counts a and b by up to about 2·sqrt(a+b): {apart}",
        "More it does not show: the data set is small, one seed is few, and one setting serves all methods.",
    ]


def describe_single_steps(differences: Mapping[str, float], *, broken: str) -> str:
    """What one step image by image does to each method; `broken` is the one that depends on the cut."""
    kept = ", ".join(f"{method}: {value:.1e}" for method, value in differences.items() if method != broken)
    return (
        "One step image by image against the same step whole, largest relative difference of parameters and running "
        f"estimates (float32): {kept}; for comparison {broken}, nn.BatchNorm2d, which depends on the cut: "
        f"{differences[broken]:.1e}."
    )


def describe_wide(difference: float, *, method: str, steps: int, size: int) -> str:
    """The comparison in float64."""
    return f"{method} in float64, {steps} steps in micro-batches of {size} against whole: {difference:.1e} apart."


def compare_cuts(repeated: Repeated) -> str:
    """Whether the run that was cut differently ended further away than rounding takes a run.

    Example:
        >>> compare_cuts(Repeated("A", 7, [1, 315], [1e-6, 0.02], [1e-6, 0.01], 1.8, 2.0)).split(": ")[-1]
        'the cut did no more than rounding does.'
    """
    cut, control = repeated.cut[-1], repeated.control[-1]
    if not math.isfinite(cut + control):
        verdict = "training has diverged, and nothing can be said of the cut."
    elif cut <= AS_ROUNDING * control:
        verdict = "the cut did no more than rounding does."
    else:
        verdict = (
            f"the cut went more than {AS_ROUNDING:g} times as far. One control does not show how far rounding may go; "
            "the comparison in float64 has next to none."
        )
    return (
        f"{repeated.method} trained again in micro-batches of {repeated.size} instead of whole steps: {cut:.1e} apart "
        f"in the end ({repeated.cut[0]:.1e} after the first step), {repeated.cut_error:.2f} % test error. float32 "
        "training amplifies rounding: a control, not cut but begun with every parameter one unit in the last place "
        f"higher, ended {control:.1e} apart ({repeated.control[0]:.1e} after the first step), with "
        f"{repeated.control_error:.2f} %: {verdict}"
    )


def _and(names: Sequence[str]) -> str:
    *front, last = names
    return f"{', '.join(front)} and {last}" if front else last
