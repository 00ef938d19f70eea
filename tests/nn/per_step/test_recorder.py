"""Which of the tensors that autograd saves are recognised, and which must not be."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import micronorm as mn
from micronorm.nn.per_step.recorder import Spared, active
from tests.nn.per_step.storages import equal, gradients, kept


class Net(nn.Module):
    """A convolution and a normalization, and what a test makes of them."""

    def __init__(self, body, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.next = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.other = mn.nn.BatchChannelNorm(4, 2, **options), mn.nn.BatchChannelNorm(4, 2)
        self.head = nn.Linear(4 * 36, 2)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.conv(x))


def compare(body, **options) -> Spared:
    """The report of a network under `recompute`, once its gradients and the bytes it keeps were found right."""
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    plain, sparing = Net(body, **options), Net(body, **options)
    handle = mn.recompute(sparing)
    assert equal(gradients(plain, x), gradients(sparing, x))
    assert kept(plain, x) - kept(sparing, x) == handle.report().bytes
    return handle.report()


# What follows the normalization, and how many tensors are then not kept. ReLU saves its result, which the next
# convolution saves too. The others save their input, the normalized tensor, and their result is kept.
FOLLOWERS = {
    "nothing": (lambda y: y, 1),
    "relu": (F.relu, 1),
    "relu in place": (lambda y: F.relu(y, inplace=True), 1),
    "relu twice": (lambda y: F.relu(F.relu(y)), 2),
    "leaky": (lambda y: F.leaky_relu(y, 0.2), 1),
    "leaky in place": (lambda y: F.leaky_relu(y, 0.2, inplace=True), 0),
    "silu": (F.silu, 1),
    "gelu": (F.gelu, 1),
}


@pytest.mark.parametrize("name", FOLLOWERS)
def test_relu_is_followed_and_other_functions_keep_their_result(name):
    follow, tensors = FOLLOWERS[name]
    assert compare(lambda net, x: net.next(follow(net.norm(x)))).tensors == tensors


def changed_before_relu(net: "Net", x: Tensor) -> Tensor:
    y = net.norm(x)
    with torch.no_grad():
        y.add_(1.0)
    return net.next(F.relu(y))


def changed_before_relu_in_place(net: "Net", x: Tensor) -> Tensor:
    y = net.norm(x)
    with torch.no_grad():
        y.add_(1.0)
    return net.next(F.relu(y, inplace=True))


def changed_after_two_functions(net: "Net", x: Tensor) -> Tensor:
    y = F.gelu(F.silu(net.norm(x)))
    with torch.no_grad():
        y.mul_(0.5)
    return net.next(y)


def changed_between_relu_and_its_use(net: "Net", x: Tensor) -> Tensor:
    y = net.norm(x)
    z = F.relu(y)
    with torch.no_grad():
        y.add_(1.0)  # z keeps its values
    return net.next(z) + net.next(y)


@pytest.mark.parametrize(
    "body, tensors",
    [
        (changed_before_relu, 0),
        (changed_before_relu_in_place, 0),
        (changed_after_two_functions, 1),  # SiLU's input
        (changed_between_relu_and_its_use, 1),
    ],
)
def test_writes_without_grad_mode_are_noticed_before_and_after_an_activation(body, tensors):
    assert compare(body).tensors == tensors


def test_relus_own_mask_is_that_of_its_result_before_a_later_write():
    def by_write(net: Net, x: Tensor) -> Tensor:
        y = F.relu(net.norm(x))
        with torch.no_grad():
            y.sub_(0.5)  # plain autograd refuses this: it kept y itself for ReLU's backward
        return net.next(y)

    def by_sum(net: Net, x: Tensor) -> Tensor:
        y = F.relu(net.norm(x))
        return net.next(y + torch.full_like(y, -0.5))

    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    written = Net(by_write)
    mn.recompute(written)
    assert equal(gradients(written, x), gradients(Net(by_sum), x))


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu"])
def test_an_activation_of_the_normalization_itself_is_followed(activation):
    assert compare(lambda net, x: net.next(net.norm(x)), activation=activation).tensors >= 1


@pytest.mark.parametrize(
    "use",
    [
        lambda net, y: net.head(y.flatten(1)),
        lambda net, y: F.max_pool2d(y, 2),
        lambda net, y: net.next(y) * y,
        lambda net, y: net.next(y) + net.next(y[:, :, :4, :4]).sum(),
        lambda net, y: net.next(y.transpose(2, 3)),
        lambda net, y: y.square() + net.next(y.detach()),
    ],
    ids=["linear after flatten", "max-pool", "twice", "slice", "transposed", "detached"],
)
def test_views_and_several_consumers_share_one_formula(use):
    assert compare(lambda net, x: use(net, F.relu(net.norm(x)))).tensors == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.mul_(2),
        lambda y: y.add_(1),
        lambda y: y[:, 0].zero_(),
        lambda y: y.clamp_(max=0.5),
        lambda y: torch.no_grad()(y.mul_)(2),
        lambda y: F.relu_(torch.no_grad()(y.mul_)(2)),
    ],
    ids=["mul_", "add_", "through a view", "clamp_", "without grad", "before the activation"],
)
def test_what_is_written_in_place_after_the_normalization_is_kept(change):
    def body(net: Net, x: Tensor) -> Tensor:
        y = net.norm(x)
        change(y)
        return net.next(y)

    assert compare(body).tensors == 0


def test_what_is_written_in_place_after_the_activation_is_kept():
    def body(net: Net, x: Tensor) -> Tensor:
        y = F.silu(net.norm(x))
        with torch.no_grad():
            y.mul_(2)
        return net.next(y)

    assert compare(body).tensors == 1  # what SiLU saved


def test_dropout_between_is_kept_as_it_was_drawn():
    def body(net: Net, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return net.next(F.dropout(net.norm(x), 0.5))

    assert compare(body).tensors == 0  # its output is no function of x alone


# --- residuals -------------------------------------------------------------------------------------------------------


def test_in_a_chain_of_residual_blocks_every_third_output_is_kept():
    def chain(blocks: int) -> int:
        def body(net: Net, x: Tensor) -> Tensor:
            y = F.avg_pool2d(x, 3, 1, 1)
            for _ in range(blocks):
                branch = net.next(y)
                y = net.other(branch, residual=y, activation="relu")
            return net.next(y)

        return compare(body).tensors

    # The first block's residual is kept by its convolution: its output is one normalization away, the next one's two.
    assert [chain(blocks) for blocks in range(1, 7)] == [1, 2, 2, 3, 4, 4]


def test_a_residual_that_is_normalized_too_is_recomputed_with_it():
    def body(net: Net, x: Tensor) -> Tensor:
        shortcut, branch = net.other(x), net.next(x)
        return net.next(net.norm(branch, residual=shortcut, activation="relu"))

    assert compare(body).tensors == 1


def test_a_sum_outside_of_the_layer_is_kept():
    assert compare(lambda net, x: net.next(F.relu(net.norm(net.next(x)) + x))).tensors == 0


def test_a_residual_that_nobody_keeps_is_not_kept_for_this():
    def body(net: Net, x: Tensor) -> Tensor:
        return net.next(net.norm(x, residual=F.avg_pool2d(x, 3, 1, 1), activation="relu"))

    assert compare(body).tensors == 0


def test_a_residual_that_the_sum_is_written_into_is_no_source():
    def body(net: Net, x: Tensor) -> Tensor:
        shortcut = F.avg_pool2d(x, 3, 1, 1)
        net.unused = net.next(shortcut)  # keeps what is about to be written over
        return net.next(F.relu(shortcut.add_(net.norm(x))))

    assert compare(body).tensors == 0


def test_the_input_of_a_normalization_may_be_a_normalizations_output():
    assert compare(lambda net, x: net.next(net.norm(net.other(x)))).tensors > 0


# --- what was written over -------------------------------------------------------------------------------------------


def test_an_input_that_was_modified_before_the_backward_is_an_error():
    def body(net: Net, x: Tensor) -> Tensor:
        net.input = x
        return net.next(net.norm(x))

    net = Net(body)
    mn.recompute(net)
    loss = net(torch.randn(2, 3, 6, 6)).sum()
    with torch.no_grad():
        net.input.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*\[2, 4, 6, 6\].*expected version 0"):
        loss.backward()


def test_a_weight_that_was_modified_before_the_backward_is_an_error_as_without_recompute():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), mn.nn.BatchChannelNorm(4))
    mn.recompute(model)
    loss = model(torch.randn(2, 3, 6, 6, requires_grad=True)).square().sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- for other normalizations ----------------------------------------------------------------------------------------


def remember(y: Tensor, compute: Callable[..., Tensor], sources: tuple[Tensor, ...]) -> None:
    recorder = active()
    if recorder is not None:  # every body also runs without mn.recompute
        recorder.remember(y, compute, sources)


class Twice(torch.autograd.Function):
    """Saves its input and, as a kernel may that tells its mask from its result, its output."""

    @staticmethod
    def forward(ctx, x):
        y = (x * 2).relu()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 2 * (ctx.saved_tensors[1] > 0)


def test_an_operation_that_saves_its_own_output_may_give_its_formula_afterwards():
    def body(net: Net, x: Tensor) -> Tensor:
        y = Twice.apply(x)
        remember(y, lambda x: (x * 2).relu(), (x,))
        return net.next(y) + net.norm(x)

    assert compare(body).tensors == 1


def test_a_formula_whose_source_nobody_keeps_is_not_used():
    def body(net: Net, x: Tensor) -> Tensor:
        y = x + 1
        remember(y, lambda x: x + 1, (x,))
        return net.next(y)

    assert compare(body).tensors == 0


def test_a_formula_of_another_layout_is_laid_out_as_the_tensor_was():
    def body(net: Net, x: Tensor) -> Tensor:
        y = Twice.apply(x)
        remember(y, lambda x: (x * 2).relu().contiguous(memory_format=torch.channels_last), (x,))
        return net.next(y) + net.norm(x)

    assert compare(body).tensors == 1


def test_outside_a_forward_nothing_is_collected():
    assert active() is None
    model = nn.Sequential(mn.nn.BatchChannelNorm(4), nn.Identity())
    mn.recompute(model)
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(active()))
    x = torch.randn(2, 4, 3, 3)
    model(x)
    with torch.no_grad():
        model(x)
    assert [s is None for s in seen] == [False, True]
    assert active() is None
    assert len(gradients(model, x)) == 4


def test_the_report_prints_as_one_line():
    assert str(Spared(2, 5 << 20)) == "2 activations not kept: 5.0 MiB"
    assert str(Spared(1, 0)) == "1 activation not kept: 0.0 MiB"
