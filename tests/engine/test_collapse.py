"""A network that collapses at the start is recognized from the losses that are read anyway; a healthy one is not."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import micronorm as mn
from micronorm import records
from micronorm.data.digits import open_digits
from micronorm.engine import SGD, Constant, Execution, Settings, train
from micronorm.records import CollapseWatch, find_collapse
from micronorm.tasks.classification import Classification
from tests.engine.tiny import Heard
from tests.networks import Block

# Losses of real runs (batch 32, SGD with momentum 0.9, digits): the first six, then the medians of the four quarters.
COLLAPSED = {
    "resnet18, GN+WS, lr 0.05": ([2.55, 6.25, 10.1, 11.9, 17.0, 15.9], [17.4, 3.84, 2.41, 2.34]),
    "resnet110, GN+WS, lr 0.1": ([4.83, 7.81, 27.8, 46.2, 42.0, 38.7], [2.37, 2.32, 2.31, 2.30]),
}
HEALTHY = {
    "no jump, hardly any progress in a thousand classes": ([7.0] * 6, [6.95, 6.9, 6.88, 6.86]),
    "a jump, and then progress": ([2.5, 4.0, 9.0, 6.0, 4.0, 3.0], [2.4, 2.1, 1.9, 1.6]),
    "a jump, and then an end": ([2.5, 4.0, 9.0, 6.0, 4.0, 3.0], [1.0, 0.5, 0.5, 0.5]),
}


def losses_of(first, quarters) -> list[float]:
    draw = random.Random(0)
    losses = [level * draw.uniform(0.95, 1.05) for level in quarters for _ in range(25)]
    return [*first, *losses[len(first) :]]


@pytest.mark.parametrize("name", [*COLLAPSED, *HEALTHY])
def test_losses_of_collapsed_networks_are_recognized_and_those_of_healthy_ones_are_not(name):
    losses = losses_of(*{**COLLAPSED, **HEALTHY}[name])
    assert (find_collapse(losses) is not None) == (name in COLLAPSED)


@pytest.mark.parametrize("seed", range(10))
def test_the_losses_of_single_images_raise_no_alarm(seed):
    draw, watch = random.Random(seed), CollapseWatch()
    # The cross entropy of one image, which varies from nearly 0 to several times its mean, and falls slowly.
    losses = [draw.expovariate(1 / (2.3 * 0.9998**step)) for step in range(6400)]
    assert not any(watch.add(loss, samples=1) for loss in losses)


def test_a_collapse_after_a_warm_up_is_recognized_too():
    watch = CollapseWatch()
    learning = [2.4 * 0.99**step for step in range(130)]
    found = [watch.add(loss, samples=64) for loss in [*learning, 20.0, 9.0, *[2.3] * 268]]
    assert [step + 1 for step, text in enumerate(found) if text] == [200]


class Network(nn.Module):
    """Four residual blocks with GroupNorm and WS, whose branches are large at the start unless `zero`."""

    def __init__(self, *, zero: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight, norm = mn.WS(), mn.GN(groups=4)
        self.stem = nn.Sequential(weight(nn.Conv2d(1, 32, 3, padding=1)), norm(32))
        self.blocks = nn.Sequential(*(Block(32, norm, weight, F.relu) for _ in range(4)))
        for block in self.blocks if zero else ():
            nn.init.zeros_(block.norm2.weight)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def trained(out, *, lr: float, zero: bool = False, stops: tuple[int, ...] = ()) -> list[str]:
    """The messages of a run of 110 steps that is stopped and resumed at some of them."""
    task, heard = Classification(*open_digits(), classes=10), Heard()
    settings = Settings(steps=110, step_batch=32, optimizer=SGD(lr), schedule=Constant())
    for stop in (*stops, None):
        execution = Execution(device=torch.device("cpu"), steps=stop, evaluate_epochs=9)
        train(Network(zero=zero), task, settings, execution, out=out, resume=out.exists(), listener=heard)
    return heard.messages


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(), (50, 105)], ids=["in one go", "resumed"])
def test_a_network_that_collapses_is_recognized_once_and_the_record_says_so(tmp_path, stops):
    (said,) = trained(tmp_path / "run", lr=1.0, stops=stops)
    assert said.startswith("the network collapsed: its loss rose from 2.4")
    assert "zero_init_residual=True" in said
    assert records.read(tmp_path / "run").facts["collapse"] == said


@pytest.mark.slow
@pytest.mark.parametrize("zero", [True, False], ids=["from zero", "from a jump"])
def test_a_network_that_learns_after_a_rough_start_is_not_taken_for_collapsed(tmp_path, zero):
    assert trained(tmp_path / "run", lr=0.3, zero=zero) == []
    steps = records.read(tmp_path / "run").steps
    assert max(row["loss"] for row in steps) > 1.3 * steps[0]["loss"]
    assert "collapse" not in records.read(tmp_path / "run").facts
