"""The score of a model: the same however it is cut up, and without a trace in the model."""

import copy

import pytest
import torch

import micronorm as mn
from micronorm.engine.evaluate import evaluate
from tests.engine.tasks import FailAt, Toy, Zoo, make_step, state_digest, step_inputs
from tests.networks import SmallResNet


@pytest.fixture
def step():
    """A step whose estimates have moved."""
    step = make_step(SmallResNet(mn.BCN(groups=4)), task := Toy(test=11), 8)
    step(step_inputs(task, torch.arange(24)))
    return step


def by_hand(step):
    model, test = copy.deepcopy(step.model).eval(), step.task.test
    with torch.no_grad():
        loss = step.task.loss(model, next(iter(test.load([(0, torch.arange(len(test)))], seed=0))))
    return {"loss": loss.sum.item() / len(test), "top1": 100 * loss.counts["wrong"].item() / len(test)}


@pytest.mark.parametrize("chunk", [1, 4, 11, 256])
def test_the_figures_are_those_of_all_samples_at_once(step, chunk, monkeypatch):
    monkeypatch.setattr(Toy, "evaluation_batch", chunk)
    figures = evaluate(step, seed=0)
    assert [i for _, indices in step.task.test.asked for i in indices] == list(range(11))
    assert figures == pytest.approx(by_hand(step), rel=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_no_trace(training):
    step = make_step(Zoo(), Toy(), 8)
    step.model.train(training)
    before = state_digest(step)
    evaluate(step, seed=0)
    assert state_digest(step) == before
    assert all(module.training is training for module in step.model.modules())


class Cramped(Toy):
    """Has no memory for more than `room` samples."""

    room = 3

    def score(self, model, batch):
        if len(batch[1]) > self.room:
            raise torch.OutOfMemoryError("injected")
        return super().score(model, batch)


@pytest.mark.slow
def test_chunks_are_halved_until_they_fit(step):
    expected = by_hand(step)
    step.task = Cramped(test=11)
    assert evaluate(step, seed=0) == pytest.approx(expected, rel=1e-12)
    assert step.model.training


@pytest.mark.slow
def test_a_sample_that_does_not_fit_ends_in_an_error_that_says_so(step):
    step.task = Cramped()
    step.task.room = 0
    with pytest.raises(MemoryError, match="out of memory in evaluating a single sample"):
        evaluate(step, seed=0)
    assert step.model.training


def test_another_error_is_raised_as_it_is(step):
    with FailAt(30, KeyError("a column")), pytest.raises(KeyError, match="a column"):
        evaluate(step, seed=0)
    assert step.model.training


def test_half_types_evaluate_as_they_train(step):
    exact = evaluate(step, seed=0)
    half = evaluate(make_step(step.model, step.task, 8, dtype=torch.bfloat16), seed=0)
    assert half["loss"] != exact["loss"]
    assert half["loss"] == pytest.approx(exact["loss"], rel=8 * torch.finfo(torch.bfloat16).eps)
