"""BatchChannelNorm: what it equals, what it keeps, what it refuses."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import micronorm as mn
from micronorm.nn import BatchChannelNorm
from tests.tolerances import assert_close_to_max, tolerance

TOL = tolerance("gradient", torch.float64)


def randomized(layer):
    layer = layer.double()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p) * 0.5)
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
    return layer


def batch_norm_then_group_norm(layer):
    """torch's own layers, the group affine spread over channels."""
    bn = nn.BatchNorm2d(layer.num_channels, eps=float(layer.eps)).double()
    gn = nn.GroupNorm(layer.num_groups, layer.num_channels, eps=float(layer.eps)).double()
    size = layer.num_channels // layer.num_groups
    with torch.no_grad():
        for name in ("weight", "bias", "running_mean", "running_var"):
            getattr(bn, name).copy_(getattr(layer, name))
        gn.weight.copy_(layer.group_weight.repeat_interleave(size))
        gn.bias.copy_(layer.group_bias.repeat_interleave(size))
    return nn.Sequential(bn, gn)


@given(samples=st.integers(2, 5), groups=st.sampled_from([1, 2, 4]), size=st.integers(1, 3), height=st.integers(2, 4))
@settings(max_examples=25)
def test_batch_mode_equals_torchs_batch_norm_then_group_norm(samples, groups, size, height):
    layer = randomized(BatchChannelNorm(groups * size, groups, statistics="batch"))
    layer._window.warned = True
    expected = batch_norm_then_group_norm(layer)
    x = torch.randn(samples, groups * size, height, 3, dtype=torch.float64, requires_grad=True)
    g = torch.randn_like(x)
    y, y_expected = layer(x), expected(x)
    assert_close_to_max(y, y_expected, tol=TOL, scale=1.0)
    dx, dw, dgw = torch.autograd.grad(y, (x, layer.weight, layer.group_weight), g)
    ex, ew, egw = torch.autograd.grad(y_expected, (x, expected[0].weight, expected[1].weight), g)
    # a group of one channel cancels γ^b: its gradient is what rounding leaves
    assert_close_to_max(dx, ex, tol=TOL, scale=1e2)
    assert_close_to_max(dw, ew, tol=TOL, scale=1e2)
    assert_close_to_max(dgw, egw.unflatten(0, (groups, -1)).sum(1), tol=TOL, scale=1e2)
    assert_close_to_max(layer.running_mean, expected[0].running_mean, tol=TOL)
    assert_close_to_max(layer.running_var, expected[0].running_var, tol=TOL)
    assert_close_to_max(layer.eval()(x), expected.eval()(x), tol=TOL, scale=1.0)


@pytest.mark.parametrize("statistics", ["step", "sequential"])
def test_estimates_0_and_1_minus_eps_at_rate_0_give_group_norm(statistics):
    layer = BatchChannelNorm(8, 4, statistics=statistics, rate=0.0).double()
    layer.running_var.fill_(1 - layer.eps)
    x = torch.randn(3, 8, 5, 4, dtype=torch.float64)
    assert_close_to_max(layer(x), F.group_norm(x, 4), tol=1e-14)


@pytest.mark.parametrize("statistics", ["step", "sequential", "batch"])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_the_reference_backend_gives_the_same(statistics, activation):
    options = {"statistics": statistics, "rate": 0.3, "activation": activation}
    fast = randomized(BatchChannelNorm(8, 4, **options))
    slow = randomized(BatchChannelNorm(8, 4, backend="reference", **options))
    slow.load_state_dict(fast.state_dict())
    x = torch.randn(3, 8, 5, 4, dtype=torch.float64, requires_grad=True)
    g = torch.randn_like(x)
    results = []
    for layer in (fast, slow):
        y = layer(x)
        results.append((y, *torch.autograd.grad(y, (x, *layer.parameters()), g)))
    for a, b in zip(*results, strict=True):
        assert_close_to_max(a, b.detach(), tol=TOL)
    assert torch.equal(fast.running_mean, slow.running_mean)


