"""What an observer gives out: figures and histograms to a writer, rows to a sink."""

from typing import Any

import torch
from torch import Tensor, nn

import micronorm as mn
from tests.diagnostics.observed import EIGHT, network, take_step


class Pen:
    """A writer that remembers."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}
        self.histograms: dict[tuple[str, int], Tensor] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value

    def add_histogram(self, tag: str, values: Tensor, global_step: int, bins: Any) -> None:
        self.histograms[tag, global_step] = values


def test_a_writer_gets_figures_and_histograms_and_a_sink_the_rows():
    model, pen, rows = network(), Pen(), []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with mn.observe(model, writer=pen, sink=rows.append) as observer:
        observer.epoch = 3
        take_step(model, torch.optim.SGD(model.parameters(), lr=0.1), (4, 4))
    assert observer.rows == []
    assert rows == [observer.latest]
    assert (rows[0]["step"], rows[0]["epoch"]) == (1, 3)
    layers = rows[0]["layers"]
    assert pen.scalars["stat_diff/down_norm", 1] == layers["down_norm"]["stat_diff"]
    assert pen.scalars["weight_along/down", 1] == layers["down"]["along"]
    drawn = pen.histograms["weights/stem", 1]  # 216 weights: all of them
    assert torch.equal(drawn.sort().values, before["stem.weight"].flatten().sort().values)
    assert pen.histograms["channel_means/down_norm", 1].shape == (16,)


def test_histograms_come_with_every_tenth_row():
    model, pen = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), Pen()
    with mn.observe(model, every=2, writer=pen, start=18) as observer:
        for _ in range(6):
            model(torch.randn(4, 3)).sum().backward()
            observer.step()
    assert sorted({step for _, step in pen.scalars}) == [19, 21, 23]
    assert sorted({step for _, step in pen.histograms}) == [21]


def test_numbers_that_are_not_finite_are_told_and_not_drawn():
    model, pen = network("GN"), Pen()
    with torch.no_grad():
        model.stem.weight[0, 0, 0, 0] = float("nan")
    with mn.observe(model, writer=pen) as observer:
        take_step(model, torch.optim.SGD(model.parameters(), lr=0.1), (EIGHT,))
    assert observer.latest is not None
    assert observer.latest["layers"]["norm"]["stat_diff"] != observer.latest["layers"]["norm"]["stat_diff"]
    assert ("weights/stem", 1) not in pen.histograms
