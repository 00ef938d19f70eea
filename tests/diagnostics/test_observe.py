"""An observer sees a whole step however it was cut, changes nothing, and leaves nothing behind."""

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import optimizer as optim
from torch.utils.checkpoint import checkpoint

import micronorm as mn
from micronorm.diagnostics.capture import effective_gradients
from micronorm.diagnostics.lipschitz import weight_shares
from micronorm.nn.sharing import SharedWeights
from micronorm.surgery import restore_forwards
from tests.networks import SmallResNet, samples
from tests.tolerances import assert_close_to_max, tolerance

EIGHT = 8
NORMS = {"BCN": mn.BCN(groups=4), "GN": mn.GN(groups=4), "LN": mn.LN(), "IN": mn.IN(), "BN": mn.BN()}


def network(norm: str = "BCN", weight: Any = None, *, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return SmallResNet(NORMS[norm], weight or mn.WS()).to(dtype).train()


def take_step(model: nn.Module, optimizer: Any, cuts: Sequence[int], *, forward: Callable[..., Tensor] | None = None):
    images, labels = samples(count=EIGHT)
    images = images.to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    for x, y in zip(images.split(list(cuts)), labels.split(list(cuts)), strict=True):
        logits = model(x) if forward is None else forward(x)
        (F.cross_entropy(logits, y, reduction="sum") / EIGHT).backward()
    optimizer.step()


def looked_at(model: nn.Module, cuts: Sequence[int] = (EIGHT,), **options: Any) -> dict[str, Any]:
    """The layers of one look at one step."""
    with mn.observe(model) as watch:
        take_step(model, torch.optim.SGD(model.parameters(), lr=0.1), cuts, **options)
    assert watch.latest is not None
    return watch.latest["layers"]


def assert_same_figures(actual: dict[str, Any], expected: dict[str, Any], *, tol: float) -> None:
    """Figures are compared over all layers at once: one that cancelled in one of them has no digits there."""
    assert list(actual) == list(expected)
    by_figure: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for name, row in expected.items():
        assert actual[name].keys() == row.keys()
        for figure, value in row.items():
            if isinstance(value, float):
                by_figure.setdefault((row["kind"], figure), []).append((actual[name][figure], value))
            else:
                assert actual[name][figure] == value, (name, figure)
    for (_, figure), pairs in by_figure.items():
        ours, theirs = torch.tensor(pairs, dtype=torch.float64).unbind(1)
        # Shares are of one, and sigmas the spread of numbers near one: what cancelled there has no digits of its own.
        of_one = figure in ("along", "mean", "rest", "residual", "sigma_mean", "sigma_std")
        assert_close_to_max(ours, theirs, tol=tol, scale=1.0 if of_one else None)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.parameters(), *model.buffers(), *grads, *state, torch.get_rng_state()]


def traces(model: nn.Module) -> list[Any]:
    """What hooks and attributes would be seen in."""
    tables = [(name, sorted(vars(m)), len(m._forward_hooks)) for name, m in model.named_modules()]
    leaves = [p._backward_hooks for p in model.parameters()]
    return [tables, leaves, len(optim._global_optimizer_pre_hooks), len(optim._global_optimizer_post_hooks)]


# --- the law ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["BCN", "GN", "LN", "IN"])
@pytest.mark.parametrize("cuts", [(4, 4), (1,) * EIGHT, (7, 1)])
def test_a_look_does_not_depend_on_how_the_step_was_cut(norm, cuts):
    whole = looked_at(network(norm))
    assert_same_figures(looked_at(network(norm), cuts), whole, tol=tolerance("one_step", torch.float64))


@pytest.mark.parametrize("cuts", [(4, 4), (1,) * EIGHT, (7, 1)])
def test_a_look_at_estimates_that_move_with_every_sample_does_not_depend_on_the_cut_either(cuts):
    def build() -> nn.Module:
        torch.manual_seed(0)
        return SmallResNet(mn.BCN(groups=4, statistics="sequential", rate=0.1), mn.WS()).double().train()

    assert_same_figures(looked_at(build(), cuts), looked_at(build()), tol=tolerance("one_step", torch.float64))