def test_batch_mode_takes_a_float_rate_as_its_momentum():
    layer, bn = BatchChannelNorm(8, 4, statistics="batch", rate=0.7), nn.BatchNorm2d(8, momentum=0.7)
    x = torch.randn(3, 8, 4, 4)
    layer(x)
    bn(x)
    assert_close_to_max(layer.running_var, bn.running_var, tol=tolerance("output", torch.float32))


def test_a_copy_measures_from_its_estimates_so_that_data_far_from_zero_keep_their_variance():
    torch.manual_seed(0)
    norm = BatchChannelNorm(4, 2, rate=0.5).double()
    norm.running_mean.fill_(1e6)
    norm._window.clear()
    x = 1e6 + 0.1 * torch.randn(6, 4, 5, 5, dtype=torch.float64)
    twin = copy.deepcopy(norm)
    for layer in (norm, twin):
        layer(x)
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
    torch.testing.assert_close(twin.running_var, norm.running_var, rtol=1e-12, atol=0)


def test_a_copy_of_a_parametrized_layer_gathers_for_itself():
    norm = nn.utils.parametrize.register_parametrization(BatchChannelNorm(4, 2, rate=0.5), "weight", nn.Identity())
    twin, x = copy.deepcopy(norm), torch.randn(3, 4, 5, 5)
    for layer in (twin, norm):
        layer(x).sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert twin.running_mean.any()
    assert torch.equal(twin.running_mean, norm.running_mean)


# --- blend -----------------------------------------------------------------------------------------------------------


def test_a_warming_layer_starts_as_batch_norm_in_eval_mode_and_ends_as_itself():
    layer = randomized(BatchChannelNorm(8, 4, rate=0.0))
    twin = copy.deepcopy(layer)
    layer.warm(3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    x = torch.randn(3, 8, 4, 4, dtype=torch.float64)
    bn = F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias)
    start = bn.unflatten(1, (4, 2)) * layer.group_weight.view(4, 1, 1, 1) + layer.group_bias.view(4, 1, 1, 1)
    blends = []
    for k in range(5):
        y = layer(x)
        if k == 0:
            assert_close_to_max(y, start.flatten(1, 2).detach(), tol=TOL)
        blends.append(layer.blend.item())
        optimizer.step()
    assert blends[:3] == [0, pytest.approx(1 / 3), pytest.approx(2 / 3)]
    assert blends[3:] == [1, 1]
    assert_close_to_max(layer(x), twin(x).detach(), tol=TOL)


@pytest.mark.parametrize("steps", [1, 7, 49])  # 49·(1/49) is not 1 in floating point
def test_the_blend_is_exactly_one_after_its_steps(steps):
    layer = BatchChannelNorm(4, 2, rate=0.0)
    layer.warm(steps)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for _ in range(steps):
        assert layer.blend < 1
        layer(torch.randn(1, 4, 2, 2))
        optimizer.step()
    assert layer.blend == 1


@pytest.mark.parametrize("statistics", ["step", "sequential", "batch"])
def test_the_blend_advances_with_commits_that_saw_samples_in_every_mode(statistics):
    layer = BatchChannelNorm(4, 2, statistics=statistics, rate=0.1)
    layer.warm(4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, fused=True)
    x = torch.randn(2, 4, 2, 2)
    optimizer.step()
    assert layer.blend == 0
    layer(x)
    optimizer.found_inf = torch.ones(1)  # a skipped step of a fused optimizer
    optimizer.step()
    assert layer.blend == 0
    optimizer.found_inf = torch.zeros(1)
    layer(x)
    optimizer.step()
    assert layer.blend == 0.25


