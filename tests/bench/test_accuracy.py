"""A layer that computes something else than the equations gets no time."""

import pytest
import torch
from torch import nn

from micronorm.bench.cases import LAYOUTS, OURS, Case, lay_out
from micronorm.bench.measure import (
    BenchSettings,
    Contestant,
    WrongResult,
    deviations,
    find_norm,
    measure,
    randomize_state,
    tolerance,
)
from micronorm.nn import BatchChannelNorm, bcn
from micronorm.ops.bcn import onepass
from tests import tolerances
from tests.devices import require_kernels

CPU = torch.device("cpu")
SHAPE = (4, 12, 5, 6)


def settings(dtype: torch.dtype = torch.float32) -> BenchSettings:
    return BenchSettings(CPU, dtype, ("eager",), 2)


def draw(dtype: torch.dtype, layout: str = "nchw", shape=SHAPE) -> torch.Tensor:
    return lay_out(torch.randn(shape).to(dtype), layout)


HALF = [(method, dtype) for method in OURS for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("method, dtype", [*((m, torch.float32) for m in OURS), *HALF])
def test_every_form_of_ours_passes_in_every_mode_and_dtype(method, dtype):
    contestant = Contestant(method, Case(SHAPE, ""), settings(dtype))
    for layout in LAYOUTS:
        assert 0 <= contestant.check(draw(dtype, layout)) <= 1


@pytest.mark.parametrize("shape", [(16, 1024), (3, 8, 9), (2, 8, 3, 4, 5), (8, 1, 4, 8), (3, 2, 5, 7)])
def test_ranks_two_to_five_and_single_channels_pass(shape):
    for method in OURS:
        assert Contestant(method, Case(shape, ""), settings()).check(draw(torch.float32, shape=shape)) <= 1


def wrong_output(y):
    return y * (1 + 1e-4)


def wrong_gradient(y):
    return y.detach() + 1.001 * (y - y.detach())


def no_number(y):
    return torch.where(y == y.max(), torch.nan, y)


@pytest.mark.parametrize(
    "damage, named",
    [(wrong_output, "output is"), (wrong_gradient, "input gradient is"), (no_number, "output is nan")],
)
def test_a_wrong_contestant_is_named_with_its_error_and_gets_no_figure(monkeypatch, damage, named):
    right = bcn.batch_channel_norm
    monkeypatch.setattr(bcn, "batch_channel_norm", lambda *args, **options: damage(right(*args, **options)))
    with pytest.raises(WrongResult, match=named):
        Contestant(OURS[0], Case(SHAPE, ""), settings()).check(draw(torch.float32))
    (result,) = measure(Case(SHAPE, ""), "nchw", OURS[:1], settings())
    assert result.fault.startswith("wrong: ")
    assert named in result.fault
    assert result.time is None


@pytest.mark.parametrize("mode, wrong", [("sequential", "step"), ("batch", "step"), ("step", "batch")])
def test_another_mode_s_numbers_are_wrong(mode, wrong):
    layer = BatchChannelNorm(12, 4, statistics=mode, rate=0.1, activation="relu")

    class Impostor(nn.Module):
        """Says it is in one mode, and computes in another."""

        def __init__(self):
            super().__init__()
            self.norm = layer

        def forward(self, x):
            layer.statistics = wrong
            y = layer(x)
            layer.statistics = mode
            return y

    randomize_state(layer)
    assert any(deviation.is_wrong for deviation in deviations(Impostor(), draw(torch.float32)))


def test_the_state_it_checks_with_leaves_no_term_idle():
    layer = BatchChannelNorm(12, 4)
    randomize_state(layer)
    for tensor in (layer.weight, layer.bias, layer.group_weight, layer.running_mean, layer.running_var):
        assert tensor.unique().numel() == tensor.numel()
    assert find_norm(nn.Sequential(layer, nn.ReLU())) is layer


@pytest.mark.parametrize("kind", ["output", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_tolerances_are_those_of_the_tests(kind, dtype):
    assert tolerance(kind, dtype, summed=2**16) == tolerances.tolerance(kind, dtype)
    assert tolerance(kind, dtype, summed=100) == tolerances.tolerance(kind, dtype)


def test_a_gradient_that_cancels_is_measured_against_its_terms():
    # One channel per group: the group removes what β^b adds, and its gradient is rounding alone.
    layer = BatchChannelNorm(4, 4, rate=0.1, activation="relu")
    randomize_state(layer)
    found = {deviation.name: deviation for deviation in deviations(layer, draw(torch.float32, shape=(3, 4, 9, 9)))}
    assert not found["bias gradient"].is_wrong


def test_a_layer_without_its_relu_is_wrong():
    assert any(deviation.is_wrong for deviation in deviations(BatchChannelNorm(12, 4), draw(torch.float32)))


@pytest.mark.parametrize("forgotten", [1, 2], ids=["curve_nc", "shift_nc"])
@pytest.mark.parametrize("mode", ["step", "batch"])
def test_a_gradient_that_does_not_flow_through_the_statistics_is_wrong_in_half_types_too(monkeypatch, mode, forgotten):
    """At a size where the sums of a gradient that is noise would be below the rounding of the dtype."""
    right = onepass._gradients

    def wrong(*args, **options):
        slopes, affine = right(*args, **options)
        return [torch.zeros_like(v) if i == forgotten else v for i, v in enumerate(slopes)], affine

    layer = BatchChannelNorm(8, 4, statistics=mode, rate=0.1, activation="relu")
    randomize_state(layer)
    x = draw(torch.bfloat16, shape=(2, 8, 112, 112))
    assert not any(deviation.is_wrong for deviation in deviations(layer, x))
    monkeypatch.setattr(onepass, "_gradients", wrong)
    found = {deviation.name: deviation for deviation in deviations(layer, x)}
    assert found["input gradient"].is_wrong


SMALLEST = [(16, 1024), (1, 8, 4, 4), (8, 8, 2, 4)]  # the fewest elements per group and per channel that are accepted


@pytest.mark.parametrize("shape", SMALLEST, ids=str)
def test_the_smallest_shapes_pass_and_a_wrong_layer_is_found_there(monkeypatch, shape):
    for method in OURS:
        assert Contestant(method, Case(shape, ""), settings()).check(draw(torch.float32, shape=shape)) <= 1
    right = bcn.batch_channel_norm
    monkeypatch.setattr(bcn, "batch_channel_norm", lambda *args, **options: wrong_gradient(right(*args, **options)))
    for method in OURS:
        with pytest.raises(WrongResult, match="gradient is"):
            Contestant(method, Case(shape, ""), settings()).check(draw(torch.float32, shape=shape))


@pytest.mark.parametrize("mode", ["step", "sequential", "batch"])
def test_the_kernels_pass_too(mode):
    require_kernels("cpu")
    layer = BatchChannelNorm(64, 32, statistics=mode, rate=0.1, activation="relu", backend="triton")
    randomize_state(layer)
    assert not any(deviation.is_wrong for deviation in deviations(layer, draw(torch.float32, shape=(1, 64, 16))))