def test_a_look_sees_weights_that_micro_batches_share():
    model = network()
    weights = SharedWeights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = samples(count=EIGHT)
    with mn.observe(model) as watch:
        optimizer.zero_grad()
        with weights.shared():
            for x, y in zip(images.split(2), labels.split(2), strict=True):
                (F.cross_entropy(model(x), y, reduction="sum") / EIGHT).backward()
        optimizer.step()
    assert watch.latest is not None
    expected = looked_at(network(), (2,) * 4)
    assert_same_figures(watch.latest["layers"], expected, tol=tolerance("one_step", torch.float64))


# --- the figures -----------------------------------------------------------------------------------------------------


def test_the_figures_of_a_norm_are_those_of_its_channels():
    torch.manual_seed(1)
    norm = nn.GroupNorm(2, 4).double()
    nn.init.normal_(norm.weight)
    nn.init.constant_(norm.bias[:1], -20)  # never positive
    model = nn.Sequential(norm, nn.ReLU())
    x = torch.randn(5, 4, 6, 6, dtype=torch.float64) * torch.tensor([1, 2, 3, 4.0]).view(4, 1, 1) + 1
    with mn.observe(model) as watch:
        model(x).sum().backward()
        watch.step()
    assert watch.latest is not None
    row = watch.latest["layers"]["0"]
    assert (row["kind"], row["norm"], row["channels"], row["groups"]) == ("norm", "GroupNorm", 4, 2)

    mean, std = x.mean((0, 2, 3)).view(2, 2), x.std((0, 2, 3), correction=0).view(2, 2)
    difference = mean.std(1, correction=0) / std.mean(1)
    plain = F.group_norm(x, 2)
    spread = plain.mean((0, 2, 3)).std(correction=0), plain.std((0, 2, 3), correction=0).log().std(correction=0)
    positive = (F.group_norm(x, 2, norm.weight, norm.bias) > 0).double().mean((0, 2, 3))
    names = ("stat_diff", "stat_diff_worst", "sigma_mean", "sigma_std", "active")
    expected = torch.stack([difference.mean(), difference.max(), *spread, positive.mean()])
    found = torch.tensor([row[name] for name in names], dtype=torch.float64)
    assert_close_to_max(found, expected, tol=tolerance("output", torch.float64))
    assert row["dead"] == int((positive == 0).sum()) >= 1
    assert row["rare"] == int(((positive > 0) & (positive < 0.01)).sum())


@pytest.mark.parametrize("added", [False, True])
def test_the_figures_of_estimates_that_move_are_those_of_what_the_forward_computed(added):
    torch.manual_seed(1)
    norm = mn.nn.BatchChannelNorm(8, 2, statistics="sequential", rate=0.2).double()
    nn.init.normal_(norm.bias)
    x = torch.randn(6, 8, 4, 4, dtype=torch.float64) * 2 + torch.randn(8, 1, 1, dtype=torch.float64)
    shortcut = torch.full_like(x, 100.0) if added else None
    alone = copy.deepcopy(norm)(x)  # γ^c is 1 and β^c is 0
    with mn.observe(norm) as watch:
        norm(x, residual=shortcut).sum().backward()
        watch.step()
    assert watch.latest is not None
    row = watch.latest["layers"][""]

    per_sample = norm._window.passes[-1].estimates
    channel = (x - per_sample.mean[..., None, None]) / (per_sample.var[..., None, None] + norm.eps).sqrt()
    mean, std = channel.mean((0, 2, 3)).view(2, 4), channel.std((0, 2, 3), correction=0).view(2, 4)
    normalized = F.group_norm(channel, 2)
    expected = torch.stack(
        [
            (mean.std(1, correction=0) / std.mean(1)).mean(),
            normalized.mean((0, 2, 3)).std(correction=0),
            (alone > 0).double().mean(),
        ]
    )
    found = torch.tensor([row[name] for name in ("stat_diff", "sigma_mean", "active")], dtype=torch.float64)
    assert_close_to_max(found, expected, tol=tolerance("output", torch.float64))