def test_the_blend_and_its_steps_travel_in_the_state_dict_of_a_warmed_layer():
    layer = BatchChannelNorm(4, 2)
    assert set(layer.state_dict()) == {"weight", "bias", "group_weight", "group_bias", "running_mean", "running_var"}
    layer.warm(4)
    layer.blend.fill_(0.5)
    saved = copy.deepcopy(layer.state_dict())
    assert saved["blend"] == 0.5
    assert layer.state_dict(keep_vars=True)["blend"] is layer.blend
    layer.blend.fill_(1)
    assert "blend" in layer.state_dict()  # keys that come and go would trouble those who zip state dicts
    fresh = BatchChannelNorm(4, 2)
    fresh.load_state_dict(saved)
    assert (fresh.blend, fresh.warm_steps) == (0.5, 4)
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.0)
    fresh(torch.randn(2, 4, 3, 3))
    optimizer.step()
    assert fresh.blend == 0.75
    fresh.load_state_dict(BatchChannelNorm(4, 2).state_dict())
    assert (fresh.blend, fresh.warm_steps) == (1, 0)
    fresh.warm(4)
    fresh.load_state_dict(nn.BatchNorm2d(4).state_dict())  # a pretrained network: the warming goes on
    assert fresh.blend == 0


# --- state -----------------------------------------------------------------------------------------------------------


