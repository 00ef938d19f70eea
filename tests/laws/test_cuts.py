"""The law that makes the product: a step does not depend on how its samples were cut up."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import micronorm as mn
from tests.networks import SAMPLES, SmallResNet, assert_same_state, samples, train
from tests.tolerances import tolerance

NORMS = {
    "GN": mn.GN(groups=4),
    "LN": mn.LN(),
    "BCN": mn.BCN(groups=4),
    "BCN at a float rate": mn.BCN(groups=4, rate=0.3),
    "BCN with bias correction": mn.BCN(groups=4, bias_correction=True),
}
WEIGHTS = {"plain": None, "WS": mn.WS()}

norms = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
weights = pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())


@st.composite
def cuts(draw):
    """24 as a sum of positive numbers."""
    marks = sorted(draw(st.sets(st.integers(1, SAMPLES - 1))))
    return [b - a for a, b in zip([0, *marks], [*marks, SAMPLES], strict=True)]


@norms
@weights
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@given(cut=cuts(), lr=st.floats(0.001, 0.5))
@settings(max_examples=6)
def test_a_step_does_not_depend_on_how_its_samples_were_cut(norm, weight, dtype, cut, lr):
    model = SmallResNet(norm, weight)
    whole = train(model, [SAMPLES], lr=lr, dtype=dtype)
    assert_same_state(train(model, cut, lr=lr, dtype=dtype), whole, tol=tolerance("one_step", dtype))


def slow_but(*kept: str):
    """Every norm with plain and standardized weights; all but the named pairs are for the slow lane."""
    pairs = {f"{n}, {w}": (NORMS[n], WEIGHTS[w]) for n in NORMS for w in WEIGHTS}
    marks = {name: () if name in kept else pytest.mark.slow for name in pairs}
    cases = [pytest.param(*pair, id=name, marks=marks[name]) for name, pair in pairs.items()]
    return pytest.mark.parametrize("norm, weight", cases)


@slow_but("GN, WS", "BCN, WS")
def test_fifty_steps_do_not_depend_on_their_cuts(norm, weight):
    model = SmallResNet(norm, weight)
    generator = torch.Generator().manual_seed(1)

    def cut(_):
        marks = torch.randperm(SAMPLES - 1, generator=generator)[:5].add(1).sort().values.tolist()
        return [b - a for a, b in zip([0, *marks], [*marks, SAMPLES], strict=True)]

    whole = train(model, [SAMPLES], steps=50, lr=0.02)
    assert_same_state(train(model, cut, steps=50, lr=0.02), whole, tol=tolerance("fifty_steps", torch.float64))


def drift(a, b):
    """The largest relative difference of any tensor."""
    return max(((a[k].double() - b[k].double()).abs().max() / b[k].double().abs().max()).item() for k in b)


@slow_but("BCN, WS")
def test_float32_runs_drift_no_faster_than_a_control_perturbed_by_one_ulp(norm, weight):
    # A smooth activation: with ReLU one sign that flips moves the whole run, in the control or out of it, and the
    # comparison is a lottery.
    model = SmallResNet(norm, weight, activation=F.silu)
    control = copy.deepcopy(model)
    with torch.no_grad():
        for p in control.parameters():
            p.copy_(torch.nextafter(p, torch.where(torch.rand_like(p) < 0.5, -torch.inf, torch.inf)))
    options = {"steps": 10, "lr": 0.05, "dtype": torch.float32}
    whole = train(model, [SAMPLES], **options)
    allowed = 10 * drift(train(control, [SAMPLES], **options), whole)
    assert drift(train(model, [1] * SAMPLES, **options), whole) <= allowed
    assert drift(train(model, [7, 17], **options), whole) <= allowed


@norms
@weights
def test_samples_of_different_sizes_may_share_a_step(norm, weight):
    """Elements weigh equally: 12 images of 8×8, 8 of 6×10 and 4 of 11×5, by size or one by one."""
    x, labels = samples()
    images = list(x[:12])
    images += list(F.interpolate(x[12:20], size=(6, 10), mode="bilinear"))
    images += list(F.interpolate(x[20:], size=(11, 5), mode="bilinear"))
    model = SmallResNet(norm, weight).double()

    def run(cut):
        net = copy.deepcopy(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        start = 0
        for size in cut:
            part = slice(start, start + size)
            loss = F.cross_entropy(net(torch.stack(images[part])), labels[part], reduction="sum") / SAMPLES
            loss.backward()
            start += size
        optimizer.step()
        return net.state_dict()

    whole = run([12, 8, 4])
    for cut in ([1] * SAMPLES, [5, 7, 1, 7, 3, 1]):
        assert_same_state(run(cut), whole, tol=tolerance("one_step", torch.float64))


def test_the_order_of_a_steps_samples_does_not_matter():
    model = SmallResNet().double()
    x, labels = samples()
    order = torch.randperm(SAMPLES)
    results = []
    for index in (torch.arange(SAMPLES), order):
        net = copy.deepcopy(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for part in index.split(7):
            (F.cross_entropy(net(x[part]), labels[part], reduction="sum") / SAMPLES).backward()
        optimizer.step()
        results.append(net.state_dict())
    assert_same_state(results[1], results[0], tol=tolerance("one_step", torch.float64))


@pytest.mark.parametrize("warm", [False, True], ids=["plain", "blending"])
def test_train_and_eval_outputs_are_equal_in_step_mode(warm):
    model = SmallResNet(weight=mn.WS()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if warm:
        for layer in model.modules():
            if isinstance(layer, mn.nn.BatchChannelNorm):
                layer.warm(4)
    for k in range(3):
        x, labels = samples(seed=k)
        model.train()
        trained = model(x)
        (F.cross_entropy(trained, labels)).backward()
        model.eval()
        assert torch.equal(model(x), trained)
        optimizer.step()


def test_a_batch_norm_breaks_the_law_so_the_test_can_fail():
    model = SmallResNet(mn.BN())
    whole = train(model, [SAMPLES], lr=0.1)
    with pytest.raises(AssertionError, match="relative error"):
        assert_same_state(train(model, [7, 17], lr=0.1), whole, tol=tolerance("one_step", torch.float64))


@pytest.mark.parametrize("fused", [None, False, True], ids=["no scaler", "ordinary optimizer", "fused optimizer"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e300], ids=str)
def test_a_sample_that_is_not_finite_is_left_out_of_the_estimates_whatever_the_cut(bad, fused):
    """One bad image of four. With a GradScaler their step is skipped, and the other three join the next window."""
    model = SmallResNet(mn.BCN(groups=4, rate=0.5), mn.WS()).double()
    x, labels = (t[:8] for t in samples())
    x[2, 1, 3, 3] = bad

    def run(cut, first):
        net = copy.deepcopy(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=bool(fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=fused is not None)
        windows = [module._window for module in net.modules() if isinstance(module, mn.nn.BatchChannelNorm)]
        counts = []
        for index in (first, [4, 5, 6, 7]) if scaler.is_enabled() else (first,):
            optimizer.zero_grad()
            for part in torch.tensor(index).split(cut):
                scaler.scale(F.cross_entropy(net(x[part]), labels[part], reduction="sum")).backward()
            counts += [int(window.split.elements) for window in windows]
            if scaler.is_enabled():
                gradient = net.head.weight.grad
                assert gradient is not None
                gradient[0, 0] += torch.inf if index is first else 0  # skip this step in every run
            else:
                optimizer.zero_grad()  # the gradients are not finite, and this test is about the estimates
            scaler.step(optimizer)
            scaler.update()
        lost = [window.lost[0].item() for window in windows]
        return dict(net.named_buffers()), counts, lost

    whole, counts, lost = run(4, [0, 1, 2, 3])
    assert lost == [1] * 6
    for cut in (2, 1):
        pieces, *others = run(cut, [0, 1, 2, 3])
        assert others == [counts, lost]
        assert_same_state(pieces, whole, tol=tolerance("one_step", torch.float64))
    without, clean_counts, _ = run(3, [0, 1, 3])
    assert clean_counts == counts
    assert_same_state(without, whole, tol=tolerance("one_step", torch.float64))