def test_the_figures_of_a_standardized_weight_are_the_shares_of_its_gradient():
    torch.manual_seed(0)
    conv = mn.nn.WSConv2d(3, 6, 3, eps=0.0).double()
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    effective = conv.effective_weight().detach().requires_grad_()
    conv._conv_forward(x, effective, conv.bias).square().sum().backward()
    assert effective.grad is not None
    g, what = effective.grad.flatten(1), effective.detach().flatten(1)
    total, fan_in = g.square().sum(), g.shape[1]

    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    before = conv.weight.norm().item()
    with mn.observe(conv) as watch:
        conv(x).square().sum().backward()
        optimizer.step()
    assert watch.latest is not None
    row = watch.latest["layers"][""]
    assert (row["kind"], row["weight"]) == ("weight", "WS")
    assert conv.weight.grad is not None
    shares = [(g * what).sum(1).square().sum() / fan_in, g.sum(1).square().sum() / fan_in]
    expected = torch.stack([*(share / total for share in shares), conv.weight.grad.norm()])
    found = torch.tensor([row[name] for name in ("along", "mean", "grad")], dtype=torch.float64)
    assert_close_to_max(found, expected, tol=tolerance("gradient", torch.float64))
    assert row["norm"] == pytest.approx(before, rel=tolerance("output", torch.float64))  # as it was in the forward
    assert row["along"] + row["mean"] + row["rest"] + row["residual"] == pytest.approx(1)


@pytest.mark.parametrize(
    "weight", [mn.WS(), mn.WS(scale=False), mn.WS(center=False), mn.WN(), mn.CWN(), lambda layer: layer]
)
def test_layers_are_divided_into_shares_together_as_they_would_be_alone(weight):
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = SmallResNet(NORMS["GN"], weight).double().train()
        first = model.stem
        if hasattr(first, "absorb"):
            first.absorb()
        return model

    found, model = looked_at(build(), (4, 4)), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with effective_gradients(model) as captured:
        take_step(model, optimizer, (4, 4))
    for name, shares in weight_shares(model, captured).items():
        assert found[name].keys() == shares.figures().keys()
        ours, theirs = ({name: row} for row in (found[name], shares.figures()))
        assert_same_figures(ours, theirs, tol=tolerance("gradient", torch.float64))


def test_a_plain_weight_is_seen_by_its_parameters_gradient():
    layers = looked_at(network("GN", lambda layer: layer))
    rows = [row for row in layers.values() if row["kind"] == "weight"]
    assert [row["weight"] for row in rows] == ["none"] * 7
    assert all(row["along"] + row["mean"] + row["rest"] == pytest.approx(1) for row in rows)
    assert all(row["grad"] > 0 for row in rows)


def test_norms_of_torch_timm_and_micronorm_are_looked_at():
    layers = pytest.importorskip("timm.layers")
    norms: list[nn.Module] = [
        nn.BatchNorm2d(8),
        nn.InstanceNorm2d(8),
        nn.GroupNorm(2, 8),
        layers.BatchNormAct2d(8),
        layers.GroupNormAct(8, num_groups=2),
        layers.LayerNorm2d(8),
        mn.nn.GroupNorm(2, 8),
        mn.nn.BatchChannelNorm(8, 2),
        mn.nn.BatchChannelNormAct(8, 2),
        mn.nn.GhostBatchNorm(8, micro_batch=2),
    ]
    model = nn.Sequential(*norms)
    with mn.observe(model) as watch:
        model(torch.randn(4, 8, 5, 5)).square().sum().backward()
        watch.step()
    assert watch.latest is not None
    rows = list(watch.latest["layers"].values())
    assert [row["norm"] for row in rows] == [type(norm).__name__ for norm in norms]
    assert [row["groups"] for row in rows] == [8, 8, 2, 8, 2, 1, 2, 2, 2, 8]
    assert all(0 < row["active"] < 1 and row["stat_diff"] >= 0 for row in rows)


