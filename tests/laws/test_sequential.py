""" "sequential" on N samples is Algorithm 1 run N/m times."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import micronorm as mn
from micronorm.functional import Moments, algorithm1, scan
from tests.networks import SmallResNet, assert_same_state, samples, train
from tests.tolerances import assert_close_to_max, tolerance


class Algorithm1(nn.Module):
    """The layer as Algorithm 1 reads: estimates move with every forward; no window, no hand-written backward."""

    def __init__(self, channels, groups, rate):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.group_weight, self.group_bias = nn.Parameter(torch.ones(groups)), nn.Parameter(torch.zeros(groups))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.groups, self.rate = groups, rate

    def forward(self, x):
        y, moved = algorithm1(
            x,
            Moments(self.running_mean, self.running_var),
            self.rate,
            self.weight,
            self.bias,
            self.group_weight,
            self.group_bias,
            groups=self.groups,
            micro_batch=len(x),
        )
        self.running_mean, self.running_var = moved
        return y


def literal(net):
    """A copy in which every BatchChannelNorm is replaced by the plain loop's layer."""
    net = copy.deepcopy(net)
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, mn.nn.BatchChannelNorm):
                layer = Algorithm1(child.num_channels, child.num_groups, child.rate).to(child.weight.dtype)
                layer.load_state_dict(child.state_dict())
                setattr(parent, name, layer)
    return net


@pytest.mark.parametrize(
    "micro_batch, steps", [(1, 20), (24, 50), *(pytest.param(m, 50, marks=pytest.mark.slow) for m in (1, 2, 5))]
)
def test_batched_steps_equal_algorithm_1_run_on_each_micro_batch(micro_batch, steps):
    spec = mn.BCN(groups=4, statistics="sequential", rate=0.05, micro_batch=micro_batch)
    batched = SmallResNet(spec, mn.WS()).double()
    loop = literal(batched)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9) for net in (batched, loop)]
    for k in range(steps):
        x, labels = samples(seed=k)
        for net, optimizer, size in ((batched, optimizers[0], len(x)), (loop, optimizers[1], micro_batch)):
            optimizer.zero_grad()
            outputs = []
            for part, target in zip(x.split(size), labels.split(size), strict=True):
                outputs.append(net(part))
                (F.cross_entropy(outputs[-1], target, reduction="sum") / len(x)).backward()
            net.outputs = torch.cat(outputs).detach()
        assert_close_to_max(batched.outputs, loop.outputs, tol=1e-10)
        gradients = [{n: p.grad for n, p in net.named_parameters()} for net in (batched, loop)]
        assert_same_state(*gradients, tol=1e-10)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_state(batched.state_dict(), loop.state_dict(), tol=1e-10)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_step_does_not_depend_on_cuts_at_whole_micro_batches(micro_batch):
    spec = mn.BCN(groups=4, statistics="sequential", rate=0.05, micro_batch=micro_batch)
    model = SmallResNet(spec, mn.WS())
    whole = train(model, [24])
    for cut in ([4, 8, 12], [micro_batch] * (24 // micro_batch)):
        assert_same_state(train(model, cut), whole, tol=tolerance("one_step", torch.float64))
    if micro_batch > 1:  # other cuts make other micro-batches
        with pytest.raises(AssertionError, match="relative error"):
            assert_same_state(train(model, [7, 17]), whole, tol=tolerance("one_step", torch.float64))


@given(
    samples=st.integers(1, 9),
    micro_batch=st.integers(1, 10),
    rate=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0])),
    shape=st.sampled_from([(), (3,), (2, 3), (2, 1, 2)]),
    groups=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=40)
