"""Who commits, by how much, and when a step that was skipped commits nothing."""

import copy
import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import micronorm as mn
from micronorm.ops.private_api import TorchDispatchMode
from tests.tolerances import assert_close_to_max


def layer(**options):
    return mn.nn.BatchChannelNorm(4, 2, **options).double()


def data(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (3, 4, 2, 2)), generator=generator, dtype=torch.float64) * 2 + 1


def expected_estimates(parts, rate, mean=None, var=None):
    """The commit, from its definition: all elements of all parts, around the old mean."""
    mean = torch.zeros(4, dtype=torch.float64) if mean is None else mean
    var = torch.ones(4, dtype=torch.float64) if var is None else var
    flat = torch.cat([p.movedim(1, 0).flatten(1) for p in parts], dim=1)
    distance = flat - mean[:, None]
    return mean + rate * distance.mean(1), var + rate * (distance.square().mean(1) - var)


def assert_estimates(norm, parts, rate):
    mean, var = expected_estimates(parts, rate)
    assert_close_to_max(norm.running_mean, mean, tol=1e-14)
    assert_close_to_max(norm.running_var, var, tol=1e-14)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=5),
    rate=st.floats(0, 1),
)
@settings(max_examples=40)
def test_a_commit_moves_by_every_element_of_the_window_equally(sizes, rate):
    norm = layer(rate=rate)
    norm._window.warned = True
    parts = [data(n, 4, h, w, seed=i) for i, (n, h, w) in enumerate(sizes)]
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    for part in parts:
        norm(part)
    optimizer.step()
    if sum(p.shape[0] for p in parts):
        assert_estimates(norm, parts, rate)
    else:
        assert torch.equal(norm.running_mean, torch.zeros(4, dtype=torch.float64))
    before = norm.running_mean.clone()
    optimizer.step()  # the window is empty now
    assert torch.equal(norm.running_mean, before)


