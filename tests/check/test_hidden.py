"""Faults that once hid: behind a rounding allowance, half precision, hooks of parameters, state that is no buffer."""

import pytest
import torch
from torch import Tensor, nn

import micronorm as mn
from tests.check.parts import images, summed


class Mixing(nn.Module):
    """Mixes samples, then lets `after` hide it."""

    def __init__(self, after: nn.Module, *, share: float = 0.3) -> None:
        super().__init__()
        self.share, self.after = share, after
        self.first, self.head = nn.Linear(3 * 8 * 8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1))
        return self.head(self.after(h - self.share * h.mean(0)))


class HardGate(nn.Module):
    """A decision on parameters that start at zero: 5e-324 would turn it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8, bias=False)
        nn.init.zeros_(self.gate.weight)

    def forward(self, h: Tensor) -> Tensor:
        return h * (1 + (self.gate(h) > 0).to(h.dtype))


class ThroughHalf(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * torch.ones(1).to(torch.bfloat16).double()


@pytest.mark.parametrize("after", [HardGate, ThroughHalf])
def test_mixing_is_found_whatever_comes_after(after):
    batch = images(4, 8)
    assert not mn.check_cuts(Mixing(after()), batch, summed)
    assert mn.check_cuts(Mixing(after(), share=0.0), batch, summed)


def test_a_gradient_clipped_by_a_hook_of_its_parameter_is_found():
    model = Mixing(nn.Identity(), share=0.0)
    model.head.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    assert not mn.check_cuts(model, images(4, 8), summed)


class Remembering(nn.Module):
    """A mean that moves with each forward, kept where no buffer is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.mean = nn.Parameter(torch.zeros(8), requires_grad=False) if kind == "parameter" else torch.zeros(8)

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            moved = 0.9 * self.mean + 0.1 * h.mean(0)
            if self.kind == "parameter":
                self.mean.copy_(moved)
            else:
                self.mean = moved
        return h


@pytest.mark.parametrize("kind", ["parameter", "attribute"])
def test_state_that_is_no_buffer_is_compared(kind):
    report = mn.check_cuts(Mixing(Remembering(kind), share=0.0), images(4, 8), summed)
    assert not report
    assert report.findings[0].where == "after"


def test_sparse_gradients_and_complex_parameters_are_compared():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.turn = nn.Embedding(5, 8, sparse=True), nn.Parameter(torch.randn(8, dtype=torch.complex64))
            self.head = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            index = (x.flatten(1)[:, :1] > 0).long().squeeze(1)
            return self.head((self.words(index) * self.turn).real)

    assert mn.check_cuts(Odd(), images(4, 8), summed)