def test_one_forward_equals_the_loop_for_any_shape_rate_and_partial_micro_batch(
    samples, micro_batch, rate, shape, groups
):
    layer = mn.nn.BatchChannelNorm(6, groups, statistics="sequential", rate=rate, micro_batch=micro_batch).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_()
    layer._window.warned = True  # groups this small are meant
    x = torch.randn(samples, 6, *shape, dtype=torch.float64, requires_grad=True)
    before = Moments(layer.running_mean.clone(), layer.running_var.clone())
    y = layer(x)
    affine = (layer.weight, layer.bias, layer.group_weight, layer.group_bias)
    expected, moved = algorithm1(x, before, rate, *affine, groups=groups, micro_batch=micro_batch)
    assert_close_to_max(y, expected, tol=1e-12, scale=1.0)
    assert_close_to_max(layer.running_mean, moved.mean, tol=1e-12, scale=1.0)
    assert_close_to_max(layer.running_var, moved.var, tol=1e-12, scale=1.0)
    g = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, (x, *affine), g), torch.autograd.grad(expected, (x, *affine), g), strict=True
    ):
        # eps = 1e-5 under a root: a group without variance multiplies rounding, and gradients, by up to 1/sqrt(eps).
        scale = max(1.0, float(theirs.abs().max()))
        assert_close_to_max(ours, theirs, tol=tolerance("one_step", torch.float64) * 1e3, scale=scale)


def test_the_scan_goes_block_by_block_beyond_256_micro_batches():
    layer = mn.nn.BatchChannelNorm(2, 1, statistics="sequential", rate=0.01).double()
    x = torch.randn(600, 2, 2, 2, dtype=torch.float64) + 3
    expected, moved = algorithm1(
        x, Moments(layer.running_mean.clone(), layer.running_var.clone()), 0.01, *layer.parameters(), groups=1
    )
    assert_close_to_max(layer(x), expected, tol=1e-12)
    assert_close_to_max(layer.running_var, moved.var, tol=1e-12)


@pytest.mark.parametrize("rate", [1e-5, 2e-8])
def test_a_small_learning_rate_in_a_float32_tensor_counts_in_full(rate):
    data = Moments(torch.full((300, 1), 2.0, dtype=torch.float64), torch.zeros(300, 1, dtype=torch.float64))
    start = Moments(torch.zeros(1), torch.ones(1))
    tensor = torch.tensor(rate)
    rows, _ = scan(start, data, rate=tensor, micro_batch=1)
    expected, _ = scan(start, data, rate=tensor.double().item(), micro_batch=1)
    assert_close_to_max(rows.mean[-1], expected.mean[-1], tol=1e-13)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e200])
def test_a_micro_batch_that_is_not_finite_reaches_no_other(bad):
    layer = mn.nn.BatchChannelNorm(2, 1, statistics="sequential", rate=0.1).double()
    x = torch.randn(5, 2, 2, 2, dtype=torch.float64) + 1
    x[3, 0, 0, 0] = bad
    one_by_one = copy.deepcopy(layer)
    y, pieces = layer(x), torch.cat([one_by_one(part) for part in x.split(1)])
    assert torch.equal(y.isfinite(), pieces.isfinite())
    assert y[[0, 1, 2, 4]].isfinite().all()
    assert_close_to_max(y[[0, 1, 2, 4]], pieces[[0, 1, 2, 4]], tol=1e-14)
    assert_close_to_max(layer.running_mean, one_by_one.running_mean, tol=1e-14)
    assert_close_to_max(layer.running_var, one_by_one.running_var, tol=1e-14)
    for net in (layer, one_by_one):
        with pytest.warns(RuntimeWarning, match="1 samples and 0 windows"):
            net.state_dict()


def test_an_unattached_layer_with_rate_lr_raises_and_names_the_ways_out():
    layer = mn.nn.BatchChannelNorm(8, statistics="sequential")
    with pytest.raises(RuntimeError, match=r"mn\.attach.*float rate"):
        layer(torch.randn(2, 8, 4, 4))
    assert layer.eval()(torch.randn(2, 8, 4, 4)).shape == (2, 8, 4, 4)


def test_an_attached_layer_uses_the_learning_rate_of_the_coming_step():
    layer = mn.nn.BatchChannelNorm(8, statistics="sequential")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    mn.attach(layer, optimizer)
    x = torch.randn(1, 8, 4, 4)
    layer(x)
    assert torch.allclose(layer.running_mean, 0.5 * x.mean((0, 2, 3)))
    optimizer.param_groups[0]["lr"] = 0.0
    before = layer.running_mean.clone()
    layer(x)
    assert torch.equal(layer.running_mean, before)
    # load_state_dict replaces the groups; the layer must follow
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 1.0
    optimizer.load_state_dict(saved)
    layer(x)
    assert torch.allclose(layer.running_mean, x.mean((0, 2, 3)), atol=1e-6)