def test_the_rate_is_the_learning_rate_of_the_weights_group_as_used_by_the_step():
    norm, other = layer(), layer()
    optimizer = torch.optim.SGD(
        [{"params": [norm.weight], "lr": 0.25}, {"params": other.parameters(), "lr": 0.5}], lr=0.9
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    x = data()
    norm(x)
    other(x)
    optimizer.step()
    scheduler.step()  # moves the rates after the commit has read them
    assert_estimates(norm, [x], 0.25)
    assert_estimates(other, [x], 0.5)


def test_a_learning_rate_above_one_is_clamped_with_one_warning_and_zero_is_legal():
    norm = layer()
    x = data()
    optimizer = torch.optim.SGD(norm.parameters(), lr=3.0)
    norm(x)
    with pytest.warns(UserWarning, match=r"3\.0 is above 1"):
        optimizer.step()
    assert_estimates(norm, [x], 1.0)
    norm(x)
    optimizer.step()  # a second warning would be an error
    still = layer()
    optimizer = torch.optim.SGD(still.parameters(), lr=0.0)
    still(x)
    optimizer.step()
    assert torch.equal(still.running_mean, torch.zeros(4, dtype=torch.float64))


def test_a_learning_rate_may_be_a_tensor():
    norm = layer()
    x = data()
    optimizer = torch.optim.AdamW(norm.parameters(), lr=torch.tensor(0.125), foreach=False)
    norm(x).sum().backward()
    optimizer.step()
    assert_estimates(norm, [x], 0.125)
    optimizer.param_groups[0]["lr"] = torch.tensor([0.0], requires_grad=True)
    optimizer.zero_grad()  # without gradients: older torch refuses such a rate for an update, and we only read it
    norm(x)
    optimizer.step()
    assert_estimates(norm, [x], 0.125)
    assert not norm._window.device_rate.requires_grad


def test_a_frozen_layer_gathers_nothing_and_keeps_its_estimates():
    for statistics in ("step", "sequential"):
        frozen, live = layer(rate=0.5, statistics=statistics), layer(rate=0.5)
        frozen.weight.requires_grad_(False)
        optimizer = torch.optim.SGD([*frozen.parameters(), *live.parameters()], lr=0.1)
        x = data()
        frozen(x)
        live(x)
        optimizer.step()
        assert torch.equal(frozen.running_mean, torch.zeros(4, dtype=torch.float64))
        assert frozen._window.forwards == 0
        assert_estimates(live, [x], 0.5)


def test_without_an_affine_the_optimizer_that_was_given_the_layer_commits_and_changes_no_affine():
    norm, conv = layer(rate=0.5, affine=False), nn.Conv2d(4, 4, 1).double()
    assert not any(p.requires_grad for p in norm.parameters())
    optimizer = torch.optim.SGD([*conv.parameters(), *norm.parameters()], lr=0.1, weight_decay=0.1)
    before = {name: p.clone() for name, p in norm.named_parameters()}
    seen = conv(data())
    norm(seen).square().sum().backward()
    optimizer.step()
    assert_estimates(norm, [seen.detach()], 0.5)
    assert all(torch.equal(p, before[name]) for name, p in norm.named_parameters())


def test_a_layer_frozen_in_mid_window_keeps_its_estimates_and_goes_on_when_thawed():
    norm = layer(rate=0.5)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    norm(data(seed=1))
    norm.weight.requires_grad_(False)
    norm(data(seed=2))
    optimizer.step()
    assert not norm.running_mean.any()
    norm.weight.requires_grad_(True)
    norm(data(seed=3))
    optimizer.step()
    assert_estimates(norm, [data(seed=1), data(seed=3)], 0.5)


def test_a_shallow_copy_does_not_stand_in_the_way_of_the_original():
    norm = layer(rate=0.5)
    twin = copy.copy(norm)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    norm(data())
    optimizer.step()
    assert_estimates(norm, [data()], 0.5)
    assert twin.running_mean is norm.running_mean


@pytest.mark.parametrize("group", [{"lr": None}, {}], ids=["lr is None", "no lr"])
def test_an_optimizer_without_a_learning_rate_is_named(group):
    class Relative(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:
            return None

    norm = layer()
    optimizer = Relative(norm.parameters(), group)
    norm(data())
    with pytest.raises(RuntimeError, match=r"Relative.*no learning rate.*mn\.attach\(model, rate=\.\.\.\)"):
        optimizer.step()
    mn.attach(norm, rate=0.5)
    optimizer.step()
    assert_estimates(norm, [data()], 0.5)


def test_each_of_several_optimizers_commits_the_layers_it_holds():
    first, second = layer(), layer()
    optimizers = [torch.optim.SGD(first.parameters(), lr=0.5), torch.optim.SGD(second.parameters(), lr=0.25)]
    x = data()
    first(x)
    second(x)
    optimizers[0].step()
    assert_estimates(first, [x], 0.5)
    assert torch.equal(second.running_mean, torch.zeros(4, dtype=torch.float64))
    second(x)
    optimizers[1].step()
    assert_estimates(second, [x, x], 0.25)


def test_a_copy_commits_for_itself_and_never_for_the_original():
    norm = layer(rate=0.5)
    x = data()
    norm(x)
    twin = copy.deepcopy(norm)
    assert twin._window.forwards == 0
    assert not twin._window.sums.any()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(x + 5)
    optimizer.step()
    assert_estimates(twin, [x + 5], 0.5)
    assert torch.equal(norm.running_mean, torch.zeros(4, dtype=torch.float64))
    assert norm._window.forwards == 1


def test_a_layer_that_is_gone_leaves_nothing_behind():
    norm, kept = layer(rate=0.5), layer(rate=0.5)
    optimizer = torch.optim.SGD([*norm.parameters(), *kept.parameters()], lr=0.1)
    norm(data())
    kept(data())
    del norm
    gc.collect()
    optimizer.step()
    assert_estimates(kept, [data()], 0.5)


def test_a_layer_used_twice_gathers_both_uses():
    norm = layer(rate=0.5)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    x = data()
    y = norm(x)
    norm(y.detach())
    optimizer.step()
    assert_estimates(norm, [x, y.detach()], 0.5)


def test_a_shallow_copy_used_in_the_same_step_counts_like_the_original():
    norm = layer(rate=0.5)
    twin = copy.copy(norm)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    parts = [data(seed=k) for k in range(3)]
    norm(parts[0])
    twin(parts[1])
    twin(parts[2])
    optimizer.step()
    assert_estimates(norm, parts, 0.5)
    before = norm.running_mean.clone()
    optimizer.step()  # both windows are empty now
    assert torch.equal(norm.running_mean, before)


# --- estimates that change in mid-window ----------------------------------------------------------------------------


def copy_in_place(norm, state):
    for name, tensor in norm.state_dict().items():
        tensor.copy_(state[name])


SWAPS = {
    "load_state_dict": lambda norm, state: norm.load_state_dict(state),
    "assign": lambda norm, state: norm.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True),
    "in place": copy_in_place,
}
swaps = pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS.keys())


