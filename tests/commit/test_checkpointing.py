"""Gradients and estimates are unchanged by activation checkpointing; a commit may fall between forward and backward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import micronorm as mn
from tests.networks import SmallResNet, assert_same_state, samples
from tests.tolerances import tolerance

CUT = (7, 1, 12, 4)


class Checkpointed(nn.Module):
    """A network whose two blocks are recomputed in the backward, in all or some of its forwards."""

    def __init__(self, net, *, reentrant, only_every):
        super().__init__()
        self.net = net
        self.reentrant = reentrant
        self.only_every = only_every
        self.calls = 0

    def forward(self, x):
        net = self.net
        recompute = self.calls % self.only_every == 0
        self.calls += 1

        def run(block, x):
            return checkpoint(block, x, use_reentrant=self.reentrant) if recompute else block(x)

        x = run(net.block1, F.relu(net.norm(net.stem(x))))
        x = run(net.block2, F.relu(net.down_norm(net.down(x))))
        return net.head(x.mean((2, 3)))


def train(model, net, steps=3):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    for k in range(steps):
        x, labels = samples(seed=k)
        optimizer.zero_grad()
        for xs, ys in zip(x.split(CUT), labels.split(CUT), strict=True):
            (F.cross_entropy(model(xs), ys, reduction="sum") / len(x)).backward()
        optimizer.step()
    return net.state_dict() | {f"{n}.grad": p.grad for n, p in net.named_parameters()}


@pytest.mark.parametrize("statistics", ["step", "batch", "sequential"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("only_every", [1, 2], ids=["every forward", "every other forward"])
def test_checkpointing_changes_neither_gradients_nor_estimates(statistics, reentrant, only_every):
    net = SmallResNet(mn.BCN(groups=4, statistics=statistics, rate=0.1), mn.WS()).double()
    twin = copy.deepcopy(net)
    expected = train(net, net)
    model = Checkpointed(twin, reentrant=reentrant, only_every=only_every)
    assert_same_state(train(model, twin), expected, tol=tolerance("one_step", torch.float64))


def tiny(statistics):
    """Small enough to compile in seconds."""
    norms = [mn.nn.BatchChannelNorm(6, 2, statistics=statistics, rate=0.1) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 6, 3), norms[0], nn.ReLU(), nn.Conv2d(6, 6, 1), norms[1], nn.Flatten(2)).double()


class Recomputed(nn.Module):
    def __init__(self, net, reentrant=False):
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=self.reentrant).mean(2)


def assert_compiled_training_agrees(model, net, plain_net):
    for run, owner in ((model, net), (lambda x: plain_net(x).mean(2), plain_net)):
        optimizer = torch.optim.SGD(owner.parameters(), lr=0.02)
        x, labels = samples()
        for part in (x[:12], x[12:]):
            x_in = part.clone().requires_grad_()  # reentrant checkpointing wants an input that requires grad
            (F.cross_entropy(run(x_in), labels[: len(part)], reduction="sum") / len(x)).backward()
        optimizer.step()
    assert_same_state(net.state_dict(), plain_net.state_dict(), tol=tolerance("one_step", torch.float64))


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("statistics", ["step", "batch", "sequential"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_a_compiled_block_changes_nothing(statistics, reentrant):
    net = tiny(statistics)
    twin = copy.deepcopy(net)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert_compiled_training_agrees(Recomputed(compiled, reentrant), net, twin)


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("statistics", ["step", "batch", "sequential"])
def test_checkpointing_inside_a_compiled_region_changes_nothing(statistics):
    net = tiny(statistics)
    twin = copy.deepcopy(net)
    assert_compiled_training_agrees(torch.compile(Recomputed(net), fullgraph=True, backend="aot_eager"), net, twin)


def test_a_sequential_pass_that_cannot_be_told_apart_raises():
    norm = mn.nn.BatchChannelNorm(4, 2, statistics="sequential", rate=0.5).double()
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    # twice the same input, each with estimates of its own
    y = checkpoint(norm, x, use_reentrant=False) + checkpoint(norm, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r'2 of the passes.*statistics="step"'):
        y.sum().backward()


def test_a_sequential_pass_is_not_mistaken_for_another_of_its_shape():
    norm = mn.nn.BatchChannelNorm(4, 2, statistics="sequential", rate=0.5).double()
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    first, second = (torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = checkpoint(norm, first, use_reentrant=False)
    optimizer.step()  # forgets the first pass
    checkpoint(norm, second, use_reentrant=False)
    with pytest.raises(RuntimeError, match="none of the passes"):
        y.sum().backward()


def test_a_sequential_pass_repeated_after_the_step_raises():
    norm = mn.nn.BatchChannelNorm(4, 2, statistics="sequential", rate=0.5).double()
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    y = checkpoint(norm, x, use_reentrant=False)
    optimizer.step()
    with pytest.raises(RuntimeError, match="none of the passes"):
        y.sum().backward()


@pytest.mark.parametrize("statistics", ["step", "batch", "sequential"])
def test_a_commit_between_forward_and_backward_leaves_the_gradient_alone(statistics):
    norm = mn.nn.BatchChannelNorm(4, 2, statistics=statistics, rate=0.5).double()
    handle = mn.attach(norm)
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    g = torch.randn_like(x)
    expected = torch.autograd.grad(copy.deepcopy(norm)(x), x, g)[0]
    y = norm(x)
    handle.commit()
    assert norm.running_mean.any()
    assert torch.equal(torch.autograd.grad(y, x, g)[0], expected)


def test_ema_copies_follow_buffers_and_gather_nothing():
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = nn.Sequential(nn.Conv2d(3, 4, 1), mn.nn.BatchChannelNorm(4, 2, rate=0.5))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.zeros(4)
    for k in range(4):
        model(torch.randn(2, 3, 4, 4)).sum().backward()
        optimizer.step()
        ema.update_parameters(model)
        expected = model[1].running_mean.clone() if k == 0 else 0.5 * expected + 0.5 * model[1].running_mean
    assert torch.allclose(ema.module[1].running_mean, expected)
    assert ema.module[1]._window.forwards == 0
    assert ema.module[1].blend == 1


def test_sync_batch_norm_conversion_goes_around_us():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), mn.nn.BatchChannelNorm(4, 2), nn.BatchNorm2d(4))
    norm = model[1]
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted[1] is norm
    assert isinstance(converted[2], nn.SyncBatchNorm)
