"""Masks are functions of the sample's key, the layer, the call and the position; their distribution is dropout's."""

import copy
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from micronorm.nn.per_step.keyed_dropout import KeyedDropout, KeyedDropPath, dropout_keys
from micronorm.ops.keyed import sample_keys, uniforms

LAYERS = {
    "elements": (lambda p: KeyedDropout(p), (2, 3, 4, 5)),
    "channels 1d": (lambda p: KeyedDropout(p, 1), (2, 3, 4)),
    "channels 2d": (lambda p: KeyedDropout(p, 2), (2, 3, 4, 5)),
    "channels 3d": (lambda p: KeyedDropout(p, 3), (2, 3, 2, 2, 2)),
    "paths": (lambda p: KeyedDropPath(p), (2, 3, 4, 5)),
}
layers = pytest.mark.parametrize("make, shape", LAYERS.values(), ids=LAYERS)


def keys_of(count, epoch=0):
    return sample_keys(torch.arange(count), seed=5, epoch=epoch)


def keyed(layer, x, keys=None):
    with dropout_keys(keys_of(len(x)) if keys is None else keys):
        return layer(x)


def assert_share(kept, p):
    """Five standard deviations of a binomial count: one failure in a million, and the keys are fixed."""
    n = kept.numel()
    assert abs(kept.double().sum().item() - n * (1 - p)) < 5 * math.sqrt(n * p * (1 - p))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@layers
def test_the_share_kept_and_its_scale_are_those_of_dropout(make, shape, p):
    y = keyed(make(p), torch.ones(20_000, *shape[1:]))
    assert_share(y.flatten(1)[:, 0] != 0, p)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


def test_masks_are_independent_over_elements_layers_calls_samples_and_epochs():
    x, drop = torch.ones(200, 100), KeyedDropout(0.5)
    with dropout_keys(keys_of(200)):
        first, second = drop(x), drop(x)
        other = KeyedDropout(0.5, stream=1)(x)
    later = keyed(drop, x, keys_of(200, epoch=1))
    shifted = [(first[:, 1:], first[:, :-1]), (first[1:], first[:-1])]
    for a, b in [(first, second), (first, other), (second, other), (first, later), *shifted]:
        agree = (a != 0) == (b != 0)
        assert_share(agree, 0.5)


