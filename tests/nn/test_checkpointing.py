import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from micronorm.nn.batch import GhostBatchNorm
from micronorm.nn.checkpointing import inside_backward
from micronorm.nn.switchable import SwitchableNorm


class Witness(nn.Module):
    """Notes at each forward whether it runs inside a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(inside_backward())
        return x.exp().sin()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_only_the_repeated_forward_runs_inside_a_backward_pass(use_reentrant):
    witness = Witness()
    y = checkpoint(witness, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant)
    assert isinstance(y, Tensor)
    y.sum().backward()
    witness(torch.ones(2))
    assert witness.seen == [False, True, False]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    "norm", [GhostBatchNorm(3, micro_batch=2), SwitchableNorm(3)], ids=lambda norm: type(norm).__name__
)
def test_a_repeated_forward_moves_no_statistics(norm, use_reentrant, compiled):
    plain, checkpointed = copy.deepcopy(norm), copy.deepcopy(norm)
    repeated = torch.compile(checkpointed, fullgraph=True, backend="aot_eager") if compiled else checkpointed
    for _ in range(2):
        x = torch.randn(3, 3, 2, 2, requires_grad=True)
        y = checkpoint(repeated, x, use_reentrant=use_reentrant)
        assert isinstance(y, Tensor)
        y.sum().backward()
        plain(x)
    torch.testing.assert_close(dict(checkpointed.named_buffers()), dict(plain.named_buffers()))
    assert checkpointed.num_batches_tracked > 0
