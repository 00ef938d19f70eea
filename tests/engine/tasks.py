"""A small task for the tests of the engine, the networks it is learned by, and failures at a chosen operation."""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import micronorm as mn
from micronorm.engine.checkpoint import digest, run_state
from micronorm.engine.dropout import key_dropout
from micronorm.engine.optimization import SGD, Constant
from micronorm.engine.parallel import OneRank
from micronorm.engine.sampling import StepInputs
from micronorm.engine.settings import Execution, Settings
from micronorm.engine.step import Step
from micronorm.ops.keyed import sample_keys, uniforms
from micronorm.tasks.scores import SumScore
from tests.networks import SmallResNet, samples

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sum:
    """What the engine asks of a loss."""

    sum: Tensor
    count: Tensor | int
    counts: Mapping[str, Tensor] = field(default_factory=dict)


class Images:
    """Seeded images; their brightness is an augmentation keyed by sample. Remembers what it was asked for."""

    def __init__(self, count: int, *, seed: int = 0) -> None:
        self.images, self.labels = samples(seed=seed, count=count)
        self.asked: list[tuple[int, list[int]]] = []

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, shares: Iterable[tuple[int, Tensor]], *, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        for epoch, indices in shares:
            self.asked.append((epoch, indices.tolist()))
            bright = 1 + uniforms(sample_keys(indices, seed=seed, epoch=epoch), 1).double()[..., None, None] / 4
            yield self.images[indices] * bright, self.labels[indices]


class Toy:
    """Cross entropy of five classes."""

    sample = "image"
    evaluation_batch = 256

    def __init__(self, train: int = 24, test: int = 10) -> None:
        self.train, self.test = Images(train), Images(test, seed=1)

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> Sum:
        images, labels = batch
        logits = model(images)
        loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction="sum")
        return Sum(loss, len(labels), {"wrong": (logits.argmax(1) != labels).sum()})

    def new_score(self) -> SumScore:
        return SumScore(self.figures)

    def score(self, model: nn.Module, batch: tuple[Any, ...]) -> SumScore:
        loss = self.loss(model, batch)
        return SumScore(self.figures, {"count": torch.tensor(loss.count), "loss": loss.sum, **loss.counts})

    def examples(self, model: nn.Module) -> list[dict[str, Any]]:
        return []

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        count = max(sums["count"], 1)
        return {"loss": sums["loss"] / count, "top1": 100 * sums["wrong"] / count}


