import pytest
import torch
from torch import nn

from micronorm.nn.group import GN, IN, LN, GroupNorm
from micronorm.nn.norm_act import NormAct
from micronorm.ops.activation import check_activation
from tests.tolerances import assert_close_to_max, tolerance

F64 = torch.float64


@pytest.mark.parametrize("channels, groups", [(64, 32), (48, 12), (16, 4), (3, 1)])
def test_group_norm_is_torchs_with_the_groups_of_the_one_rule(channels, groups):
    norm = GN(eps=1e-3)(channels)
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels, norm.eps) == (groups, channels, 1e-3)
    assert GN(min_channels_per_group=4)(64).num_groups == 16


def test_layer_norm_is_over_channels_and_space_with_an_affine_per_channel():
    norm = LN(eps=1e-3)(6).double()
    x = torch.randn(2, 6, 3, 4, dtype=F64)
    assert_close_to_max(norm(x), nn.functional.layer_norm(x, x.shape[1:], eps=1e-3), tol=tolerance("output", F64))
    assert norm.weight.shape == (6,)


@pytest.mark.parametrize("size", [(4,), (3, 4), (2, 3, 2)])
def test_instance_norm_is_over_the_space_of_each_channel(size):
    norm = IN(eps=1e-3)(6).double()
    x = torch.randn(2, 6, *size, dtype=F64)
    assert_close_to_max(norm(x), nn.functional.instance_norm(x, eps=1e-3), tol=tolerance("output", F64))
    assert isinstance(norm, nn.GroupNorm)
    assert list(norm.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1, 1), (3, 4, 1)])
def test_instance_norm_of_one_position_is_the_bias(shape):
    norm = IN()(4)
    nn.init.normal_(norm.bias)
    x = torch.randn(shape, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    # torch's kernel folds the mean into its constant, so that x/sqrt(eps) is what it rounds
    tol = tolerance("output", torch.float32, condition=max(1.0, x.abs().max().item() / norm.eps**0.5))
    assert_close_to_max(y.flatten(1), norm.bias.expand(shape[0], 4), tol=tol)
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("spec", [GN, LN, IN])
def test_a_negative_eps_is_refused_where_it_is_written(spec):
    with pytest.raises(ValueError, match=r"eps must be finite and at least 0, got -1\.0; try 1e-5"):
        spec(eps=-1.0)


@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}, {"affine": False}, {"dtype": torch.bfloat16}], ids=str)
def test_our_group_norm_has_torchs_arguments_keys_text_and_bits(options):
    ours, theirs = GroupNorm(2, 6, **options), nn.GroupNorm(2, 6, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert repr(ours) == repr(theirs)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 5, 3, dtype=options.get("dtype"))
    for backend in ("auto", "one-pass", "reference"):
        ours.backend = backend
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("kind", [None, "relu", "leaky_relu", "silu"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_what_follows_has_the_bits_of_the_operations_in_a_row(kind, with_residual):
    norm, act = GroupNorm(2, 6), check_activation(kind, 0.2)
    x, r = torch.randn(2, 2, 6, 5, 3)
    y = norm(x, residual=r if with_residual else None, activation=kind, negative_slope=0.2)
    assert torch.equal(y, act.apply(norm(x) + r if with_residual else norm(x)))


def test_a_norm_with_activation_hands_it_to_the_norm_unless_somebody_looks_between():
    seen = []

    class Watched(nn.ReLU):
        def forward(self, input):
            seen.append(True)
            return super().forward(input)

    x = torch.randn(2, 6, 3, 3)
    expected = torch.relu(GroupNorm(2, 6)(x))
    for make in (nn.ReLU, Watched):
        assert torch.equal(NormAct(GroupNorm(2, 6), act=make())(x), expected)
    assert seen == [True]  # not nn.ReLU itself: it is called
    norm = GroupNorm(2, 6)
    norm.register_forward_hook(lambda module, args, y: seen.append(bool((y < 0).any())))
    NormAct(norm, act=nn.ReLU())(x)
    assert seen == [True, True]  # the hook saw what the ReLU had not touched


def test_the_layer_has_no_activation_of_its_own():
    norm = GroupNorm(2, 4)
    assert norm.activation is None
    with pytest.raises(AttributeError):
        norm.activation = "relu"  # type: ignore[misc]


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"backend must be one of .* got 'cuda'"):
        GroupNorm(2, 4, backend="cuda")
    assert repr(GroupNorm(2, 4, backend="one-pass")).endswith(", backend='one-pass')")
    x = torch.randn(2, 4, 3)
    with pytest.raises(ValueError, match=r"residual must have the shape of the input, \(2, 4, 3\), got \(1, 4, 3\)"):
        GroupNorm(2, 4)(x, residual=x[:1])
    with pytest.raises(TypeError, match=r"residual must be a tensor of the input's shape, or None, got 1; add"):
        GroupNorm(2, 4)(x, residual=1)
    with pytest.raises(ValueError, match="activation must be None or one of"):
        GroupNorm(2, 4)(x, activation="gelu")