# --- nothing is changed ----------------------------------------------------------------------------------------------


def fused_network(norm: str) -> nn.Module:
    """Converted, so that norms compute the additions and activations that follow them."""
    torch.manual_seed(0)
    plain = SmallResNet(lambda channels: nn.BatchNorm2d(channels)).double()
    return mn.convert(plain, norm=NORMS[norm]).train()


def run(model: nn.Module, *, every: int | None, half: bool = False) -> list[Tensor]:
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dropout = nn.Dropout(0.25)  # draws from the global generator

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return model(dropout(x)).to(torch.promote_types(x.dtype, torch.float32))

    watch = None if every is None else mn.observe(model, every=every)
    if watch is not None:
        watch.__enter__()
    for _ in range(3):
        take_step(model, optimizer, (4, 4), forward=forward)
    if watch is not None:
        watch.__exit__()
        assert len(watch.rows) == len(range(0, 3, every or 1))
    return everything(model, optimizer)


@pytest.mark.parametrize(
    "build, half, every",
    [
        (lambda: network("BN", lambda layer: layer), False, 1),
        (lambda: network("BCN"), False, 1),
        (lambda: network("BCN"), False, 2),
        (lambda: network("BCN", dtype=torch.float32), True, 1),
        (lambda: fused_network("BCN"), False, 1),
        (lambda: fused_network("GN"), False, 1),
    ],
    ids=["BN", "BCN", "BCN-seldom", "BCN-bfloat16", "BCN-fused", "GN-fused"],
)
def test_a_run_with_an_observer_is_the_run_without_it_to_the_bit(build, half, every):
    for seen, alone in zip(run(build(), every=every, half=half), run(build(), every=None, half=half), strict=True):
        assert torch.equal(seen, alone)


@pytest.mark.parametrize("norm", ["BCN", "GN"])
def test_norms_stay_fused_while_they_are_looked_at_and_are_seen_alone(norm):
    fused, calls = fused_network(norm), []
    plain = fused_network(norm)
    assert restore_forwards(plain) == 3  # the classes' own, which add and activate themselves
    original = type(fused.norm).forward

    def spy(self: nn.Module, x: Tensor, **options: Any) -> Tensor:
        calls.append(sorted(options))
        return original(self, x, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(fused.norm), "forward", spy)
        found = looked_at(fused)
    assert calls.count(["activation", "negative_slope", "residual"]) == 2
    assert ["activation"] in calls
    assert_same_figures(found, looked_at(plain), tol=tolerance("one_step", torch.float64))


def test_nothing_is_left_behind():
    model = network()
    before = traces(model)
    looked_at(model)
    assert traces(model) == before


def test_nothing_is_left_behind_by_an_error_within_a_step_that_is_looked_at():
    model = network()
    before = traces(model)

    def fail(x: Tensor) -> Tensor:
        model(x)
        assert traces(model) != before
        raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        looked_at(model, forward=fail)
    assert traces(model) == before


def test_hooks_are_there_in_the_steps_that_are_looked_at_and_in_no_others():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked = []

    def forward(x: Tensor) -> Tensor:
        hooked.append(any(m._forward_hooks or "onlookers" in vars(m) for m in model.modules()))
        return model(x)

    with mn.observe(model, every=3) as watch:
        for _ in range(5):
            take_step(model, optimizer, (EIGHT,), forward=forward)
    assert hooked == [True, False, False, True, False]
    assert [row["step"] for row in watch.rows] == [1, 4]
    assert watch.steps == 5


def test_a_copy_of_the_model_is_not_looked_at_and_computes_as_it_did():
    model = network()
    images, _ = samples(count=EIGHT)
    with mn.observe(model) as watch:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for other in copies:
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            assert not other(images).any()
        take_step(model, torch.optim.SGD(model.parameters(), lr=0.1), (EIGHT,))
    assert watch.latest is not None
    assert_same_figures(watch.latest["layers"], looked_at(network()), tol=0.0)


# --- what counts -----------------------------------------------------------------------------------------------------


