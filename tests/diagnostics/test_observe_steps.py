"""Which forwards, gradients and steps count, whatever loop, optimizer or scaler they come from."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import micronorm as mn
from micronorm.nn.per_step.shared_weights import SharedWeights
from tests.diagnostics.observed import EIGHT, assert_same_figures, network, observed_layers, take_step
from tests.networks import samples
from tests.tolerances import tolerance


def test_evaluation_in_between_is_not_observed_layers():
    expected = observed_layers(network())
    model = network()
    images, _ = samples(count=3, seed=5)

    def forward(x: Tensor) -> Tensor:
        model.eval()(images)
        return model.train()(x)

    assert_same_figures(observed_layers(model, forward=forward), expected, tol=0.0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_checkpointing_repeats_counts_once(reentrant):
    expected = observed_layers(network(), (4, 4))
    model = network()

    def forward(x: Tensor) -> Tensor:
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)  # type: ignore[return-value]

    found = observed_layers(model, (4, 4), forward=forward)
    assert_same_figures(found, expected, tol=tolerance("one_step", torch.float64))


def test_what_was_discarded_or_paused_is_not_in_the_row():
    expected = observed_layers(network())
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, _ = samples(count=3, seed=5)
    with mn.observe(model) as observer:
        model(images).sum().backward()
        observer.discard()
        with observer.paused():
            model(images).sum().backward()
        take_step(model, optimizer, (EIGHT,))
    assert observer.latest is not None
    assert_same_figures(observer.latest["layers"], expected, tol=0.0)


def test_of_two_optimizers_the_first_counts_until_it_is_given_up():
    model = network()
    head, body = model.head.parameters(), [p for n, p in model.named_parameters() if not n.startswith("head")]
    first, second = torch.optim.SGD(head, lr=0.1), torch.optim.SGD(body, lr=0.1)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with mn.observe(model, every=2) as observer:
        for _ in range(3):
            take_step(model, first, (EIGHT,))
            second.step()
            stranger.step()
        assert observer.steps == 3
        for _ in range(2):  # it had its turn in the last step already
            take_step(model, second, (EIGHT,))
    assert observer.steps == 5


def test_an_optimizer_that_is_gone_makes_room_for_another():
    model = network()
    with mn.observe(model) as observer:
        for _ in range(2):
            take_step(model, torch.optim.SGD(model.parameters(), lr=0.1), (EIGHT,))
        assert observer.steps == 2


def test_steps_without_an_optimizer_of_torch_are_counted_by_hand():
    model = network()
    images, _ = samples(count=EIGHT)
    with mn.observe(model, every=2, start=10) as observer:
        for _ in range(3):
            model(images).sum().backward()
            observer.step()
    assert [row["step"] for row in observer.rows] == [11, 13]


def test_counting_twice_or_outside_of_the_block_is_an_error():
    model = network()
    observer = mn.observe(model)
    with pytest.raises(RuntimeError, match="inside the `with` block"):
        observer.step()
    with observer:
        take_step(model, torch.optim.SGD(model.parameters(), lr=0.1), (EIGHT,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        take_step(model, optimizer, (EIGHT,))
        with pytest.raises(RuntimeError, match=r"do not call step\(\)"):
            observer.step()
        with pytest.raises(RuntimeError, match="already in use"):
            observer.__enter__()


def test_an_optimizer_that_calls_the_model_itself_is_seen_without_the_weights_it_has_moved():
    model = network("GN")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    images, labels = samples(count=EIGHT)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    with mn.observe(model) as observer:
        optimizer.step(closure)  # type: ignore[arg-type]
    assert observer.latest is not None
    assert {row["kind"] for row in observer.latest["layers"].values()} == {"norm"}


@pytest.mark.parametrize("fused", [False, True])
def test_the_norm_of_a_gradient_is_that_without_the_loss_scale(fused):
    images, labels = samples(count=EIGHT)
    found = []
    for scale in (1.0, 1024.0):
        model = network("GN", dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with mn.observe(model) as observer:
            scaler.scale(F.cross_entropy(model(images.float()), labels)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert observer.latest is not None
        found.append(observer.latest["layers"])
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
        with mn.observe(model, every=every) as observer:
            for overflow in overflows:
                scaled_step(model, optimizer, scaler, overflow=overflow)
        return observer

    expected, observer = rows([False] * 3), rows([True, False, True, True, False, True, False, True])
    assert observer.steps == expected.steps == 3
    assert [row["step"] for row in observer.rows] == [row["step"] for row in expected.rows]
    for found, alone in zip(observer.rows, expected.rows, strict=True):
        assert_same_figures(found["layers"], alone["layers"], tol=tolerance("one_step", torch.float32))


def test_weights_whose_gradients_are_mixed_with_those_of_a_skipped_step_are_left_out():
    model = network("GN", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with mn.observe(model) as observer:
        for overflow in (True, False):  # zeros are no sign that a step has begun
            scaled_step(model, optimizer, scaler, overflow=overflow, to_none=False)
    assert observer.latest is not None
    kinds = {name: row["kind"] for name, row in observer.latest["layers"].items()}
    assert [name for name, kind in kinds.items() if kind == "weight"] == ["head"]


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_shared_weights_are_dropped_with_a_skipped_step_too(fused):
    found = []
    for overflows in ((False,), (True, False)):
        model = network("GN", dtype=torch.float32)
        weights, optimizer = SharedWeights(model), torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        images, labels = samples(count=EIGHT)
        with mn.observe(model) as observer:
            for overflow in overflows:
                optimizer.zero_grad()
                with weights.shared():
                    for x, y in zip(images.float().split(2), labels.split(2), strict=True):
                        loss = F.cross_entropy(model(x), y, reduction="sum") / EIGHT
                        scaler.scale(loss * torch.inf if overflow else loss).backward()
                scaler.step(optimizer)
                scaler.update()
        assert observer.latest is not None
        found.append(observer.latest["layers"])
    assert_same_figures(found[1], found[0], tol=tolerance("one_step", torch.float32))


@pytest.mark.parametrize("hidden", [False, True])
def test_gradients_asked_for_within_a_step_count_unless_their_forwards_are_hidden(hidden):
    def shares(*, asks: bool) -> list[float]:
        torch.manual_seed(0)
        conv = mn.nn.WSConv2d(3, 6, 3).double()
        x, other = torch.randn(2, 4, 3, 5, 5, dtype=torch.float64)
        optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
        with mn.observe(conv) as observer:
            if asks:
                with observer.paused() if hidden else contextlib.nullcontext():
                    torch.autograd.grad(conv(other).square().sum(), list(conv.parameters()))
            conv(x).square().sum().backward()
            optimizer.step()
        assert observer.latest is not None
        return [observer.latest["layers"][""][share] for share in ("along", "mean", "rest")]

    assert (shares(asks=True) == shares(asks=False)) == hidden


@pytest.mark.parametrize("before", [0, 3])
def test_forwards_within_the_step_are_in_the_row_with_those_before_it(before):
    expected = {name: row for name, row in observed_layers(network("GN"), (2,) * 4).items() if row["kind"] == "norm"}
    model = network("GN")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = samples(count=EIGHT)[0].split(2)

    def closure() -> None:
        for x in batches[before:]:
            model(x).square().mean().backward()

    with mn.observe(model) as observer:
        for x in batches[:before]:
            model(x).square().mean().backward()
        optimizer.step(closure)  # type: ignore[arg-type]
    assert observer.latest is not None
    assert_same_figures(observer.latest["layers"], expected, tol=tolerance("one_step", torch.float64))
