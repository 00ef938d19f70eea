import math

import pytest

from micronorm.cli.findings import Errors, compare_two, describe_split, rank_methods


def results(**wrong: int) -> list[Errors]:
    return [Errors(method, count, 500) for method, count in wrong.items()]


def test_two_methods_are_compared_by_the_images_they_got_wrong():
    assert compare_two(*results(A=106, B=3)) == "A gets 106 of 500 test images wrong, B gets 3 wrong."


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"A": 12, "B": 5, "C": 9}, "No method is worse than another by more than chance."),
        ({"A": 5, "B": 50, "C": 9}, "Worse than A by more than chance: B."),
        ({"A": 40, "B": 5, "C": 50}, "Worse than B by more than chance: A, C."),
        ({"A": 0, "B": 0}, "No method is worse than another by more than chance."),
    ],
)
def test_only_differences_beyond_chance_are_called_worse(wrong, sentence):
    assert rank_methods(results(**wrong)) == sentence


def describe(difference: float, broken: float = 1.25) -> str:
    return describe_split("BCN", difference, "BN", broken, steps=20, sizes="64 images at once and 7 at a time")


@pytest.mark.parametrize("difference, digits", [(7e-15, 14), (1e-10, 10), (0.0, 15)])
def test_a_difference_of_rounding_is_told_as_agreement_in_digits(difference, digits):
    assert describe(difference) == (
        "BCN gives the same result for any split: 64 images at once and 7 at a time agree to "
        f"{digits} digits after 20 steps. For BN the same split changes weights or statistics by 125 %."
    )


@pytest.mark.parametrize("difference", [1.1e-10, 0.5, math.nan, math.inf])
def test_a_larger_difference_is_never_called_the_same_result(difference):
    sentence = describe(difference)
    assert sentence.startswith(
        f"BCN depends on the split: 64 images at once and 7 at a time differ by {difference:.0e}"
    )
    assert "same result" not in sentence


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_baseline_that_diverged_is_left_out(broken):
    assert describe(7e-15, broken).endswith("after 20 steps.")
