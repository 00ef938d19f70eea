"""An observer changes nothing, holds nothing up, and leaves nothing behind."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import optimizer as optim

import micronorm as mn
from micronorm.convert.surgery import restore_forwards
from tests.diagnostics.observed import EIGHT, assert_same_figures, fused_network, network, observed_layers, take_step
from tests.networks import samples
from tests.tolerances import tolerance


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.parameters(), *model.buffers(), *grads, *state, torch.get_rng_state()]


def traces(model: nn.Module) -> list[Any]:
    """What hooks and attributes would be seen in."""
    tables = [(name, sorted(vars(m)), len(m._forward_hooks)) for name, m in model.named_modules()]
    leaves = [p._backward_hooks for p in model.parameters()]
    return [tables, leaves, len(optim._global_optimizer_pre_hooks), len(optim._global_optimizer_post_hooks)]


def run(model: nn.Module, *, every: int | None, half: bool = False) -> list[Tensor]:
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dropout = nn.Dropout(0.25)  # draws from the global generator

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return model(dropout(x)).to(torch.promote_types(x.dtype, torch.float32))

    observer = None if every is None else mn.observe(model, every=every)
    if observer is not None:
        observer.__enter__()
    for _ in range(3):
        take_step(model, optimizer, (4, 4), forward=forward)
    if observer is not None:
        observer.__exit__()
        assert len(observer.rows) == len(range(0, 3, every or 1))
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
def test_norms_stay_fused_while_they_are_observed_layers_and_are_seen_alone(norm):
    fused, calls = fused_network(norm), []
    plain = fused_network(norm)
    assert restore_forwards(plain) == 3  # the classes' own, which add and activate themselves
    original = type(fused.norm).forward

    def spy(self: nn.Module, x: Tensor, **options: Any) -> Tensor:
        calls.append(sorted(options))
        return original(self, x, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(fused.norm), "forward", spy)
        found = observed_layers(fused)
    assert calls.count(["activation", "negative_slope", "residual"]) == 6
    assert_same_figures(found, observed_layers(plain), tol=tolerance("one_step", torch.float64))


def test_nothing_is_left_behind():
    model = network()
    before = traces(model)
    observed_layers(model)
    assert traces(model) == before


def test_nothing_is_left_behind_by_an_error_within_a_step_that_is_observed_layers():
    model = network()
    before = traces(model)

    def fail(x: Tensor) -> Tensor:
        model(x)
        assert traces(model) != before
        raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        observed_layers(model, forward=fail)
    assert traces(model) == before


def test_hooks_are_there_in_the_steps_that_are_observed_layers_and_in_no_others():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked = []

    def forward(x: Tensor) -> Tensor:
        hooked.append(any(m._forward_hooks or "weight_observers" in vars(m) for m in model.modules()))
        return model(x)

    with mn.observe(model, every=3) as observer:
        for _ in range(5):
            take_step(model, optimizer, (EIGHT,), forward=forward)
    assert hooked == [True, False, False, True, False]
    assert [row["step"] for row in observer.rows] == [1, 4]
    assert observer.steps == 5


def test_a_copy_of_the_model_is_not_observed_layers_and_computes_as_it_did():
    model = network()
    images, _ = samples(count=EIGHT)
    with mn.observe(model) as observer:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for other in copies:
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            assert not other(images).any()
        take_step(model, torch.optim.SGD(model.parameters(), lr=0.1), (EIGHT,))
    assert observer.latest is not None
    assert_same_figures(observer.latest["layers"], observed_layers(network()), tol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["BCN", "GN", "BN"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
def test_nothing_waits_for_the_device_before_the_step_ends(norm):
    model = fused_network(norm).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (part.cuda() for part in samples(count=EIGHT))
    with mn.observe(model, every=1) as observer:
        take_step(model, optimizer, (EIGHT,), forward=lambda images: model(images.cuda()).cpu())
        try:
            torch.cuda.set_sync_debug_mode("error")
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                observer._compute(scale=None, weights=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
    assert [row["step"] for row in observer.rows] == [1, 2]
