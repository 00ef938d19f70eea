"""The gate: a contestant that computes something else gets no figure."""

import pytest
import torch
from torch import nn

from micronorm.bench.cases import LAYOUTS, Case, lay_out
from micronorm.bench.correct import deviations, find_norm, spread_state, tolerance
from micronorm.bench.measure import Contestant, Settings, Wrong, measure
from micronorm.bench.peers import FORMS, FUSED, SEPARATE
from micronorm.nn import BatchChannelNorm, bcn
from micronorm.ops.bcn import onepass
from tests import tolerances
from tests.devices import require_kernels

CPU = torch.device("cpu")
SHAPE = (4, 12, 5, 6)


def settings(dtype: torch.dtype = torch.float32) -> Settings:
    return Settings(CPU, dtype, ("eager",), 2)


def draw(dtype: torch.dtype, layout: str = "nchw", shape=SHAPE) -> torch.Tensor:
    return lay_out(torch.randn(shape).to(dtype), layout)


@pytest.mark.parametrize("method", [*FUSED, *SEPARATE, *FORMS], ids=lambda method: method.key)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_form_of_ours_passes_in_every_mode_and_dtype(method, dtype):
    contestant = Contestant(method, Case(SHAPE, ""), settings(dtype))
    for layout in LAYOUTS:
        assert 0 <= contestant.check(draw(dtype, layout)) <= 1


@pytest.mark.parametrize("shape", [(6, 8), (3, 8, 7), (2, 8, 3, 4, 5), (8, 1, 4, 4), (3, 2, 5, 5)])
def test_ranks_two_to_five_and_single_channels_pass(shape):
    for method in FUSED:
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
    with pytest.raises(Wrong, match=named):
        Contestant(FUSED[0], Case(SHAPE, ""), settings()).check(draw(torch.float32))
    (row,) = measure(Case(SHAPE, ""), "nchw", FUSED[:1], settings())
    assert row.fault.startswith("wrong: ")
    assert named in row.fault
    assert row.time is None


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

    spread_state(layer)
    assert any(deviation.is_wrong for deviation in deviations(Impostor(), draw(torch.float32)))


def test_the_state_it_checks_with_leaves_no_term_idle():
    layer = BatchChannelNorm(12, 4)
    spread_state(layer)
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
    spread_state(layer)
    found = {deviation.name: deviation for deviation in deviations(layer, draw(torch.float32, shape=(3, 4, 9, 9)))}
    assert not found["bias gradient"].is_wrong


def test_only_rectified_layers_are_compared_with_rectified_equations():
    layer = BatchChannelNorm(12, 4)
    x = draw(torch.float32)
    assert not any(deviation.is_wrong for deviation in deviations(layer, x, relu=False))
    assert any(deviation.is_wrong for deviation in deviations(layer, x, relu=True))


@pytest.mark.parametrize("forgotten", ["curve_nc", "shift_nc"])
@pytest.mark.parametrize("mode", ["step", "batch"])
def test_a_gradient_that_does_not_flow_through_the_statistics_is_wrong_in_half_types_too(monkeypatch, mode, forgotten):
    """At a size where the sums of a gradient that is noise would be below the rounding of the dtype."""
    right = onepass._gradients

    def wrong(*args, **options):
        found = right(*args, **options)
        return found._replace(**{forgotten: torch.zeros_like(getattr(found, forgotten))})

    layer = BatchChannelNorm(8, 4, statistics=mode, rate=0.1, activation="relu")
    spread_state(layer)
    x = draw(torch.bfloat16, shape=(2, 8, 112, 112))
    assert not any(deviation.is_wrong for deviation in deviations(layer, x))
    monkeypatch.setattr(onepass, "_gradients", wrong)
    found = {deviation.name: deviation for deviation in deviations(layer, x)}
    assert found["input gradient"].is_wrong


FEW = [(2, 128), (2, 64, 2), (1, 64, 2), (6, 8), (3, 4)]


@pytest.mark.parametrize("shape", FEW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_with_few_elements_per_group_or_channel_pass_in_every_mode(shape, dtype):
    """Whose gradients cancel: of what a gradient would be with the statistics held, a millionth may be left."""
    for method in FUSED:
        for seed in range(5):
            torch.manual_seed(seed)
            assert Contestant(method, Case(shape, ""), settings(dtype)).check(draw(dtype, shape=shape)) <= 1


@pytest.mark.parametrize("mode", ["step", "sequential", "batch"])
def test_the_kernels_pass_at_such_shapes_too(mode):
    require_kernels("cpu")
    for shape in ((2, 128), (1, 64, 2)):
        torch.manual_seed(0)
        layer = BatchChannelNorm(shape[1], 32, statistics=mode, rate=0.1, activation="relu", backend="triton")
        spread_state(layer)
        assert not any(deviation.is_wrong for deviation in deviations(layer, draw(torch.float32, shape=shape)))


@pytest.mark.parametrize("damage, named", [(wrong_output, "output is"), (wrong_gradient, "gradient is")])
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_a_wrong_contestant_is_found_at_such_shapes_too(monkeypatch, shape, damage, named):
    right = bcn.batch_channel_norm
    monkeypatch.setattr(bcn, "batch_channel_norm", lambda *args, **options: damage(right(*args, **options)))
    for method in FUSED:
        torch.manual_seed(0)
        with pytest.raises(Wrong, match=named):
            Contestant(method, Case(shape, ""), settings()).check(draw(torch.float32, shape=shape))


@pytest.mark.parametrize("forgotten", ["curve_nc", "shift_nc"])
@pytest.mark.parametrize("mode", ["step", "sequential", "batch"])
def test_there_too_a_gradient_must_flow_through_the_statistics(monkeypatch, mode, forgotten):
    right = onepass._gradients

    def wrong(*args, **options):
        found = right(*args, **options)
        return found._replace(**{forgotten: torch.zeros_like(getattr(found, forgotten))})

    monkeypatch.setattr(onepass, "_gradients", wrong)
    # One position has no distance from its mean, so there is no curve to forget: two.
    shape = (2, 128) if forgotten == "shift_nc" else (2, 64, 2)
    layer = BatchChannelNorm(shape[1], 32, statistics=mode, rate=0.1, activation="relu")
    spread_state(layer)
    found = {deviation.name: deviation for deviation in deviations(layer, draw(torch.float32, shape=shape))}
    assert found["input gradient"].is_wrong


@pytest.mark.parametrize("method", FUSED, ids=lambda method: method.key)
def test_where_groups_are_large_nothing_more_is_allowed_for_it(method):
    contestant = Contestant(method, Case((4, 12, 16, 16), ""), settings())
    spread_state(find_norm(contestant.layer))
    found = deviations(contestant.layer, draw(torch.float32, shape=(4, 12, 16, 16)))
    for deviation in found[1:]:
        assert deviation.tolerance == tolerance("gradient", torch.float32, summed=1024)