class Zoo(nn.Module):
    """Everything that a forward may change: windows, estimates of every kind, running statistics, random numbers."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        ws, c = mn.WS(), channels
        self.stem = ws(nn.Conv2d(3, c, 3, padding=1, bias=False))
        self.step = mn.nn.BatchChannelNorm(c, 2)
        self.sequential = mn.nn.BatchChannelNorm(c, 2, statistics="sequential")
        self.conv = mn.CWN()(nn.Conv2d(c, c, 3, padding=1))
        self.batch = mn.nn.BatchChannelNorm(c, 2, statistics="batch")
        self.plain = nn.BatchNorm2d(c)
        self.ghost = mn.nn.GhostBatchNorm(c, micro_batch=1)
        self.switchable = mn.nn.SwitchableNorm(c)
        self.keyed = nn.Dropout(0.2)
        self.unkeyed = nn.AlphaDropout(0.2)
        self.head = nn.Linear(c, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.sequential(self.step(self.stem(x)).relu())
        x = self.keyed(self.plain(self.batch(self.conv(x))))
        return self.head(self.unkeyed(self.switchable(self.ghost(x))).mean((2, 3)))


class Dropping(nn.Module):
    """The network of the laws with keyed dropout: nothing in it may depend on the cut."""

    def __init__(self, norm: Any = None, weight: Any = None) -> None:
        super().__init__()
        self.net = SmallResNet(norm, weight or mn.WS(), channels=4)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.dropout(x))


def step_inputs(task: Toy, indices: Tensor, *, samples: int | None = None) -> StepInputs:
    """The samples of one step on one rank."""
    batch = next(iter(task.train.load([(0, indices)], seed=0)))
    keys = sample_keys(indices, seed=0, epoch=0)
    return StepInputs(batch, keys, len(indices) if samples is None else samples, len(indices))


def make_step(
    model: nn.Module, task: Any, size: int, *, parallel: OneRank | None = None, lr: float = 0.02, **options: Any
) -> Step:
    """A step over a model in training mode, with an optimizer that has momentum and decay."""
    key_dropout(model)
    execution = Execution(micro_batch=size, channels_last=options.pop("channels_last", False))
    chosen = settings(**{"step_batch": 32, "optimizer": SGD(lr, weight_decay=1e-2), **options})
    return Step(model, task, chosen, execution, parallel or OneRank(CPU))


def settings(**changes: Any) -> Settings:
    """Settings of a short run in float64."""
    chosen = {"epochs": 1, "step_batch": 8, "dtype": torch.float64, **changes}
    return Settings(**{"optimizer": SGD(0.02, weight_decay=1e-2), "schedule": Constant(), **chosen})


def state_digest(step: Step) -> str:
    """Over every bit a run keeps: model, optimizer, scale, windows, random states."""
    return digest(run_state(step, done=0, seed=0))


class FailAt(TorchDispatchMode):
    """Raises when operation number `at` of what runs under it is about to be done; counts them anyway."""

    def __init__(self, at: int | None = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.at, self.done = at, 0
        self.error = error or torch.OutOfMemoryError("injected: out of memory")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.done == self.at:
            raise self.error
        self.done += 1
        return func(*args, **(kwargs or {}))


class Failures:
    """Makes attempts of a step fail: attempt number i at operation `at[i]` of its micro-batches."""

    def __init__(self, step: Step, *at: int, error: BaseException | None = None) -> None:
        self.modes = [FailAt(k, error) for k in at]
        self.step, self.left = step, list(self.modes)
        self.accumulate = step.accumulate

    def __enter__(self) -> "Failures":
        self.step.accumulate = self._accumulate  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        del self.step.accumulate

    def _accumulate(self, step_inputs: StepInputs) -> Any:
        if not self.left:
            return self.accumulate(step_inputs)
        with self.left.pop(0):
            return self.accumulate(step_inputs)


class _Watch(FailAt):
    """Notes which part of a step each operation belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.phases = "weights", []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.phases.append(self.phase)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def around(self, function: Any, before: str, after: str) -> Any:
        def watched(*args: Any) -> Any:
            self.phase = before
            result = function(*args)
            self.phase = after
            return result

        return watched


def operations(step: Step, step_inputs: StepInputs) -> list[str]:
    """Which part of a step each operation of its micro-batches belongs to, in order; the step is not taken."""
    watch, task, backward = _Watch(), step.task, step._backward
    step.savepoint.take()
    step.accumulate(step_inputs)  # what is allocated once and for all is, from here on
    step.roll_back()
    step.task = SimpleNamespace(loss=watch.around(task.loss, "forward", "backward"))  # type: ignore[assignment]
    step._backward = watch.around(backward, "placement", "weights' backward")  # type: ignore[method-assign]
    with watch:
        step.accumulate(step_inputs)
    step.task = task
    del step._backward
    step.roll_back()
    return watch.phases


def random_places(phases: list[str], number: int, *, seed: int = 0) -> list[int]:
    """Operations to fail at: the first of each phase, the last of all, and others at random."""
    draw = random.Random(seed)  # not torch's generator, which the step draws from
    certain = [*(phases.index(phase) for phase in dict.fromkeys(phases)), len(phases) - 1][:number]
    return [*certain, *(draw.randrange(len(phases)) for _ in range(number - len(certain)))]
