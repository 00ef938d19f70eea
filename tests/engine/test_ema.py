"""The moving average of a run: that of its weights and estimates, evaluated, saved, and resumed to the same bytes."""

import copy

import safetensors.torch
import torch

import micronorm as mn
from micronorm.engine import journal
from micronorm.engine.ema import MovingAverage
from micronorm.engine.loop import train
from micronorm.engine.settings import Execution
from tests.engine.tasks import CPU, Toy, make_step, settings, state_digest, step_inputs
from tests.engine.test_resume import kill_at
from tests.engine.tiny import run, tiny_model
from tests.networks import SmallResNet

DECAY = 0.5


def test_weights_and_estimates_are_averaged_after_each_step():
    step = make_step(SmallResNet(mn.BCN(groups=2), channels=4), task := Toy(), 8)
    average = MovingAverage(step, DECAY)
    expected = copy.deepcopy(step.model.state_dict())
    for first in (0, 8):
        step(step_inputs(task, torch.arange(first, first + 8)))
        average.update()
        for name, value in step.model.state_dict().items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * value
    assert average.state_dict().keys() == expected.keys()
    assert any("running_mean" in name for name in expected)
    for name, value in average.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14)


def test_the_model_has_the_average_within_the_block_and_its_own_values_after_it():
    step = make_step(SmallResNet(mn.BN(), channels=4), task := Toy(), 8)
    average = MovingAverage(step, DECAY)
    step(step_inputs(task, torch.arange(8)))
    average.update()
    before, kept = state_digest(step), average.state_dict()
    with average.applied():
        assert all(torch.equal(value, kept[name]) for name, value in step.model.state_dict().items())
        assert state_digest(step) != before
    assert state_digest(step) == before
    again = MovingAverage(step, DECAY)
    again.load_state_dict(kept)
    assert all(torch.equal(value, kept[name]) for name, value in again.state_dict().items())


def test_the_average_is_evaluated_and_changes_nothing_else():
    outcomes, models = [], []
    for ema in (None, DECAY):
        torch.manual_seed(0)
        models.append(SmallResNet(mn.BCN(groups=2), channels=4))
        outcomes.append(train(models[-1], Toy(), settings(ema=ema), Execution(device=CPU)))
    plain, averaged = (outcome.figures for outcome in outcomes)
    assert averaged.keys() == plain.keys() | {f"ema_{name}" for name in plain}
    assert {name: averaged[name] for name in plain} == plain
    assert averaged["ema_loss"] != plain["loss"]
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in models), strict=True))


def test_a_killed_run_is_resumed_to_the_same_average(tmp_path):
    expected = run(tmp_path / "whole", ema=DECAY)
    kill_at(5, tmp_path / "killed", ema=DECAY)
    assert run(tmp_path / "killed", ema=DECAY, resume=True).digest == expected.digest
    whole, killed = ((tmp_path / name / journal.AVERAGE).read_bytes() for name in ("whole", "killed"))
    assert whole == killed
    average, model = (
        safetensors.torch.load_file(tmp_path / "whole" / name) for name in (journal.AVERAGE, journal.WEIGHTS)
    )
    assert average.keys() == model.keys()
    assert run(None).digest != expected.digest


def test_the_average_of_a_blend_goes_on_after_a_resume(tmp_path):
    def warmed():
        model = tiny_model()
        model[1].warm(4)
        return model

    expected = run(None, model=warmed(), ema=DECAY)
    kill_at(5, tmp_path, model=warmed(), ema=DECAY)
    assert run(tmp_path, model=warmed(), ema=DECAY, resume=True).digest == expected.digest