def test_evaluation_in_between_is_not_looked_at():
    expected = looked_at(network())
    model = network()
    images, _ = samples(count=3, seed=5)

    def forward(x: Tensor) -> Tensor:
        model.eval()(images)
        return model.train()(x)

    assert_same_figures(looked_at(model, forward=forward), expected, tol=0.0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_checkpointing_repeats_counts_once(reentrant):
    expected = looked_at(network(), (4, 4))
    model = network()

    def forward(x: Tensor) -> Tensor:
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)  # type: ignore[return-value]

    found = looked_at(model, (4, 4), forward=forward)
    assert_same_figures(found, expected, tol=tolerance("one_step", torch.float64))


def test_what_was_discarded_or_paused_is_not_in_the_look():
    expected = looked_at(network())
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, _ = samples(count=3, seed=5)
    with mn.observe(model) as watch:
        model(images).sum().backward()
        watch.discard()
        with watch.paused():
            model(images).sum().backward()
        take_step(model, optimizer, (EIGHT,))
    assert watch.latest is not None
    assert_same_figures(watch.latest["layers"], expected, tol=0.0)


def test_of_two_optimizers_the_first_counts_until_it_is_given_up():
    model = network()
    head, body = model.head.parameters(), [p for n, p in model.named_parameters() if not n.startswith("head")]
    first, second = torch.optim.SGD(head, lr=0.1), torch.optim.SGD(body, lr=0.1)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with mn.observe(model, every=2) as watch:
        for _ in range(3):
            take_step(model, first, (EIGHT,))
            second.step()
            stranger.step()
        assert watch.steps == 3
        for _ in range(2):  # it had its turn in the last step already
            take_step(model, second, (EIGHT,))
    assert watch.steps == 5


def test_an_optimizer_that_is_gone_makes_room_for_another():
    model = network()
    with mn.observe(model) as watch:
        for _ in range(2):
            take_step(model, torch.optim.SGD(model.parameters(), lr=0.1), (EIGHT,))
        assert watch.steps == 2


def test_steps_without_an_optimizer_of_torch_are_counted_by_hand():
    model = network()
    images, _ = samples(count=EIGHT)
    with mn.observe(model, every=2, start=10) as watch:
        for _ in range(3):
            model(images).sum().backward()
            watch.step()
    assert [row["step"] for row in watch.rows] == [11, 13]


