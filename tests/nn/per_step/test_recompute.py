"""Models under `mn.recompute`: the same numbers to the bit, from less memory."""

import copy
import gc
import io
import re
import threading

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import micronorm as mn
from tests.nn.per_step.storages import equal, forward, gradients, kept

# torch 2.6 does not say that a checkpoint, or whoever else has hooks for saved tensors, is around the model.
SAYS_WHOSE_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")

NETWORKS = {
    "resnet18": lambda: torchvision.models.resnet18(num_classes=4),
    "resnet50": lambda: torchvision.models.resnet50(num_classes=4),
    "mobilenet": lambda: torchvision.models.mobilenet_v3_small(num_classes=4, dropout=0.0),
    "densenet": lambda: torchvision.models.DenseNet(8, (2, 2), 16, num_classes=4),  # ReLU after the norm, not fused
    "timm resnet": lambda: timm.create_model("resnet18", num_classes=4),
}


def network(name: str = "resnet18") -> nn.Module:
    torch.manual_seed(1)
    return mn.convert(NETWORKS[name]())


def small() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), mn.nn.BatchChannelNorm(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3), nn.Flatten()
    )


def images(count: int = 2, size: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(2), dtype=dtype)


def two_steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The state after two steps, the gradients of the second with it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(len(x))).backward()
        optimizer.step()
    return [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]


# --- the law ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore:a BatchChannelNorm over .* normalizes over groups")
def test_two_steps_give_the_same_bits_and_the_forward_keeps_as_much_less_as_it_says(name):
    x, plain, sparing = images(), network(name), network(name)
    handle = mn.recompute(sparing)
    before, after = kept(plain, x), kept(sparing, x)
    report = handle.report()
    assert report.tensors > 5
    assert before - after == report.bytes > 0
    assert equal(two_steps(plain, x), two_steps(sparing, x))