def test_loading_a_state_dict_keeps_the_window_and_an_empty_one_follows_the_estimates():
    layer = BatchChannelNorm(4, 2)
    state = {name: tensor + 1 for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(state)
    assert torch.equal(layer._window.reference, torch.ones(4, dtype=torch.float64))
    layer(torch.randn(2, 4, 3, 3))
    sums, address = layer._window.sums.clone(), layer._window.sums.data_ptr()
    layer.load_state_dict({name: tensor + 1 for name, tensor in state.items()})
    assert layer._window.forwards == 1
    assert torch.equal(layer._window.sums, sums)
    assert torch.equal(layer._window.reference, torch.ones(4, dtype=torch.float64))
    assert layer._window.sums.data_ptr() == address


def test_loading_a_weight_of_zero_warns_and_names_the_way_out():
    bn = nn.BatchNorm2d(4)
    nn.init.zeros_(bn.weight)
    with pytest.warns(UserWarning, match=r"is all zero.*hundreds of times too large.*set group_weight to zero"):
        BatchChannelNorm(4, 2).load_state_dict(bn.state_dict())


def test_a_weight_of_zero_multiplies_gradients_by_hundreds_and_a_group_weight_of_zero_does_not():
    x, g = torch.randn(2, 3, 8, 4, 4, dtype=torch.float64)
    norms = {}
    for zeroed in (None, "weight", "group_weight"):
        layer = BatchChannelNorm(8, 4).double()
        if zeroed:
            nn.init.zeros_(getattr(layer, zeroed))
        (layer(x) * g).sum().backward()
        norms[zeroed] = torch.cat([p.grad for p in layer.parameters()]).norm()
    assert norms["weight"] > 100 * norms[None]
    assert norms["group_weight"] <= norms[None]


def test_the_window_stays_at_its_address_between_commits_and_out_of_sight():
    layer = BatchChannelNorm(4, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    address = layer._window.sums.data_ptr()
    for _ in range(3):
        layer(torch.randn(2, 4, 3, 3))
        optimizer.step()
    assert layer._window.sums.data_ptr() == address
    assert layer._window.sums.dtype == torch.float64
    assert {n for n, _ in layer.named_buffers()} == {"running_mean", "running_var", "blend"}


def test_the_window_follows_the_layer_to_another_device():
    layer = BatchChannelNorm(4, 2)
    layer(torch.randn(2, 4, 3, 3))
    sums = layer._window.sums.clone()
    layer.double()
    assert torch.equal(layer._window.sums, sums)
    assert layer._window.forwards == 1
    assert layer.to("meta")._window.sums.is_meta


def test_uninitialized_and_meta_layers_are_whole_after_a_load():
    """Either state dict must set everything the layer computes with, also what it does not name."""
    x = torch.randn(2, 8, 4, 4)
    for saved in (nn.BatchNorm2d(8).state_dict(), BatchChannelNorm(8).state_dict()):
        expected = BatchChannelNorm(8)
        expected.load_state_dict(saved)
        bare = torch.nn.utils.skip_init(BatchChannelNorm, 8)
        bare.blend.fill_(torch.nan)
        bare.load_state_dict(saved)
        with torch.device("meta"):
            assigned, emptied = BatchChannelNorm(8), BatchChannelNorm(8)
        assigned.load_state_dict(saved, assign=True)
        emptied.to_empty(device="cpu").blend.fill_(torch.nan)
        emptied.load_state_dict(saved)
        for layer in (bare, assigned, emptied):
            assert torch.equal(layer(x), expected(x))


def test_assigned_half_estimates_are_widened():
    layer = BatchChannelNorm(4, 2)
    layer.load_state_dict({k: v.half() for k, v in layer.state_dict().items()}, assign=True)
    assert layer.weight.dtype == torch.float16
    assert layer.running_mean.dtype == torch.float32


def test_estimates_are_made_in_the_default_dtype_and_never_narrower_than_float32():
    try:
        torch.set_default_dtype(torch.float64)
        assert BatchChannelNorm(4).running_mean.dtype == torch.float64
        torch.set_default_dtype(torch.float16)
        assert BatchChannelNorm(4).running_mean.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_counts_are_exact_beyond_what_float32_can_hold():
    layer = BatchChannelNorm(2, 1)
    layer._window.sums[0] = 2.0**24
    layer(torch.randn(1, 2, 1, 3))
    assert layer._window.split.elements == 2**24 + 3


# --- what it keeps for the backward ----------------------------------------------------------------------------------


@pytest.mark.parametrize("statistics", ["step", "sequential", "batch"])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_the_backward_keeps_one_activation_and_numbers_per_channel(statistics, activation):
    layer = BatchChannelNorm(8, 4, statistics=statistics, rate=0.1, activation=activation)
    x = torch.randn(2, 8, 32, 32, requires_grad=True)
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    extra = sum(n for k, n in saved.items() if k not in parameters and k != x.untyped_storage().data_ptr())
    assert x.untyped_storage().data_ptr() in saved
    assert extra <= 8 * 8 * (2 * 8)  # eight float64 numbers per (n, c) at the most


# --- arguments -------------------------------------------------------------------------------------------------------


def test_without_an_affine_the_layer_is_the_identity_affine_with_the_same_keys():
    plain, fixed = BatchChannelNorm(8, 2), BatchChannelNorm(8, 2, affine=False)
    x = torch.randn(2, 8, 3, 4, 5)
    assert torch.equal(plain(x), fixed(x))
    assert plain.state_dict().keys() == fixed.state_dict().keys()
    fixed.load_state_dict(nn.BatchNorm3d(8, affine=False).state_dict())
    assert "affine=False" in repr(fixed)
    with pytest.raises(TypeError, match="affine"):
        BatchChannelNorm(8, affine=1)


def test_groups_follow_the_one_rule_and_an_explicit_number_must_divide():
    assert BatchChannelNorm(64).num_groups == 32
    assert BatchChannelNorm(48).num_groups == mn.BCN().groups_for(48) == mn.GN()(48).num_groups == 12
    with pytest.raises(ValueError, match=r"10 channels and 4 groups; try num_groups=2"):
        BatchChannelNorm(10, 4)


@pytest.mark.parametrize("rate", [-0.1, 1.01, float("nan"), float("inf")])
def test_a_float_rate_outside_0_1_is_refused(rate):
    for make in (lambda: BatchChannelNorm(4, rate=rate), lambda: mn.BCN(rate=rate)):
        with pytest.raises(ValueError, match=rf"must lie in \[0, 1\], got {rate!r}"):
            make()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"statistics": "running"}, r"statistics must be one of .*'running'"),
        ({"rate": "momentum"}, r"rate must be \"lr\" or a float.*'momentum'"),
        ({"backend": "cuda"}, "backend must be one of .*'cuda'"),
        ({"activation": "gelu"}, "activation must be .*'gelu'"),
        ({"micro_batch": 0}, "micro_batch.*0"),
        ({"micro_batch": 2}, r"micro_batch=2 is for statistics=\"sequential\""),
        ({"eps": -1e-5}, "eps"),
        ({"eps": float("inf")}, "eps"),
        ({"num_groups": 0}, "num_groups"),
    ],
)
def test_other_bad_arguments_are_refused_with_their_value(options, message):
    with pytest.raises(ValueError, match=message):
        BatchChannelNorm(4, **options)


