"""Degenerate inputs and odd layouts, for every layer."""

import pytest
import torch

import micronorm as mn
from tests.contract.layers import ALL, CHANNELS, NORMS, OURS, WEIGHTS, run
from tests.tolerances import assert_close_to_max, tolerance

pytestmark = pytest.mark.filterwarnings("ignore:.*little but their signs:UserWarning")

all_layers = pytest.mark.parametrize("case", ALL, ids=str)
norms = pytest.mark.parametrize("case", NORMS, ids=str)
our_norms = pytest.mark.parametrize("case", OURS, ids=str)


def assert_equal_runs(actual, expected, operation="gradient"):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close_to_max(actual[name], value, tol=tolerance(operation, torch.float64), scale=1 + value.abs().max())


@norms
@pytest.mark.parametrize("shape", [(), (5,), (5, 3), (2, 3, 4)], ids=["N×C", "N×C×L", "N×C×H×W", "N×C×D×H×W"])
def test_any_rank_gives_the_same_as_its_flattened_form(case, shape):
    if case.torchs_own and case.name.startswith("BN"):
        pytest.skip("torch has a BatchNorm class per rank")
    x = case.input(shape=(4, CHANNELS, *shape))
    flat = x.reshape(4, CHANNELS, -1, 1)
    torch.manual_seed(2)
    g = torch.randn_like(x)
    result, expected = run(case.layer(), x, g), run(case.layer(), flat, g.reshape(flat.shape))
    for name in ("y", "x.grad"):
        expected[name] = expected[name].reshape(x.shape)
    assert_equal_runs(result, expected)


@all_layers
def test_a_batch_of_one_is_defined(case):
    for value in run(case.layer(), case.input(shape=(1, *case.shape[1:]))).values():
        assert torch.isfinite(value).all()


@all_layers
def test_an_empty_batch_gives_an_empty_output_zero_gradients_and_moves_nothing(case):
    if case.torchs_own and case.name.startswith("BN"):
        pytest.skip("torch's BatchNorm refuses an empty batch in training")
    layer = case.layer()
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    x = case.input(shape=(0, *case.shape[1:])).requires_grad_()
    y = layer(x)
    assert y.shape[0] == 0
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    for p in layer.parameters():
        assert p.grad is None or not p.grad.any()
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])


@our_norms
@pytest.mark.parametrize("samples", [1, 3])
def test_maps_of_one_element_are_defined(case, samples):
    for value in run(case.layer(), case.input(shape=(samples, CHANNELS, 1, 1))).values():
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("spec", [mn.BCN, mn.EvoNormS0, mn.GN])
def test_one_channel_per_group_is_defined(spec):
    layer = spec(groups=CHANNELS, min_channels_per_group=1)(CHANNELS).double()
    x = torch.randn(3, CHANNELS, 4, 4, dtype=torch.float64)
    assert torch.isfinite(run(layer, x)["x.grad"]).all()
    if spec is mn.BCN:
        assert layer.num_groups == CHANNELS


@norms
def test_an_input_without_variance_gives_finite_outputs_and_gradients(case):
    x = torch.full(case.shape, 3.0, dtype=torch.float64)
    for value in run(case.layer(), x).values():
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("case", WEIGHTS, ids=str)
def test_a_weight_without_variance_gives_finite_outputs_and_gradients(case):
    layer = case.layer()
    with torch.no_grad():
        layer.weight.fill_(0.5)
    for value in run(layer, case.input()).values():
        assert torch.isfinite(value).all()


@all_layers
def test_channels_last_goes_in_and_comes_out(case):
    if len(case.shape) not in (4, 5):
        pytest.skip("channels_last is for 2-d and 3-d maps")
    memory_format = torch.channels_last if len(case.shape) == 4 else torch.channels_last_3d
    x = case.input()
    torch.manual_seed(2)
    g = torch.randn_like(case.layer()(x))
    expected = run(case.layer(), x, g)
    layer = case.layer().to(memory_format=memory_format)
    result = run(layer, *(t.contiguous(memory_format=memory_format) for t in (x, g)))
    assert_equal_runs(result, expected)
    if case in NORMS:
        assert result["y"].is_contiguous(memory_format=memory_format)
        assert result["x.grad"].is_contiguous(memory_format=memory_format)


@all_layers
def test_permuted_and_expanded_inputs_and_gradients_are_read_as_they_are(case):
    x = case.input()
    y = case.layer()(x)
    torch.manual_seed(2)
    g = torch.randn_like(y)
    expected = run(case.layer(), x, g)
    backwards = tuple(reversed(range(x.ndim)))

    def permuted(t):
        return t.permute(backwards).contiguous().permute(backwards)

    assert_equal_runs(run(case.layer(), permuted(x), permuted(g)), expected)
    row, g_row = x[:1].expand(x.shape), g[:1].expand(g.shape)
    assert_equal_runs(run(case.layer(), row, g_row), run(case.layer(), row.contiguous(), g_row.contiguous()))
    one = torch.ones((), dtype=g.dtype).expand(g.shape)  # what y.sum().backward() sends
    assert_equal_runs(run(case.layer(), x, one), run(case.layer(), x, one.contiguous()))


@our_norms
def test_an_in_place_activation_may_follow(case):
    x = case.input()
    layer = case.layer()
    torch.manual_seed(2)
    g = torch.randn_like(x)
    expected = run(torch.nn.Sequential(case.layer(), torch.nn.ReLU()), x, g)
    assert_equal_runs(run(torch.nn.Sequential(layer, torch.nn.ReLU(inplace=True)), x, g), expected)