@pytest.mark.filterwarnings("ignore:a BatchChannelNorm over .* normalizes over groups")
def test_what_a_resnet50_keeps_per_image_is_two_thirds_of_batchnorms():
    def per_image(model: nn.Module) -> int:
        return kept(model, images(2, 128)) - kept(model, images(1, 128))

    torch.manual_seed(1)
    batchnorm, ours = torchvision.models.resnet50(), mn.convert(torchvision.models.resnet50())
    mn.recompute(ours)
    assert per_image(ours) < 0.67 * per_image(batchnorm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_bits_are_the_same_too(dtype):
    x, plain, sparing = images(), small(), small()
    handle = mn.recompute(sparing)
    results = []
    for model in (plain, sparing):
        model.to(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=dtype):
            loss = model(x.to(memory_format=torch.channels_last)).float().square().sum()
        loss.backward()
        results.append([p.grad for p in model.parameters()])
    assert equal(*results)
    assert handle.report().tensors == 1


@pytest.mark.parametrize("statistics", ["step", "sequential", "batch"])
@pytest.mark.parametrize("shape", [(3, 8), (3, 8, 5), (3, 8, 5, 7), (3, 8, 3, 4, 5)])
def test_every_mode_and_rank_gives_the_same_bits(statistics, shape):
    def model() -> nn.Module:
        torch.manual_seed(3)
        norm = mn.nn.BatchChannelNorm(8, 2, statistics=statistics, rate=0.1)
        return nn.Sequential(Scale(8), norm, nn.SiLU(), Scale(8))

    x, plain, sparing = torch.randn(shape, requires_grad=True), model(), model()
    handle = mn.recompute(sparing)
    assert equal(gradients(plain, x), gradients(sparing, x))
    assert handle.report().tensors == 1  # what SiLU saves; its result is kept


class Scale(nn.Module):
    """Multiplies channels: its backward needs its input, of any rank."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.view(-1, *(1,) * (x.ndim - 2))


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [True, False])
def test_everything_is_freed_after_the_backward_or_with_the_graph(backward):
    left = []
    gc.disable()  # what needs the garbage recorder is a cycle
    try:
        for model in (small(), small()):
            if left:
                mn.recompute(model)
            loss, storages = forward(model, images())
            if backward:
                loss.backward()
                model.zero_grad()
            before = storages.alive()
            del loss
            left.append(storages.alive())
            assert backward or left[-1] < before
    finally:
        gc.enable()
    assert left[1] == left[0] < 200  # the windows, which are the layers' own


def test_after_an_error_in_the_forward_nothing_is_held_and_the_next_one_works():
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise MemoryError("out of memory")

    model = small()
    model.append(Failing())
    handle = mn.recompute(model)
    with pytest.raises(MemoryError, match="out of memory"):
        model(images())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.ones(1, requires_grad=True).exp()
    assert len(saved) == 1  # our hooks are gone
    del model[-1]
    assert equal(gradients(model, images()), gradients(small(), images()))
    assert handle.report().tensors == 1


# --- the handle ------------------------------------------------------------------------------------------------------


def test_after_remove_everything_is_kept_again_and_the_report_stays():
    x, model = images(), small()
    everything = kept(model, x)
    with mn.recompute(model) as handle:
        assert kept(model, x) == everything - handle.report().bytes
        loss = model(x).square().sum()
    assert kept(model, x) == everything
    loss.backward()  # of a forward from before
    assert equal([p.grad for p in model.parameters()], gradients(small(), x))
    assert str(handle.report()) == "1 activation not kept: 0.1 MiB"
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_report_before_the_first_forward_is_an_error():
    handle = mn.recompute(model := small())
    with torch.no_grad():
        model(images())
    with pytest.raises(RuntimeError, match=r"call the model in grad mode after mn\.recompute"):
        handle.report()


def test_a_model_without_a_normalization_to_recompute_is_an_error():
    with pytest.raises(ValueError, match=r"Sequential has no BatchChannelNorm.*mn\.convert"):
        mn.recompute(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))


def test_a_handle_of_a_part_has_no_effect_within_the_handle_of_the_whole():
    x, inner = images(), small()
    outer = nn.Sequential(nn.Conv2d(3, 3, 1), mn.nn.BatchChannelNorm(3), nn.Conv2d(3, 3, 1), inner)
    plain = copy.deepcopy(outer)
    whole, part = mn.recompute(outer), mn.recompute(inner)
    assert equal(gradients(outer, x), gradients(plain, x))
    assert whole.report().tensors == 2
    assert kept(plain, x) - kept(outer, x) == whole.report().bytes
    with pytest.raises(RuntimeError, match="nothing to report"):
        part.report()
    inner(x)
    assert part.report().tensors == 1


def test_a_model_that_calls_itself_is_recorded_once():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()[:3]

        def forward(self, x: Tensor, depth: int = 1) -> Tensor:
            y = self.inner(x)
            return y.sum() if depth == 0 else y.square().sum() + self(x + 1, depth - 1)

    plain, sparing = Twice(), Twice()
    handle = mn.recompute(sparing)
    assert equal(gradients(plain, images()), gradients(sparing, images()))
    assert handle.report().tensors == 2
    sparing(images())
    assert handle.report().tensors == 2


def test_a_copied_or_saved_model_recomputes_on_its_own():
    model = small()
    handle = mn.recompute(model)
    gradients(model, images())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    first = handle.report()
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert kept(other, images(4)) < kept(small(), images(4))
        assert handle.report() is first
        handle.remove()
        assert len(other._forward_hooks) == 1


def test_threads_do_not_see_each_other():
    model = small()
    mn.recompute(model)
    plain, sizes = small(), {}

    def other() -> None:
        sizes["thread"] = kept(plain, images())

    class Meanwhile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return x

    model.insert(1, Meanwhile())
    model(images())
    assert sizes["thread"] == kept(small(), images())


# --- beside others ---------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x: Tensor) -> Tensor:
        result = checkpoint(self.model, x, use_reentrant=self.reentrant)
        assert isinstance(result, Tensor)
        return result


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_activation_checkpointing_gives_the_same_bits_and_still_frees_what_it_frees(reentrant, inside):
    x = images().requires_grad_()

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 3, 1), mn.nn.BatchChannelNorm(3), Checkpointed(small(), reentrant=reentrant))

    torch.manual_seed(4)
    plain = model()
    sparing = model()
    sparing.load_state_dict(plain.state_dict())
    mn.recompute(sparing[2].model if inside else sparing)
    assert equal(gradients(plain, x), gradients(sparing, x))
    if not inside or SAYS_WHOSE_HOOKS:
        assert kept(sparing, x) <= kept(plain, x)


def test_offloading_around_the_model_takes_precedence():
    model = small()
    handle = mn.recompute(model)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        loss = model(images()).square().sum()
    loss.backward()
    assert equal([p.grad for p in model.parameters()], gradients(small(), images()))
    if SAYS_WHOSE_HOOKS:
        assert packed
        assert handle.report().tensors == 0


@pytest.mark.parametrize("model", ["x", nn.ReLU, None])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(TypeError, match=rf"a torch\.nn\.Module, got {re.escape(repr(model))}; mn\.recompute\(model\)"):
        mn.recompute(model)


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("outside, backend", [(False, "eager"), (True, "aot_eager")])
def test_compiled_models_are_left_alone(outside, backend):
    plain = torch.compile(small(), backend=backend)
    sparing = small()
    handle = None if outside else mn.recompute(sparing)
    sparing = torch.compile(sparing, backend=backend, fullgraph=True)
    handle = handle or mn.recompute(sparing)
    assert equal(gradients(plain, images()), gradients(sparing, images()))
    if outside:
        assert handle.report().tensors == 0
    else:
        with pytest.raises(RuntimeError, match="Compiled code does not count: recomputation has no effect"):
            handle.report()


@pytest.mark.slow  # compiles
def test_a_compiled_part_is_left_alone_and_the_rest_is_recomputed():
    def model() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Conv2d(3, 3, 1), mn.nn.BatchChannelNorm(3), nn.Conv2d(3, 3, 1), small())

    x, plain, sparing = images(), model(), model()
    for each in (plain, sparing):
        each[3].compile(backend="eager")
    handle = mn.recompute(sparing)
    assert equal(gradients(plain, x), gradients(sparing, x))
    assert handle.report().tensors == 1


def test_double_backward_goes_through_what_was_recomputed():
    torch.manual_seed(6)
    norm = mn.nn.BatchChannelNorm(2, 1, activation="silu")
    model = nn.Sequential(nn.Conv2d(1, 2, 2), norm, nn.Conv2d(2, 1, 1)).double()
    handle = mn.recompute(model)
    x = torch.randn(1, 1, 3, 3, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(model, {"0.weight": weights[0], "2.weight": weights[1]}, (x,))

    with mn.attach(model).paused():
        inputs = (x, model[0].weight.detach().requires_grad_(), model[2].weight.detach().requires_grad_())
        assert torch.autograd.gradcheck(run, inputs)
        assert torch.autograd.gradgradcheck(run, inputs)
    assert handle.report().tensors > 0


def test_create_graph_gives_the_bits_of_the_plain_model():
    results = []
    for model in (small(), small()):
        if results:
            mn.recompute(model)
        x = images().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), list(model.parameters()), allow_unused=True))
    assert equal(*([g for g in result if g is not None] for result in results))


def test_a_graph_that_is_retained_can_be_used_twice():
    model = small()
    mn.recompute(model)
    loss, parameters = model(images()).square().sum(), list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert equal(list(first), list(torch.autograd.grad(loss, parameters)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, parameters)


def test_a_commit_and_a_step_before_the_backward_change_nothing():
    expected = gradients(small(), images())
    model = small()
    handle = mn.attach(model, rate=0.5)
    mn.recompute(model)
    loss = model(images()).square().sum()
    norm = model[1]
    handle.commit()
    assert not torch.equal(norm.running_mean, torch.zeros(8))
    assert equal(list(torch.autograd.grad(loss, list(model.parameters()))), expected)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_ranks_give_the_same_bits(wrap, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        results, handle = [], None
        for model in (small(), small()):
            if wrap == "ddp":
                model = nn.parallel.DistributedDataParallel(model)
            else:
                fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            handle = mn.recompute(model) if results else None
            model(images()).square().sum().backward()
            results.append([getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()])
        assert equal(*results)
        assert handle.report().tensors == 1
    finally:
        torch.distributed.destroy_process_group()


# --- a part of the model ----------------------------------------------------------------------------------------------


def test_a_filter_recomputes_what_it_names_and_nothing_else():
    model, x = network("resnet18"), images()
    expected = two_steps(copy.deepcopy(model), x)
    stem = copy.deepcopy(model)
    handle = mn.recompute(stem, filter=lambda module, name: name == "bn1")
    assert equal(two_steps(stem, x), expected)
    found = handle.report()
    everything = copy.deepcopy(model)
    other = mn.recompute(everything)
    everything(x)
    assert found.tensors == 1
    assert 64 * 16 * 16 * 2 * 4 * 0.9 < found.bytes <= 64 * 16 * 16 * 2 * 4  # the stem's output, less a few numbers
    assert other.report().tensors > 10


def test_a_filter_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match="leaves none of the 1 norms"):
        mn.recompute(small(), filter=lambda module, name: name == "bn1")
