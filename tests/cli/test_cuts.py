import math
import signal

import pytest
import torch

from micronorm.cli import train as train_command
from micronorm.cli.cuts import Stopped, cut_difference, difference, nudge, run, state_of
from micronorm.engine.listener import Listener
from micronorm.recipes import find, find_table
from micronorm.recipes.digits import STEP_BATCH
from micronorm.recipes.run import Variation
from tests.cli.few import keep_few_digits
from tests.tolerances import tolerance

CUT_FREE = [recipe for recipe in find_table("digits").rows if recipe.row != "bn-64"]


@pytest.fixture(autouse=True)
def few(monkeypatch) -> None:
    keep_few_digits(monkeypatch)


@pytest.mark.parametrize("recipe", CUT_FREE, ids=lambda recipe: recipe.row)
def test_a_step_does_not_depend_on_how_its_samples_were_cut(recipe):
    apart = cut_difference(recipe, Variation(epochs=1, seed=0), micro_batch=1, dtype="float64")
    assert 0 < apart < tolerance("one_step", torch.float64)


def test_a_norm_that_sees_the_whole_batch_breaks_that_law():
    # So a difference near zero is a property of the methods, not of the measurement.
    # 64 forwards move running statistics 1 − 0.9⁶⁴ against 0.1: ten times as far. The count of forwards would give 63.
    assert 1 < cut_difference(find("digits/bn-64"), Variation(epochs=1, seed=0), micro_batch=1) < 20


def test_a_run_that_is_not_cut_ends_where_it_ended_before():
    assert cut_difference(find("digits"), Variation(epochs=1, seed=3), micro_batch=STEP_BATCH, steps=2) == 0.0


def test_a_difference_is_relative_to_the_maximum_of_its_tensor_and_the_largest_counts():
    expected = {"small": torch.tensor([0.0, 0.01]), "large": torch.tensor([100.0, 1.0])}
    ended = {"small": torch.tensor([0.001, 0.01]), "large": torch.tensor([101.0, 1.0])}
    assert difference(ended, expected) == pytest.approx(0.1)
    assert difference(expected, expected) == 0.0


def test_what_cannot_be_compared_is_no_small_difference():
    zero, moved, broken = ({"first": torch.tensor(first), "then": torch.ones(2)} for first in (0.0, 0.5, torch.nan))
    assert difference(zero, zero) == 0.0
    assert difference(moved, zero) == math.inf
    assert math.isnan(difference(broken, moved))


def test_nudged_parameters_are_one_unit_in_the_last_place_higher():
    before = find("digits").build(seed=0)
    after = nudge(find("digits").build(seed=0))
    for old, new in zip(before.parameters(), after.parameters(), strict=True):
        assert (new > old).all()
        assert torch.equal(torch.nextafter(new, torch.full_like(new, -torch.inf)), old)


def test_a_state_is_a_copy_without_counters():
    model = find("digits/bn-64").build(seed=0)
    state = state_of(model)
    assert "norm.running_var" in state
    assert not [name for name in state if name.endswith("num_batches_tracked")]
    nudge(model)
    assert not torch.equal(state["norm.weight"], model.state_dict()["norm.weight"])


def test_a_signal_ends_the_run_after_its_step():
    class Press(Listener):
        steps = 0

        def on_step(self, row):
            self.steps += 1
            if self.steps == 1:
                signal.raise_signal(signal.SIGINT)

    press = Press()
    with pytest.raises(Stopped) as stopped:
        run(find("digits/gn"), Variation(epochs=2, seed=0), listener=press)
    assert stopped.value.number == signal.SIGINT
    assert press.steps == 2  # the wish of one step is granted after the next


def test_a_model_that_is_given_is_trained_in_place():
    model = find("digits/gn").build(seed=0)
    before = state_of(model)
    train_command.run_recipe(find("digits/gn"), out=None, variation=Variation(epochs=1), model=model)
    assert difference(state_of(model), before) > 1e-3
