"""The main law in training scripts of many kinds: each trains in float64, whole and one sample at a time.

A script is a function that builds a model and returns it with a function `step(pieces, count)`, which makes one
optimizer step from the pieces of a batch. `python -m tests.laws.test_scripts` prints the differences as a table.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import micronorm as mn
from tests.networks import SmallResNet
from tests.tolerances import tolerance

SAMPLES = 6
Piece = tuple[Tensor, Tensor]
Script = tuple[nn.Module, Callable[[Sequence[Piece], int], Any]]
SCRIPTS: dict[str, Callable[[], Script]] = {}
SHAPES: dict[str, tuple[int, ...]] = {}


def script(make: Callable[[], Script] | None = None, *, shape: tuple[int, ...] = (3, 8, 8)) -> Any:
    """Register a script whose samples have this shape."""
    if make is None:
        return partial(script, shape=shape)
    name = make.__name__.strip("_").replace("_", " ")
    SCRIPTS[name], SHAPES[name] = make, shape
    return make


def network(**options: Any) -> nn.Module:
    return SmallResNet(mn.BCN(groups=4, **options), mn.WS(), activation=F.silu).double()


def sequential(*layers: nn.Module, classes: int = 5, width: int = 8, **options: Any) -> nn.Module:
    """Convert these layers, with a pooling and a classifier behind them."""
    return mn.convert(nn.Sequential(*layers, Mean(), nn.Linear(width, classes)), **options).double()


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(2) if x.ndim > 2 else x


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


def accumulate(model: Any, pieces: Sequence[Piece], count: int) -> None:
    for x, y in pieces:
        (loss(model, x, y) / count).backward()


def usual(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Script:
    """Return the script of the README: accumulate, step, zero."""
    optimizer = optimizer or SGD(model.parameters(), 0.02, momentum=0.9)

    def step(pieces: Sequence[Piece], count: int) -> None:
        accumulate(model, pieces, count)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


# --- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_script(name: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def build() -> Script:
        model = network()
        return usual(model, make(model.parameters()))

    SCRIPTS[name], SHAPES[name] = build, (3, 8, 8)


for name, make in {
    "SGD, Nesterov momentum, weight decay": lambda p: SGD(p, 0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda p: AdamW(p, 0.001, eps=1e-3),
    "Adam, fused": lambda p: Adam(p, 0.001, eps=1e-3, fused=True),
    "Adam, amsgrad, one parameter at a time": lambda p: Adam(p, 0.001, eps=1e-3, amsgrad=True, foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.001, eps=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01, eps=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.001, eps=1e-3),
}.items():
    optimizer_script(name, make)


@script
def LBFGS_with_a_closure() -> Script:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.01, max_iter=3)

    def step(pieces: Sequence[Piece], count: int) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            accumulate(model, pieces, count)
            return sum(loss(model, x, y).item() for x, y in pieces) / count

        optimizer.step(closure)

    return model, step


@script
def sharpness_aware_minimization() -> Script:
    model = network()
    optimizer = SGD(model.parameters(), 0.02)

    def step(pieces: Sequence[Piece], count: int) -> None:
        accumulate(model, pieces, count)
        with torch.no_grad():
            moves = [0.01 * p.grad for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        accumulate(model, pieces, count)
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@script
def two_optimizers() -> Script:
    model = network()
    head = SGD(model.head.parameters(), 0.02)
    body = AdamW([p for n, p in model.named_parameters() if not n.startswith("head")], 0.001, eps=1e-3)

    def step(pieces: Sequence[Piece], count: int) -> None:
        accumulate(model, pieces, count)
        for optimizer in (head, body):
            optimizer.step()
            optimizer.zero_grad()

    return model, step


@script
def groups_of_other_rates_and_a_schedule() -> Script:
    model = network()
    norms = [p for p in model.parameters() if p.ndim == 1]
    others = [p for p in model.parameters() if p.ndim > 1]
    optimizer = SGD([{"params": norms, "lr": 0.05}, {"params": others}], 0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.02], total_steps=30)
    _, inner = usual(model, optimizer)

    def step(pieces: Sequence[Piece], count: int) -> None:
        inner(pieces, count)
        schedule.step()

    return model, step


@script
def a_group_added_at_the_third_step() -> Script:
    model = network()
    later = list(model.block2.parameters())
    held = {id(p) for p in later}
    optimizer = SGD([p for p in model.parameters() if id(p) not in held], 0.02, momentum=0.9)
    for p in later:
        p.requires_grad_(False)
    _, inner = usual(model, optimizer)
    done = [0]

    def step(pieces: Sequence[Piece], count: int) -> None:
        done[0] += 1
        if done[0] == 3:
            for p in later:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": later})
        inner(pieces, count)

    return model, step


@script
def clipping_by_norm_and_by_value() -> Script:
    model = network()
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)

    def step(pieces: Sequence[Piece], count: int) -> None:
        accumulate(model, pieces, count)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return model, step


@script
def GradScaler_that_skips_a_step() -> Script:
    model: Any = network()
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    done = [0]

    def step(pieces: Sequence[Piece], count: int) -> None:
        done[0] += 1
        for x, y in pieces:
            scaler.scale(loss(model, x, y) / count).backward()
        if done[0] == 2:
            model.head.weight.grad.view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return model, step


# --- averages and teachers --------------------------------------------------------------------------------------------


@script
def a_moving_average_swapped_in_to_evaluate() -> Script:
    model = network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True).eval()
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)

    def step(pieces: Sequence[Piece], count: int) -> None:
        accumulate(model, pieces[:1], count)
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.module.state_dict())
        model.eval()(pieces[0][0])
        model.load_state_dict(own)
        accumulate(model.train(), pieces[1:], count)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)

    return nn.ModuleList([model, average]), step


@script
def a_student_and_its_mean_teacher() -> Script:
    student = network()
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    optimizer = AdamW(student.parameters(), 0.001, eps=1e-3)

    def step(pieces: Sequence[Piece], count: int) -> None:
        for x, _ in pieces:
            target = teacher(x.flip(-1)).softmax(1)
            (-(target * student(x).log_softmax(1)).sum() / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            pairs = zip(teacher.state_dict().values(), student.state_dict().values(), strict=True)
            for old, new in pairs:
                old.lerp_(new, 0.1)

    return nn.ModuleList([student, teacher]), step


@script
def generator_and_discriminator() -> Script:
    up = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)]
    make = mn.convert(nn.Sequential(*up)).double()
    judge = sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(0.2), classes=1)
    makes, judges = (SGD(m.parameters(), 0.02) for m in (make, judge))

    def step(pieces: Sequence[Piece], count: int) -> None:
        for x, _ in pieces:
            fake = make(x.flip(-1)).detach()
            ((F.softplus(judge(fake)) + F.softplus(-judge(x))).sum() / count).backward()
        judges.step()
        judges.zero_grad()
        for x, _ in pieces:
            (F.softplus(-judge(make(x.flip(-1)))).sum() / count).backward()
        makes.step()
        makes.zero_grad()
        judges.zero_grad()

    return nn.ModuleList([make, judge]), step


@script
def a_gradient_penalty() -> Script:
    model = sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), classes=1)
    optimizer = Adam(model.parameters(), 0.001, eps=1e-3)

    def step(pieces: Sequence[Piece], count: int) -> None:
        for x, _ in pieces:
            x = x.clone().requires_grad_()
            score = model(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            ((score.sum() + (slope.flatten(1).norm(dim=1) - 1).square().sum()) / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


# --- how the forward runs ---------------------------------------------------------------------------------------------


def checkpointed(reentrant: bool) -> Script:
    model = network()
    block = model.block1.forward
    model.block1.forward = lambda x: checkpoint(block, x, use_reentrant=reentrant)
    return usual(model)


@script
def checkpointing() -> Script:
    return checkpointed(False)


@script
def reentrant_checkpointing() -> Script:
    return checkpointed(True)


@script
def recomputed_activations() -> Script:
    model = network()
    mn.recompute(model)
    return usual(model)


@script
def compiled() -> Script:
    model = network()
    run = torch.compile(model, backend="aot_eager", dynamic=True)
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)

    def step(pieces: Sequence[Piece], count: int) -> None:
        accumulate(run, pieces, count)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@script
def called_by_functional_call() -> Script:
    model = network()
    optimizer = SGD(model.parameters(), 0.02)

    def step(pieces: Sequence[Piece], count: int) -> None:
        accumulate(lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)), pieces, count)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@script
def gradients_by_autograd_grad() -> Script:
    model = network()
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)

    def step(pieces: Sequence[Piece], count: int) -> None:
        parameters = list(model.parameters())
        totals = [torch.zeros_like(p) for p in parameters]
        for x, y in pieces:
            torch._foreach_add_(totals, torch.autograd.grad(loss(model, x, y) / count, parameters))
        for p, total in zip(parameters, totals, strict=True):
            p.grad = total
        optimizer.step()

    return model, step


@script
def evaluation_between_micro_batches() -> Script:
    model = network()
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)

    def step(pieces: Sequence[Piece], count: int) -> None:
        for x, y in pieces:
            (loss(model, x, y) / count).backward()
            with torch.no_grad():
                model.eval()(x)
            model.train()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@script
def several_losses_and_backward_passes() -> Script:
    model = network()
    optimizer = SGD(model.parameters(), 0.02)

    def step(pieces: Sequence[Piece], count: int) -> None:
        for x, y in pieces:
            outputs = model(x)
            (F.cross_entropy(outputs, y, reduction="sum") / count).backward(retain_graph=True)
            (0.1 * outputs.square().sum() / count).backward()
        (1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


# --- models -----------------------------------------------------------------------------------------------------------


def convolution(before: int = 3, after: int = 8) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]


@script
def a_frozen_stem() -> Script:
    model = nn.Sequential(*convolution(), *convolution(8))
    model[:3].requires_grad_(False)
    with pytest.warns(UserWarning, match="BatchNorm stays"):
        model = sequential(*model)
    model[1].eval()
    return usual(model)


@script
def a_frozen_norm() -> Script:
    model = network()
    model.norm.requires_grad_(False)
    return usual(model)


@script
def a_block_that_is_called_three_times() -> Script:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = nn.Sequential(*convolution()), nn.Sequential(*convolution(8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for _ in range(3):
                x = x + self.block(x)
            return x

    return usual(sequential(Recurrent()))


@script
def two_models_in_one_that_share_a_layer() -> Script:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = network()
            self.right = network()
            self.right.block1 = self.left.block1

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) + self.right(x.flip(-1))

    return usual(Pair())


@script
def encoder_and_decoder_with_transposed_convolutions() -> Script:
    down = [nn.Conv2d(3, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU()]
    up = [nn.ConvTranspose2d(8, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU()]
    return usual(sequential(*down, *up))


@script(shape=(3, 16))
def sequences() -> Script:
    return usual(sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU()))


@script(shape=(3, 4, 4, 4))
def volumes() -> Script:
    return usual(sequential(nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU()))


@script(shape=(12,))
def vectors() -> Script:
    return usual(sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU()))


@script
def channels_last() -> Script:
    return usual(network().to(memory_format=torch.channels_last))


@script
def depthwise_and_grouped_convolutions() -> Script:
    grouped = [nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.Hardswish(), nn.Conv2d(8, 8, 3, groups=2)]
    return usual(sequential(*convolution(), *grouped, nn.BatchNorm2d(8)))


@script
def group_norm() -> Script:
    return usual(sequential(*convolution(), *convolution(8), norm=mn.GN(groups=2)))


@script
def a_warm_start() -> Script:
    return usual(sequential(*convolution(), *convolution(8), warm_steps=10))


@script
def a_zero_start() -> Script:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.branch = nn.Sequential(*convolution()), nn.Sequential(*convolution(8)[:2])

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return F.relu(x + self.branch(x))

    return usual(sequential(Residual(), zero_init_residual=True))


@script
def bias_correction() -> Script:
    return usual(network(bias_correction=True))


@script
def a_float_rate() -> Script:
    return usual(network(rate=0.3))


@script
def attached_and_committed_by_hand() -> Script:
    model = network()
    handle = mn.attach(model, rate=0.1)

    def step(pieces: Sequence[Piece], count: int) -> None:
        accumulate(model, pieces, count)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.02 * p.grad
                p.grad = None
        handle.commit()

    return model, step


@script
def a_copy_in_mid_accumulation() -> Script:
    model = network()
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)

    def step(pieces: Sequence[Piece], count: int) -> None:
        accumulate(model, pieces[:1], count)
        copy.deepcopy(model).eval()(pieces[0][0])
        accumulate(model, pieces[1:], count)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


# --- the law ----------------------------------------------------------------------------------------------------------

CUTS = {"one by one": [1] * SAMPLES, "unequal, with an empty one": [2, 0, SAMPLES - 2]}
IDLE = "ignore:.*the running estimates do not move:UserWarning"  # of norms that the scripts freeze


def trained(name: str, cut: list[int], steps: int) -> dict[str, Tensor]:
    """Return the state of a script's model after some steps."""
    torch.manual_seed(0)
    model, step = SCRIPTS[name]()
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        images = torch.randn(SAMPLES, *SHAPES[name], generator=generator, dtype=torch.float64)
        labels = torch.randint(5, (SAMPLES,), generator=generator)
        step(list(zip(images.split(cut), labels.split(cut), strict=True)), SAMPLES)
    return copy.deepcopy(model.state_dict())