def test_a_rate_set_later_is_checked_too():
    layer = BatchChannelNorm(4)
    layer.rate = 1
    assert layer.rate == 1.0
    assert isinstance(layer.rate, float)
    with pytest.raises(ValueError, match="'fast'"):
        layer.rate = "fast"


def test_a_gradient_behind_a_closed_gate_is_none_even_if_infinite():
    layer = BatchChannelNorm(4, 2, activation="relu")
    x = torch.randn(1, 4, 4, 4, requires_grad=True)
    y = layer(x)
    y.backward(torch.where(y == 0, torch.inf, 1.0))
    assert torch.isfinite(x.grad).all()


@pytest.mark.slow  # compiles
@pytest.mark.skipif(
    torch.__version__ < "2.7", reason="torch 2.6 exports no gradient across a change of grad mode, and says so"
)
@pytest.mark.parametrize("statistics", ["step", "sequential", "batch"])
@pytest.mark.parametrize("training", [True, False])
def test_an_exported_graph_has_the_layers_gradients(statistics, training):
    """torch.export takes the function apart and differentiates its forward."""
    norm = BatchChannelNorm(8, 4, statistics=statistics, rate=0.1, activation="relu")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm).double().train(training)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    twin = copy.deepcopy(model)  # kept: an exported graph gathers for its layer as long as that lives
    exported = torch.export.export(twin, (x,)).module()
    g = torch.randn(2, 8, 6, 6, dtype=torch.float64)
    model(x).backward(g)
    exported(x).backward(g)
    gradients = {name: p.grad for name, p in exported.named_parameters()}
    for name, p in model.named_parameters():
        # "batch" cancels the convolution's bias: its gradient is what rounding leaves of terms of the size of g
        assert_close_to_max(gradients[name], p.grad, tol=TOL, scale=max(1.0, p.grad.abs().max().item()))


def test_wrong_types_are_type_errors():
    with pytest.raises(TypeError, match="True"):
        BatchChannelNorm(4, rate=True)
    with pytest.raises(TypeError, match=r"2\.5"):
        BatchChannelNorm(4, num_groups=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps"):
        BatchChannelNorm(4).warm(0)


def test_the_repr_shows_what_differs_from_the_default():
    text = repr(BatchChannelNorm(8, 4, statistics="sequential", micro_batch=2, backend="reference", activation="relu"))
    assert "micro_batch=2, eps=1e-05, backend='reference', activation='relu'" in text
    layer = BatchChannelNorm(8, 4)
    layer.warm(5)
    assert "warm_steps=5" in repr(layer)


def test_the_layer_fits_the_factories_of_torchvision_and_timm():
    torchvision = pytest.importorskip("torchvision")
    timm = pytest.importorskip("timm")
    x = torch.randn(1, 3, 64, 64)
    net = torchvision.models.resnet18(norm_layer=mn.nn.BatchChannelNorm, num_classes=4)
    assert net(x).shape == (1, 4)
    net = torchvision.models.resnet18(norm_layer=mn.BCN(), num_classes=4)
    assert sum(isinstance(m, mn.nn.BatchChannelNorm) for m in net.modules()) == 20
    net = timm.create_model("resnet10t", norm_layer=mn.nn.BatchChannelNorm, num_classes=4)
    assert net(x).shape == (1, 4)
