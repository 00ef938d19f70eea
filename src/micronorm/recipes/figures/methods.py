"""Train one network with several methods, and measure at every epoch."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from micronorm.convert import convert
from micronorm.engine import SGD, Cosine, Execution, Listener, Milestones, Settings, train
from micronorm.engine.settings import describe
from micronorm.nn import GN
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes import digits
from micronorm.recipes.figures.figure import Measurement, Request
from micronorm.recipes.networks import build_network
from micronorm.recipes.protocols import TITLES
from micronorm.recipes.recipe import DATA
from micronorm.tasks.classification import Classification, open_classification

Specs = tuple[NormSpec, WeightSpec | None]
"""What a method converts norms and weights to."""

GROUPS = GN(groups=32, min_channels_per_group=4)
"""The paper's rule for CIFAR: min{32, channels/4} groups."""
SEEDS = {"digits": 3, "cifar10": 1}
_MILESTONES = 81 / 164, 122 / 164  # from the authors' CIFAR code, as shares of the run


class EpochProbe(Protocol):
    """Measures a network that is being trained."""

    def at_start(self, epoch: int) -> dict[str, Any]:
        """Return what to record before the first step of an epoch."""
        ...

    def at_end(self) -> dict[str, Any]:
        """Return what to record after an epoch."""
        ...


def training_settings(request: Request, *, epochs: Mapping[str, int], seed: int = 0) -> Settings:
    """Return the schedule of our table `digits`, or for CIFAR-10 that of the authors' code scaled to `epochs`.

    Example:
        >>> training_settings(Request(dataset="cifar10"), epochs={"cifar10": 164}).schedule.epochs
        (81.0, 122.0)
    """
    dataset = request.dataset or "digits"
    length = request.epochs or epochs[dataset]
    if dataset == "digits":
        optimizer, schedule, step_batch = SGD(lr=digits.LEARNING_RATE), Cosine(), digits.STEP_BATCH
    else:
        optimizer, step_batch = SGD(lr=0.1), 128
        schedule = Milestones(tuple(share * length for share in _MILESTONES))
    return Settings(epochs=length, step_batch=step_batch, optimizer=optimizer, schedule=schedule, seed=seed)


def settings(
    request: Request, methods: Mapping[str, Specs], *, networks: Mapping[str, str], epochs: Mapping[str, int]
) -> dict[str, Any]:
    """Return everything that decides the numbers, in JSON's types."""
    dataset = request.dataset or "digits"
    return {
        "dataset": dataset,
        "network": networks[dataset],
        "seed": 0,
        "seeds": SEEDS[dataset],
        "methods": {
            name: [repr(norm), None if weight is None else repr(weight)] for name, (norm, weight) in methods.items()
        },
        "training": describe(training_settings(request, epochs=epochs)),
    }


def execution(device: torch.device, step_batch: int) -> Execution:
    """Return how figures are trained: a step's samples at once, in channels_last, captured on a GPU."""
    return Execution(device=device, micro_batch=step_batch, channels_last=True, cuda_graph=device.type == "cuda")


def train_methods(
    measurement: Measurement,
    methods: Mapping[str, Specs],
    make_probe: Callable[[nn.Module, Classification, int], EpochProbe],
    *,
    epochs: Mapping[str, int],
) -> None:
    """Train with each method and seed; `numbers["methods"][name]` becomes a list of epochs for each seed.

    An epoch is a mapping with `epoch` (from 1), `train_loss`, `train_error` and `test_error` in %, and what the probe
    measured. The probe is made from the model, the task and the seed. An interrupted measurement keeps the trainings
    that were finished.

    Raises:
        KeyboardInterrupt: a signal stopped the training.
    """
    request, chosen, data = measurement.request, measurement.settings, measurement.data
    task = open_classification(chosen["dataset"], request.data, device=request.device)
    found = data.numbers.setdefault("methods", {})
    for seed in range(chosen["seeds"]):
        for name, (norm, weight) in methods.items():
            seeds = found.setdefault(name, [])
            if len(seeds) > seed:
                continue
            plan = training_settings(request, epochs=epochs, seed=seed)
            model = build(chosen["network"], norm, weight, seed=seed, classes=DATA[chosen["dataset"]].classes)
            recorder = _EpochRecorder(
                make_probe(model, task, seed),
                measurement.listener,
                epochs=chosen["training"]["epochs"],
                description=f"{data.path.stem}, {name}, seed {seed}",
            )
            outcome = train(model, task, plan, execution(request.device, plan.step_batch), listener=recorder)
            if not outcome.finished:
                raise KeyboardInterrupt
            seeds.append(recorder.rows)
            data.save_progress()


class _EpochRecorder(Listener):
    """Record a row per epoch, with what the probe measures; pass all events on to another listener."""

    def __init__(self, probe: EpochProbe, listener: Listener, *, epochs: int, description: str) -> None:
        self.probe, self.listener, self.epochs, self.description = probe, listener, epochs, description
        self.rows: list[dict[str, Any]] = []

    def on_start(self, total_steps: int, start_step: int, description: str) -> None:
        self._begin(0)
        self.listener.on_start(total_steps, start_step, self.description)

    def _begin(self, epoch: int) -> None:
        self.rows.append({"epoch": epoch + 1, **self.probe.at_start(epoch)})

    def on_epoch(self, row: dict[str, Any]) -> None:
        errors = {"train_error": row["train"]["top1"], "test_error": row["test"]["top1"]}
        self.rows[-1] |= {"train_loss": row["train"]["loss"], **errors, **self.probe.at_end()}
        if row["epoch"] + 1 < self.epochs:
            self._begin(row["epoch"] + 1)
        self.listener.on_epoch(row)

    def on_step(self, row: dict[str, Any]) -> None:
        self.listener.on_step(row)

    def on_message(self, text: str) -> None:
        self.listener.on_message(text)

    def on_end(self) -> None:
        self.listener.on_end()


def describe_training(settings: Mapping[str, Any]) -> str:
    """Return what was trained on what, for a caption.

    Example:
        >>> describe_training({"network": "cifar-resnet20", "dataset": "cifar10"})
        'ResNet-20 on CIFAR-10'
    """
    return f"{TITLES[settings['network']]} on {DATA[settings['dataset']].title}"


def mean_over_seeds(seeds: Sequence[Sequence[Mapping[str, Any]]], *keys: str) -> list[float]:
    """Return the value under `keys` by epoch, as the mean over seeds.

    Example:
        >>> mean_over_seeds([[{"a": {"b": 1.0}}], [{"a": {"b": 2.0}}]], "a", "b")
        [1.5]
    """

    def value(row: Any) -> float:
        for key in keys:
            row = row[key]
        return math.nan if row is None else row

    return [sum(map(value, rows)) / len(rows) for rows in zip(*seeds, strict=True)]


def build(network: str, norm: NormSpec, weight: WeightSpec | None, *, seed: int, classes: int) -> nn.Module:
    """Return the converted network; methods with the same seed start from the same weights.

    Example:
        >>> from micronorm.nn import WS
        >>> one, other = (build("digits", GROUPS, weight, seed=0, classes=10) for weight in (None, WS()))
        >>> torch.equal(one.conv.weight, other.conv.weight)
        True
    """
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        plain = build_network(network, classes=classes)
    return convert(plain, norm, weight)
