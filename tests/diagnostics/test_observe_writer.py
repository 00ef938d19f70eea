"""What an observer gives out: figures to a writer, rows to a sink."""

import torch

import micronorm as mn
from tests.diagnostics.observed import EIGHT, network, take_step


class Pen:
    """A writer that remembers."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value


def test_a_writer_gets_figures_and_a_sink_the_rows():
    model, pen, rows = network(), Pen(), []
    with mn.observe(model, writer=pen, sink=rows.append) as observer:
        observer.epoch = 3
        take_step(model, torch.optim.SGD(model.parameters(), lr=0.1), (4, 4))
    assert observer.rows == []
    assert rows == [observer.latest]
    assert (rows[0]["step"], rows[0]["epoch"]) == (1, 3)
    layers = rows[0]["layers"]
    assert pen.scalars["stat_diff/down_norm", 1] == layers["down_norm"]["stat_diff"]
    assert pen.scalars["weight_along/down", 1] == layers["down"]["along"]


def test_numbers_that_are_not_finite_are_written():
    model, pen = network("GN"), Pen()
    with torch.no_grad():
        model.stem.weight[0, 0, 0, 0] = float("nan")
    with mn.observe(model, writer=pen) as observer:
        take_step(model, torch.optim.SGD(model.parameters(), lr=0.1), (EIGHT,))
    assert observer.latest is not None
    assert observer.latest["layers"]["norm"]["stat_diff"] != observer.latest["layers"]["norm"]["stat_diff"]
    written = pen.scalars["stat_diff/norm", 1]
    assert written != written