def test_counting_twice_or_outside_of_the_block_is_an_error():
    model = network()
    watch = mn.observe(model)
    with pytest.raises(RuntimeError, match="belongs into the `with` block"):
        watch.step()
    with watch:
        take_step(model, torch.optim.SGD(model.parameters(), lr=0.1), (EIGHT,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        take_step(model, optimizer, (EIGHT,))
        with pytest.raises(RuntimeError, match=r"leave watch\.step\(\) out"):
            watch.step()
        with pytest.raises(RuntimeError, match="at work already"):
            watch.__enter__()


def test_an_optimizer_that_calls_the_model_itself_is_seen_without_the_weights_it_has_moved():
    model = network("GN")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    images, labels = samples(count=EIGHT)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    with mn.observe(model) as watch:
        optimizer.step(closure)  # type: ignore[arg-type]
    assert watch.latest is not None
    assert {row["kind"] for row in watch.latest["layers"].values()} == {"norm"}


@pytest.mark.parametrize("fused", [False, True])
def test_the_norm_of_a_gradient_is_that_without_the_loss_scale(fused):
    images, labels = samples(count=EIGHT)
    found = []
    for scale in (1.0, 1024.0):
        model = network("GN", dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with mn.observe(model) as watch:
            scaler.scale(F.cross_entropy(model(images.float()), labels)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert watch.latest is not None
        found.append(watch.latest["layers"])
    assert_same_figures(*found, tol=tolerance("one_step", torch.float32))


def scaled_step(model: nn.Module, optimizer: Any, scaler: Any, *, overflow: bool, to_none: bool = True) -> None:
    images, labels = samples(count=EIGHT)
    optimizer.zero_grad(set_to_none=to_none)
    loss = F.cross_entropy(model(images.float()), labels)
    scaler.scale(loss * torch.inf if overflow else loss).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_grad_scaler_skips_is_not_counted_and_its_gradients_are_not_seen(fused, every):
    def rows(overflows: Sequence[bool]) -> Any:
        model = network("GN", dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with mn.observe(model, every=every) as watch:
            for overflow in overflows:
                scaled_step(model, optimizer, scaler, overflow=overflow)
        return watch

    expected, watch = rows([False] * 3), rows([True, False, True, True, False, True, False, True])
    assert watch.steps == expected.steps == 3
    assert [row["step"] for row in watch.rows] == [row["step"] for row in expected.rows]
    for found, alone in zip(watch.rows, expected.rows, strict=True):
        assert_same_figures(found["layers"], alone["layers"], tol=tolerance("one_step", torch.float32))


def test_weights_whose_gradients_are_mixed_with_those_of_a_skipped_step_are_left_out():
    model = network("GN", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with mn.observe(model) as watch:
        for overflow in (True, False):  # zeros are no sign that a step has begun
            scaled_step(model, optimizer, scaler, overflow=overflow, to_none=False)
    assert watch.latest is not None
    kinds = {name: row["kind"] for name, row in watch.latest["layers"].items()}
    assert [name for name, kind in kinds.items() if kind == "weight"] == ["head"]


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_shared_weights_are_dropped_with_a_skipped_step_too(fused):
    found = []
    for overflows in ((False,), (True, False)):
        model = network("GN", dtype=torch.float32)
        weights, optimizer = SharedWeights(model), torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        images, labels = samples(count=EIGHT)
        with mn.observe(model) as watch:
            for overflow in overflows:
                optimizer.zero_grad()
                with weights.shared():
                    for x, y in zip(images.float().split(2), labels.split(2), strict=True):
                        loss = F.cross_entropy(model(x), y, reduction="sum") / EIGHT
                        scaler.scale(loss * torch.inf if overflow else loss).backward()
                scaler.step(optimizer)
                scaler.update()
        assert watch.latest is not None
        found.append(watch.latest["layers"])
    assert_same_figures(found[1], found[0], tol=tolerance("one_step", torch.float32))


@pytest.mark.parametrize("hidden", [False, True])
def test_gradients_asked_for_within_a_step_count_unless_their_forwards_are_hidden(hidden):
    def shares(*, asks: bool) -> list[float]:
        torch.manual_seed(0)
        conv = mn.nn.WSConv2d(3, 6, 3).double()
        x, other = torch.randn(2, 4, 3, 5, 5, dtype=torch.float64)
        optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
        with mn.observe(conv) as watch:
            if asks:
                with watch.paused() if hidden else contextlib.nullcontext():
                    torch.autograd.grad(conv(other).square().sum(), list(conv.parameters()))
            conv(x).square().sum().backward()
            optimizer.step()
        assert watch.latest is not None
        return [watch.latest["layers"][""][share] for share in ("along", "mean", "rest")]

    assert (shares(asks=True) == shares(asks=False)) == hidden


@pytest.mark.parametrize("before", [0, 3])
def test_forwards_within_the_step_are_in_the_look_with_those_before_it(before):
    expected = {name: row for name, row in looked_at(network("GN"), (2,) * 4).items() if row["kind"] == "norm"}
    model = network("GN")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = samples(count=EIGHT)[0].split(2)

    def closure() -> None:
        for x in batches[before:]:
            model(x).square().mean().backward()

    with mn.observe(model) as watch:
        for x in batches[:before]:
            model(x).square().mean().backward()
        optimizer.step(closure)  # type: ignore[arg-type]
    assert watch.latest is not None
    assert_same_figures(watch.latest["layers"], expected, tol=tolerance("one_step", torch.float64))


# --- what is given out -----------------------------------------------------------------------------------------------


class Pen:
    """A writer that remembers."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}
        self.histograms: dict[tuple[str, int], Tensor] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value

    def add_histogram(self, tag: str, values: Tensor, global_step: int, bins: Any) -> None:
        self.histograms[tag, global_step] = values


def test_a_writer_gets_figures_and_histograms_and_a_sink_the_rows():
    model, pen, rows = network(), Pen(), []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with mn.observe(model, writer=pen, sink=rows.append) as watch:
        watch.epoch = 3
        take_step(model, torch.optim.SGD(model.parameters(), lr=0.1), (4, 4))
    assert watch.rows == []
    assert rows == [watch.latest]
    assert (rows[0]["step"], rows[0]["epoch"]) == (1, 3)
    layers = rows[0]["layers"]
    assert pen.scalars["stat_diff/down_norm", 1] == layers["down_norm"]["stat_diff"]
    assert pen.scalars["weight_along/down", 1] == layers["down"]["along"]
    drawn = pen.histograms["weights/stem", 1]  # 216 weights: all of them
    assert torch.equal(drawn.sort().values, before["stem.weight"].flatten().sort().values)
    assert pen.histograms["channel_means/down_norm", 1].shape == (16,)


def test_histograms_come_with_every_tenth_look():
    model, pen = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), Pen()
    with mn.observe(model, every=2, writer=pen, start=18) as watch:
        for _ in range(6):
            model(torch.randn(4, 3)).sum().backward()
            watch.step()
    assert sorted({step for _, step in pen.scalars}) == [19, 21, 23]
    assert sorted({step for _, step in pen.histograms}) == [21]


def test_numbers_that_are_not_finite_are_told_and_not_drawn():
    model, pen = network("GN"), Pen()
    with torch.no_grad():
        model.stem.weight[0, 0, 0, 0] = float("nan")
    with mn.observe(model, writer=pen) as watch:
        take_step(model, torch.optim.SGD(model.parameters(), lr=0.1), (EIGHT,))
    assert watch.latest is not None
    assert watch.latest["layers"]["norm"]["stat_diff"] != watch.latest["layers"]["norm"]["stat_diff"]
    assert ("weights/stem", 1) not in pen.histograms


def test_layers_keep_their_names_in_distributed_data_parallel():
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = network()
        expected = looked_at(network(), (4, 4))
        wrapped = nn.parallel.DistributedDataParallel(model)
        found = looked_at(wrapped, (4, 4))
    finally:
        dist.destroy_process_group()
    assert_same_figures(found, expected, tol=tolerance("one_step", torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["BCN", "GN", "BN"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
def test_nothing_waits_for_the_device_before_the_step_ends(norm):
    model = fused_network(norm).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (part.cuda() for part in samples(count=EIGHT))
    with mn.observe(model, every=1) as watch:
        take_step(model, optimizer, (EIGHT,), forward=lambda images: model(images.cuda()).cpu())
        try:
            torch.cuda.set_sync_debug_mode("error")
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                watch._take(scale=None, weights=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
    assert [row["step"] for row in watch.rows] == [1, 2]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_compiled_models_are_refused():
    model = network()
    model.block1.compile()
    with pytest.raises(ValueError, match="compiled code runs no hooks, and 1 modules were, the first is 'block1'"):
        mn.observe(model)
    with pytest.raises(ValueError, match="wrapped in OptimizedModule: compiled code runs no hooks"):
        mn.observe(torch.compile(network()))  # type: ignore[arg-type]


def test_a_step_in_which_nothing_was_seen_warns_once():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mn.observe(model, every=1) as watch:
        with pytest.warns(RuntimeWarning, match="saw no forward of the model in step 1: code that was compiled"):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
    assert watch.rows == []


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"every": 2.0}, TypeError, "every is a number of steps, got 2.0"),
        ({"start": -1}, ValueError, "start must be at least 0, got -1"),
    ],
)
def test_arguments_out_of_range_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        mn.observe(network(), **options)


def test_a_model_with_nothing_to_look_at_is_refused():
    with pytest.raises(ValueError, match="has neither norm layers nor weights"):
        mn.observe(nn.Sequential(nn.ReLU()))
