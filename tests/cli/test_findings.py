import math

import pytest

from micronorm.cli.findings import (
    Repeated,
    Result,
    compare_cuts,
    compare_methods,
    describe_single_steps,
    describe_wide,
)


def results(**wrong: int) -> list[Result]:
    return [Result(method, count, 500) for method, count in wrong.items()]


def test_the_findings_order_the_methods_as_they_came_out():
    assert compare_methods(results(A=12, B=5, C=9))[0] == (
        "Wrong of 500 test images: B: 5, C: 9, A: 12. One image is 0.2 points."
    )


@pytest.mark.parametrize(
    "wrong, verdict",
    [
        ({"A": 12, "B": 5, "C": 9}, ": no two methods here are further apart than that."),
        ({"A": 5, "B": 50, "C": 9}, ": B did worse than A by more than that; A and C are not told apart."),
        ({"A": 40, "B": 5, "C": 50}, ": A and C did worse than B by more than that."),
        ({"A": 5, "B": 6, "C": 7, "D": 99}, ": D did worse than A by more than that; A, B and C are not told apart."),
        ({"A": 0, "B": 0}, ": no two methods here are further apart than that."),
    ],
)
def test_the_findings_say_which_differences_are_beyond_chance(wrong, verdict):
    assert compare_methods(results(**wrong))[1].endswith(verdict)


def test_the_findings_say_what_they_do_not_show():
    assert "one seed is few" in compare_methods(results(A=5, B=6))[2]


def repeated(*, cut: float, control: float) -> Repeated:
    return Repeated("BCN+WS at 1", 7, [1, 315], [1e-6, cut], [1e-7, control], cut_error=1.8, control_error=2.2)


@pytest.mark.parametrize("cut", [0.0, 0.01, 0.1])
def test_a_cut_that_ends_as_near_as_the_control_did_no_more_than_rounding(cut):
    sentence = compare_cuts(repeated(cut=cut, control=0.01))
    assert f"in micro-batches of 7 instead of whole steps: {cut:.1e} apart in the end" in sentence
    assert "(1.0e-06 after the first step), 1.80 % test error." in sentence
    assert "ended 1.0e-02 apart (1.0e-07 after the first step), with 2.20 %: the cut did no more than" in sentence


@pytest.mark.parametrize("cut, control", [(0.11, 0.01), (1e-3, 0.0)])
def test_a_cut_that_ends_much_further_away_is_not_passed_off_as_rounding(cut, control):
    sentence = compare_cuts(repeated(cut=cut, control=control))
    assert "the cut went more than 10 times as far" in sentence
    assert "no more than rounding" not in sentence


@pytest.mark.parametrize("cut, control", [(math.nan, 0.01), (0.01, math.nan), (math.nan, math.nan)])
def test_of_runs_that_diverged_nothing_is_said(cut, control):
    assert compare_cuts(repeated(cut=cut, control=control)).endswith("nothing can be said of the cut.")


def test_the_method_that_depends_on_the_cut_stands_apart():
    sentence = describe_single_steps({"BN at 64": 10.0, "GN at 1": 1e-6, "BCN at 1": 2e-6}, broken="BN at 64")
    assert "(float32): GN at 1: 1.0e-06, BCN at 1: 2.0e-06; for comparison BN at 64" in sentence
    assert sentence.endswith("which depends on the cut: 1.0e+01.")


def test_the_comparison_in_float64_says_how_long_it_was():
    assert describe_wide(3e-15, method="BCN+WS at 1", steps=20, size=7) == (
        "BCN+WS at 1 in float64, 20 steps in micro-batches of 7 against whole: 3.0e-15 apart."
    )