@swaps
def test_swapping_averaged_weights_in_to_evaluate_and_back_changes_no_commit(swap):
    norm, control = layer(rate=0.5), layer(rate=0.5)
    for net in (norm, control):
        optimizer = torch.optim.SGD([net.weight], lr=0.0)
        for k in range(2):
            net(data(seed=2 * k))
            if net is norm:
                own = {name: tensor.clone() for name, tensor in net.state_dict().items()}
                swap(net, {name: tensor + 3 for name, tensor in own.items()})
                net.eval()(data(seed=9))
                swap(net.train(), own)
            net(data(seed=2 * k + 1))
            optimizer = torch.optim.SGD([net.weight], lr=0.0)  # "assign" replaces the weight
            optimizer.step()
    assert torch.equal(norm.running_mean, control.running_mean)
    assert torch.equal(norm.running_var, control.running_var)


@swaps
def test_a_commit_moves_the_estimates_it_finds_by_the_whole_window(swap):
    norm = layer(rate=0.25)
    parts = [data(seed=k) for k in range(2)]
    norm(parts[0])
    swap(norm, {name: tensor + 3 for name, tensor in norm.state_dict().items()})
    old = norm.running_mean.clone(), norm.running_var.clone()
    norm(parts[1])
    torch.optim.SGD([norm.weight], lr=0.0).step()
    mean, var = expected_estimates(parts, 0.25, *old)
    assert_close_to_max(norm.running_mean, mean, tol=1e-14)
    assert_close_to_max(norm.running_var, var, tol=1e-14)


# --- GradScaler ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["ordinary", "fused"])
def test_a_skipped_step_commits_nothing_and_its_window_joins_the_next(fused):
    norm = mn.nn.BatchChannelNorm(4, 2, rate=0.5)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    parts = [data(seed=k).float() for k in range(3)]
    for k, part in enumerate(parts):
        optimizer.zero_grad()
        scaler.scale(norm(part).sum() * (torch.inf if k == 1 else 1.0)).backward()
        before = norm.running_mean.clone()
        scaler.step(optimizer)
        scaler.update()
        if k == 1:
            assert torch.equal(norm.running_mean, before)
    # step 0 by its own samples, step 2 by those of the skipped step and its own
    mean, var = expected_estimates([parts[0].double()], 0.5)
    mean, var = expected_estimates([p.double() for p in parts[1:]], 0.5, mean, var)
    assert_close_to_max(norm.running_mean, mean, tol=1e-6)
    assert_close_to_max(norm.running_var, var, tol=1e-6)


