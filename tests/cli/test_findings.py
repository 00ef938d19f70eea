import math

import pytest

from micronorm.cli.findings import Errors, describe_baseline, describe_errors, describe_split, name_of
from micronorm.recipes import find


def test_names_say_how_many_images_the_statistics_cover():
    assert name_of(find("digits/bn-64")) == "BatchNorm, 64 at a time"
    assert name_of(find("digits/bcn-ws")) == "BCN + WS, 1 at a time"


@pytest.mark.parametrize("ours, relation", [(3, "about as many as"), (10, "about as many as"), (40, "compared with")])
def test_only_a_difference_within_chance_is_called_about_as_many(ours, relation):
    assert describe_errors(Errors(ours, 500), Errors(106, 500), Errors(4, 500)) == (
        "Trained one image at a time, BatchNorm gets 106 of 500 test images wrong and BCN + WS "
        f"gets {ours}, {relation} BatchNorm with 64 at a time (4)."
    )


@pytest.mark.parametrize("difference, digits", [(7e-15, 14), (1e-10, 10), (0.0, 15)])
def test_a_difference_of_rounding_is_told_as_agreement_in_digits(difference, digits):
    number, sentence = describe_split(difference, steps=20, size=7)
    assert number == f"{digits} digits"
    assert sentence.startswith(
        f"With BCN + WS the weights after 20 steps agree to {digits} digits, whether a step processes its 64 images at "
        "once or 7 at a time."
    )


@pytest.mark.parametrize("difference", [1.1e-10, 0.5, math.nan, math.inf])
def test_a_larger_difference_is_never_called_agreement(difference):
    number, sentence = describe_split(difference, steps=20, size=7)
    assert number == f"{difference:.0e}"
    assert "more than rounding explains" in sentence
    assert "agree" not in sentence


def test_a_baseline_that_diverged_gets_no_percentage():
    assert describe_baseline(1.3).endswith("changes weights or running statistics by 130 %.")
    assert describe_baseline(math.nan) == "With BatchNorm the same split makes the training diverge."