def difference(cut: dict[str, Tensor], whole: dict[str, Tensor]) -> float:
    """Return the largest difference of a tensor, relative to its maximum. Tensors below 1e-3 count as that large."""
    assert whole.keys() == cut.keys()
    return max(((cut[k] - v).abs().max() / v.abs().max().clamp(min=1e-3)).item() for k, v in whole.items())


def scripts(*, slow: tuple[str, ...] = ()) -> Any:
    names = [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in SCRIPTS]
    return pytest.mark.parametrize("name", names)


@scripts(slow=("compiled",))
def test_a_step_of_any_script_does_not_depend_on_its_cut(name):
    whole = trained(name, [SAMPLES], 1)
    for cut in CUTS.values():
        assert difference(trained(name, cut, 1), whole) <= tolerance("one_step", torch.float64)
    before = trained(name, [SAMPLES], 0)
    moved = {k.rpartition(".")[2] for k, v in before.items() if not torch.equal(v, whole[k])}
    estimates = {"running_mean", "running_var"} if any(k.endswith("running_mean") for k in before) else set()
    assert moved >= {"weight", "bias"} | estimates  # a script that trains nothing would keep every law


@pytest.mark.slow
@pytest.mark.filterwarnings(IDLE)
@scripts()
def test_twenty_steps_of_any_script_do_not_depend_on_their_cuts(name):
    whole = trained(name, [SAMPLES], 20)
    assert difference(trained(name, CUTS["one by one"], 20), whole) <= tolerance("fifty_steps", torch.float64)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or SCRIPTS:
        whole = {steps: trained(name, [SAMPLES], steps) for steps in (1, 20)}
        runs = [*((cut, 1) for cut in CUTS.values()), (CUTS["one by one"], 20)]
        found = [difference(trained(name, cut, steps), whole[steps]) for cut, steps in runs]
        sys.stdout.write(f"| {name} | " + " | ".join(f"{value:.0e}" for value in found) + " |\n")
        sys.stdout.flush()