# --- what is not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e30])
def test_a_sample_that_is_not_finite_is_left_out_and_counted(bad):
    norm = mn.nn.BatchChannelNorm(4, 2, rate=0.5)
    handle = mn.attach(norm)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    good, spoiled = data().float(), data(seed=1).float()
    spoiled[0] *= bad
    norm(good)
    norm(spoiled)
    optimizer.step()
    mean, var = expected_estimates([good.double(), spoiled[1:].double()], 0.5)
    assert_close_to_max(norm.running_mean, mean, tol=1e-6)
    assert_close_to_max(norm.running_var, var, tol=1e-6)
    with pytest.warns(RuntimeWarning, match="BatchChannelNorm: 1 samples and 0 windows"):
        row = handle.report()[0]
    assert (row.lost_samples, row.lost_windows) == (1, 0)
    handle.report()  # said once
    norm.state_dict()


def test_a_window_whose_estimates_would_overflow_is_dropped_whole_and_counted():
    norm = mn.nn.BatchChannelNorm(4, 2, rate=1.0)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    x = torch.randn(3, 4, 2, 2)
    x[:, 1] = 3e19  # finite in the window's float64, 9e38 in a float32 variance
    norm(x)
    optimizer.step()
    assert torch.equal(norm.running_mean, torch.zeros(4))
    assert torch.equal(norm.running_var, torch.ones(4))
    with pytest.warns(RuntimeWarning, match="0 samples and 1 windows"):
        norm.state_dict()
    norm(torch.ones(1, 4, 2, 2))  # the next window is a new one
    optimizer.step()
    assert torch.equal(norm.running_mean, torch.ones(4))


def test_a_window_whose_sums_overflowed_does_not_spoil_the_next():
    norm = layer(rate=0.5)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    norm(torch.full((6, 4, 5, 5), 2.2e153, dtype=torch.float64))  # the squares of one sample are finite, of six not
    optimizer.step()
    with pytest.warns(RuntimeWarning, match="0 samples and 1 windows"):
        norm.state_dict()
    norm(data())
    optimizer.step()
    assert_estimates(norm, [data()], 0.5)


# --- the guard -------------------------------------------------------------------------------------------------------


def test_a_loop_that_updates_parameters_by_hand_meets_the_guard():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), mn.nn.BatchChannelNorm(4, 2))
    mn.attach(model, max_forwards=3)
    x = torch.randn(2, 3, 4, 4)
    for _ in range(3):
        model(x).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    with pytest.raises(RuntimeError, match=r"1 has gathered 3 training forwards.*mn\.attach") as caught:
        model(x)
    for way_out in ("handle.commit()", "model.eval()", "requires_grad_(False)", "max_forwards=..."):
        assert way_out in str(caught.value)


def test_the_guard_stands_at_1024_forwards():
    norm = mn.nn.BatchChannelNorm(2, 1)
    x = torch.randn(1, 2, 2, 2)
    norm(x)
    norm._window.counter[0] = 1023
    norm(x)
    with pytest.raises(RuntimeError, match="1024"):
        norm(x)
    norm.eval()(x)


def test_a_commit_resets_the_guard():
    norm = mn.nn.BatchChannelNorm(2, 1)
    mn.attach(norm, max_forwards=2)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    for _ in range(6):
        norm(torch.randn(1, 2, 2, 2))
        optimizer.step()
    assert norm._window.forwards == 0


class CountedCalls(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_a_commit_makes_as_many_torch_calls_for_many_layers_as_for_few():
    calls = []
    for count in (2, 20):
        norms = nn.ModuleList(layer() for _ in range(count))
        optimizer = torch.optim.SGD(norms.parameters(), lr=0.1)  # without gradients, its step calls nothing
        optimizer.step()  # makes what later ones reuse
        for norm in norms:
            norm(data())
        with CountedCalls() as counted:
            optimizer.step()
        calls.append(counted.calls)
    assert calls[0] == calls[1] < 100