def test_masks_are_not_the_numbers_that_augmentation_draws_from_the_same_keys():
    keys = keys_of(2_000)
    dropped = keyed(KeyedDropPath(0.5), torch.ones(2_000, 1), keys) == 0
    for stream in range(3):
        assert_share((uniforms(keys, 1, stream=stream) < 0.5) == dropped, 0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@layers
def test_a_sample_has_its_mask_in_every_company_order_dtype_and_memory_format(make, shape, dtype):
    x = torch.randn(8, *shape[1:]).to(dtype)
    layer, keys = make(0.4), keys_of(8)
    whole = keyed(layer, x, keys)
    assert whole.dtype == dtype
    order = torch.tensor([5, 0, 7])
    assert torch.equal(keyed(layer, x[order], keys[order]), whole[order])
    if x.ndim == 4:
        last = keyed(layer, x.to(memory_format=torch.channels_last), keys)
        assert torch.equal(last, whole)
        assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(keyed(layer, x.double(), keys) != 0, whole != 0)


@layers
def test_what_a_mask_drops_are_elements_whole_channels_or_whole_samples(make, shape):
    y = keyed(make(0.5), torch.ones(64, *shape[1:])) != 0
    per_channel, per_sample = (y.flatten(axes).float().mean(-1) for axes in (2, 1))
    layer = make(0.5)
    channels_whole, samples_whole = (bool(((share == 0) | (share == 1)).all()) for share in (per_channel, per_sample))
    assert channels_whole is (isinstance(layer, KeyedDropPath) or layer.dims > 0)
    assert samples_whole is isinstance(layer, KeyedDropPath)


def test_rows_of_a_sample_have_masks_of_their_own_that_go_with_it():
    """Frames or windows folded into the first axis, sample after sample."""
    x, keys, drop = torch.ones(4 * 3, 50), keys_of(4), KeyedDropout(0.5)
    whole = keyed(drop, x, keys)
    assert torch.equal(keyed(drop, x[3:9], keys[1:3]), whole[3:9])
    assert not torch.equal(whole[0], whole[1])


@layers
def test_evaluation_and_rate_zero_change_nothing_and_rate_one_drops_all(make, shape):
    x = torch.randn(shape)
    assert keyed(make(0.5).eval(), x) is x
    assert keyed(make(0.0), x) is x
    x.requires_grad_()
    y = keyed(make(1.0), x)
    y.sum().backward()
    assert not y.any()
    assert not x.grad.any()


@layers
def test_an_empty_batch_passes(make, shape):
    x = torch.empty(0, *shape[1:], requires_grad=True)
    y = keyed(make(0.5), x)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad.shape == x.shape
    assert keyed(make(0.5), x, keys_of(3)).shape == x.shape


def test_a_path_may_be_kept_without_its_scale():
    assert set(keyed(KeyedDropPath(0.5, scale_by_keep=False), torch.ones(50, 2)).flatten().tolist()) == {0.0, 1.0}


@layers
def test_the_gradient_is_that_of_the_mask(make, shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: keyed(make(0.5), x), x)


@pytest.mark.parametrize(
    "dims, plain, shape",
    [
        (0, F.dropout, (4, 9)),
        (1, F.dropout1d, (4, 9, 2)),
        (2, F.dropout2d, (4, 9, 2, 2)),
        (3, F.dropout3d, (4, 9, 1, 1, 2)),
    ],
)
def test_without_keys_it_is_the_layer_of_torch(dims, plain, shape):
    x = torch.randn(shape)
    torch.manual_seed(1)
    expected = plain(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(KeyedDropout(0.5, dims)(x), expected)


def test_without_keys_paths_are_dropped_from_the_generator():
    x = torch.ones(2_000, 2)
    torch.manual_seed(1)
    y = KeyedDropPath(0.25)(x)
    torch.manual_seed(1)
    assert torch.equal(KeyedDropPath(0.25)(x), y)
    assert not torch.equal(KeyedDropPath(0.25)(x), y)
    assert_share(y[:, 0] != 0, 0.25)


def test_keys_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    keyed(KeyedDropout(0.5), torch.ones(4, 5))
    keyed(KeyedDropPath(0.5), torch.ones(4, 5))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dims", [1, 3])
def test_one_sample_without_its_axis_is_one_sample(dims):
    x = torch.ones(64, *[2] * dims)
    drop = KeyedDropout(0.5, dims)
    assert torch.equal(keyed(drop, x, keys_of(1)), keyed(drop, x[None])[0])


def test_a_large_mask_is_made_in_pieces_that_do_not_show(monkeypatch):
    x, drop = torch.ones(10, 100), KeyedDropout(0.5)
    whole = keyed(drop, x)
    monkeypatch.setattr("micronorm.nn.per_step.keyed_dropout._PIECE", 250)
    assert torch.equal(keyed(drop, x), whole)


def test_the_innermost_keys_count_and_the_outer_ones_return():
    x, drop = torch.ones(3, 40), KeyedDropout(0.5)
    outer, inner = keys_of(3), keys_of(3, epoch=1)
    with dropout_keys(outer):
        keyed(drop, x, inner)
        after = drop(x)
    assert torch.equal(after, keyed(drop, x, outer))
    with pytest.raises(ZeroDivisionError), dropout_keys(outer):
        _ = 1 / 0
    assert not torch.equal(drop(x), drop(x))  # no keys are left behind


# Activation checkpointing


class Twice(nn.Module):
    """One dropout in two places of each block, as much published code has it, and one behind them."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(6, 6)
        self.drop = KeyedDropout(0.4)
        self.path = KeyedDropPath(0.4, stream=1)

    def forward(self, x):
        return x + self.path(self.drop(self.lift(self.drop(torch.tanh(x)))))


def gradients(run, model, x, keys):
    model.zero_grad()
    x = x.clone().requires_grad_()
    with dropout_keys(keys):
        run(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_repeats_the_masks_of_the_first_pass(reentrant):
    model = Twice().double()
    x, keys = torch.randn(5, 6, dtype=torch.float64), keys_of(5)

    def plain(x):
        return model(model(model(x)))

    def checkpointed(x):
        for _ in range(3):  # the same layers three times, recomputed in the reverse order
            x = checkpoint(model, x, use_reentrant=reentrant)
        return x

    expected = gradients(plain, model, x, keys)
    for a, b in zip(gradients(checkpointed, model, x, keys), expected, strict=True):
        assert torch.equal(a, b)


def test_a_recomputation_on_another_thread_finds_the_keys():
    """As on a GPU, whose backward runs on a thread of autograd's."""
    drop, x = KeyedDropout(0.5), torch.ones(4, 6, requires_grad=True)
    failures = []

    def backward(y):
        try:
            y.sum().backward()
        except RuntimeError as error:
            failures.append(error)

    with dropout_keys(keys_of(4)):
        y = checkpoint(lambda x: drop(x) * x, x, use_reentrant=False)
        thread = threading.Thread(target=backward, args=(y,))
        thread.start()
        thread.join()
    assert failures == []
    assert torch.equal(x.grad, 2 * y.detach())  # of m·x² at x = 1


def test_checkpointing_without_keys_is_left_to_torch():
    model = Twice().double()
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    keyed(model, x)  # an earlier pass with keys
    torch.manual_seed(3)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    torch.manual_seed(3)
    assert torch.equal(torch.autograd.grad(checkpoint(model, x, use_reentrant=False).sum(), x)[0], expected)


def test_a_recomputation_outside_its_keys_is_refused():
    drop, x = KeyedDropout(0.5), torch.randn(4, 6, requires_grad=True)
    y = keyed(lambda x: checkpoint(drop, x, use_reentrant=False), x)
    with pytest.raises(RuntimeError, match=r"recomputed without its keys.*Keep the backward inside"):
        y.sum().backward()


def test_a_recomputation_under_other_keys_is_refused():
    drop, x = KeyedDropout(0.5), torch.randn(4, 6, requires_grad=True)
    y = keyed(lambda x: checkpoint(drop, x, use_reentrant=False), x)
    with pytest.raises(RuntimeError, match="none of that layer's calls"), dropout_keys(keys_of(4)):
        y.sum().backward()


def test_calls_that_cannot_be_told_apart_are_not_recomputed_by_guess():
    drop, x = KeyedDropout(0.5), torch.randn(4, 6, requires_grad=True)
    with dropout_keys(keys_of(4)):
        y = checkpoint(drop, x, use_reentrant=False) + checkpoint(drop, x, use_reentrant=False)
        with pytest.raises(RuntimeError, match="2 of that layer's calls"):
            y.sum().backward()


def test_an_overflow_does_not_hide_which_call_is_recomputed():
    drop = KeyedDropout(0.5)
    xs = [torch.full((4, 6), value, requires_grad=True) for value in (math.nan, math.inf, 1.0)]
    with dropout_keys(keys_of(4)):
        masks = [drop(torch.ones(4, 6)) for _ in xs]
    with dropout_keys(keys_of(4)):
        ys = [checkpoint(drop, x, use_reentrant=False) for x in xs]
        torch.autograd.backward(ys, [torch.ones(4, 6)] * 3)
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)
    for x, mask in zip(xs, masks, strict=True):
        assert torch.equal(x.grad, mask)


# torch.compile


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_has_the_same_masks_for_every_cut(backend):
    model = Twice().double()
    x, keys = torch.randn(6, 6, dtype=torch.float64), keys_of(6)
    expected = gradients(model, model, x, keys)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for a, b in zip(gradients(compiled, model, x, keys), expected, strict=True):
        torch.testing.assert_close(a, b)
    parts = [gradients(compiled, model, x[part], keys[part])[1] for part in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(parts[0] + parts[1], expected[1])


@pytest.mark.slow  # compiles
def test_compiled_checkpointing_repeats_the_masks():
    model = Twice().double()
    x, keys = torch.randn(6, 6, dtype=torch.float64), keys_of(6)
    expected = gradients(model, model, x, keys)

    def recomputed(x):
        return checkpoint(model, x, use_reentrant=False)

    whole = torch.compile(recomputed, backend="aot_eager", fullgraph=True)
    inner = torch.compile(model, backend="aot_eager", fullgraph=True)
    for run in (whole, lambda x: checkpoint(inner, x, use_reentrant=False)):
        for a, b in zip(gradients(run, model, x, keys), expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.slow  # compiles
def test_code_compiled_with_keys_drops_without_them_too():
    drop = KeyedDropout(0.5)
    compiled = torch.compile(drop, backend="aot_eager", fullgraph=True)
    x = torch.ones(100, 50)
    keyed(compiled, x)
    assert_share(compiled(x) != 0, 0.5)
    assert not torch.equal(compiled(x), compiled(x))
    assert torch.equal(keyed(compiled, x), keyed(drop, x))


@pytest.mark.slow  # compiles
def test_compiled_code_is_not_recompiled_by_new_keys():
    graphs = 0

    def counting(graph, _):
        nonlocal graphs
        graphs += 1
        return graph.forward

    model = Twice()
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    outputs = [keyed(compiled, torch.ones(4, 6), keys_of(4, epoch=k)) for k in range(4)]
    assert graphs == 1
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.slow  # compiles
def test_keys_declared_inside_compiled_code_hold_there():
    drop, x, keys = KeyedDropout(0.5), torch.ones(4, 50), keys_of(4)
    compiled = torch.compile(lambda x, keys: keyed(drop, x, keys), backend="aot_eager")
    assert torch.equal(compiled(x, keys), keyed(drop, x, keys))


# What is refused


@pytest.mark.parametrize("keys", [torch.zeros(3), torch.zeros(3, 1, dtype=torch.int64)])
def test_keys_that_are_no_int64_vector_are_refused(keys):
    with pytest.raises(ValueError, match=r"int64 with one axis.*sample_keys"), dropout_keys(keys):
        pass


@pytest.mark.parametrize("shape", [(4, 3), (7, 3), ()])
def test_an_input_whose_rows_are_no_samples_is_refused(shape):
    with pytest.raises(ValueError, match=r"same number of rows for each sample.*3 keys"), dropout_keys(keys_of(3)):
        KeyedDropout(0.5)(torch.ones(shape))


def test_rows_without_keys_are_refused():
    with pytest.raises(ValueError, match="0 keys"), dropout_keys(keys_of(0)):
        KeyedDropPath(0.5)(torch.ones(3, 2))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: KeyedDropout(1.5), "between 0 and 1"),
        (lambda: KeyedDropout(0.5, 4), "dims must be 0"),
        (lambda: KeyedDropout(0.5, stream=-1), "stream must be"),
        (lambda: KeyedDropPath(-0.1), "between 0 and 1"),
        (lambda: KeyedDropPath(0.1, stream=1 << 32), "stream must be"),
    ],
)
def test_impossible_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_copies_have_the_masks_of_the_original_and_nothing_enters_the_state_dict():
    layer = nn.Sequential(KeyedDropout(0.5, stream=3), KeyedDropPath(0.5, stream=4))
    x = torch.ones(6, 20)
    assert torch.equal(keyed(copy.deepcopy(layer), x), keyed(layer, x))
    assert layer.state_dict() == {}
