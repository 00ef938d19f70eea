"""Small networks, observed steps of them, and a comparison of two rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import micronorm as mn
from tests.networks import SmallResNet, samples
from tests.tolerances import assert_close_to_max

EIGHT = 8
NORMS = {"BCN": mn.BCN(groups=4), "GN": mn.GN(groups=4), "LN": mn.LN(), "IN": mn.IN(), "BN": mn.BN()}


def network(norm: str = "BCN", weight: Any = None, *, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return SmallResNet(NORMS[norm], weight or mn.WS()).to(dtype).train()


def fused_network(norm: str) -> nn.Module:
    """Converted, so that norms compute the additions and activations that follow them."""
    torch.manual_seed(0)
    plain = SmallResNet(lambda channels: nn.BatchNorm2d(channels)).double()
    return mn.convert(plain, norm=NORMS[norm]).train()


def take_step(model: nn.Module, optimizer: Any, cuts: Sequence[int], *, forward: Callable[..., Tensor] | None = None):
    images, labels = samples(count=EIGHT)
    images = images.to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    for x, y in zip(images.split(list(cuts)), labels.split(list(cuts)), strict=True):
        logits = model(x) if forward is None else forward(x)
        (F.cross_entropy(logits, y, reduction="sum") / EIGHT).backward()
    optimizer.step()


def observed_layers(model: nn.Module, cuts: Sequence[int] = (EIGHT,), **options: Any) -> dict[str, Any]:
    """Return the layers of one observed step."""
    with mn.observe(model) as observer:
        take_step(model, torch.optim.SGD(model.parameters(), lr=0.1), cuts, **options)
    assert observer.latest is not None
    return observer.latest["layers"]


def assert_same_figures(actual: dict[str, Any], expected: dict[str, Any], *, tol: float) -> None:
    """Figures are compared over all layers at once: one that cancelled in one of them has no digits there."""
    assert list(actual) == list(expected)
    by_figure: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for name, row in expected.items():
        assert actual[name].keys() == row.keys()
        for figure, value in row.items():
            if isinstance(value, float):
                by_figure.setdefault((row["kind"], figure), []).append((actual[name][figure], value))
            else:
                assert actual[name][figure] == value, (name, figure)
    for (_, figure), pairs in by_figure.items():
        ours, theirs = torch.tensor(pairs, dtype=torch.float64).unbind(1)
        # Shares are of one, and sigmas the spread of numbers near one: what cancelled there has no digits of its own.
        of_one = figure in ("along", "mean", "rest", "residual", "sigma_mean", "sigma_std")
        assert_close_to_max(ours, theirs, tol=tol, scale=1.0 if of_one else None)
