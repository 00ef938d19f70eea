import math
import signal

import pytest
import torch

from micronorm.cli.demo import (
    describe_baseline,
    describe_errors,
    describe_split,
    largest_difference,
    name_of,
    run,
    split_difference,
)
from micronorm.engine.settings import Execution
from micronorm.engine.task import Listener
from micronorm.recipes import find, find_table
from micronorm.recipes.digits import STEP_BATCH
from micronorm.recipes.run import Variation
from tests.cli.few import keep_few_digits
from tests.tolerances import tolerance

SPLIT_FREE = [recipe for recipe in find_table("digits").rows if recipe.row != "bn-64"]


@pytest.fixture(autouse=True)
def few(monkeypatch) -> None:
    keep_few_digits(monkeypatch)


@pytest.mark.parametrize("recipe", SPLIT_FREE, ids=lambda recipe: recipe.row)
def test_a_step_does_not_depend_on_how_its_samples_were_split(recipe):
    difference = split_difference(recipe, Variation(epochs=1, seed=0), micro_batch=1, steps=1)
    assert 0 < difference < tolerance("one_step", torch.float64)


def test_a_norm_over_the_whole_batch_depends_on_the_split():
    # This shows that a difference near zero is a property of the method and not of the measurement.
    # 64 forward passes move running statistics by 1 − 0.9⁶⁴ instead of 0.1. The count of forward passes would give 63.
    assert 1 < split_difference(find("digits/bn-64"), Variation(epochs=1, seed=0), micro_batch=1, steps=1) < 20


def test_a_run_that_is_not_split_gives_the_same_bits_again():
    assert split_difference(find("digits"), Variation(epochs=1, seed=3), micro_batch=STEP_BATCH, steps=2) == 0.0


def test_a_difference_is_relative_to_the_maximum_of_its_tensor_and_the_largest_counts():
    expected = {"small": torch.tensor([0.0, 0.01]), "large": torch.tensor([100.0, 1.0])}
    actual = {"small": torch.tensor([0.001, 0.01]), "large": torch.tensor([101.0, 1.0])}
    assert largest_difference(actual, expected) == pytest.approx(0.1)
    assert largest_difference(expected, expected) == 0.0


def test_a_tensor_of_zeros_or_nans_never_gives_a_small_difference():
    zero, moved, broken = ({"first": torch.tensor(first), "then": torch.ones(2)} for first in (0.0, 0.5, torch.nan))
    assert largest_difference(zero, zero) == 0.0
    assert largest_difference(moved, zero) == math.inf
    assert math.isnan(largest_difference(broken, moved))


def test_a_signal_ends_the_run_after_its_step():
    class Press(Listener):
        steps = 0

        def on_step(self, row):
            self.steps += 1
            if self.steps == 1:
                signal.raise_signal(signal.SIGINT)

    press = Press()
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(find("digits/gn"), Variation(epochs=2, seed=0), Execution(), listener=press)
    assert stopped.value.args == (signal.SIGINT,)
    assert press.steps == 2  # the signal is handled after the next step


def test_a_given_model_is_trained_in_place():
    model = find("digits/gn").build(seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run(find("digits/gn"), Variation(epochs=1), Execution(), model=model)
    assert largest_difference(model.state_dict(), before) > 1e-3


def test_names_say_how_many_images_the_statistics_cover():
    assert name_of(find("digits/bn-64")) == "BatchNorm, 64 at a time"
    assert name_of(find("digits/bcn-ws")) == "BCN + WS, 1 at a time"


@pytest.mark.parametrize("ours, relation", [(3, "about as many as"), (10, "about as many as"), (40, "compared with")])
def test_only_a_difference_within_chance_is_called_about_as_many(ours, relation):
    assert describe_errors(ours, 106, 4, 500) == (
        "Trained one image at a time, BatchNorm gets 106 of 500 test images wrong and BCN + WS "
        f"gets {ours}, {relation} BatchNorm with 64 at a time (4)."
    )


@pytest.mark.parametrize("difference, digits", [(7e-15, 14), (1e-10, 10), (0.0, 15)])
def test_a_difference_of_rounding_is_told_as_agreement_in_digits(difference, digits):
    number, sentence = describe_split(difference)
    assert number == f"{digits} digits"
    assert sentence.startswith(
        f"With BCN + WS the weights after 20 steps agree to {digits} digits, whether a step processes its 64 images at "
        "once or 7 at a time."
    )


@pytest.mark.parametrize("difference", [1.1e-10, 0.5, math.nan, math.inf])
def test_a_larger_difference_is_never_called_agreement(difference):
    number, sentence = describe_split(difference)
    assert number == f"{difference:.0e}"
    assert "more than rounding explains" in sentence
    assert "agree" not in sentence


def test_a_baseline_that_diverged_gets_no_percentage():
    assert describe_baseline(1.3).endswith("changes weights or running statistics by 130 %.")
    assert describe_baseline(math.nan) == "With BatchNorm the same split makes the training diverge."
