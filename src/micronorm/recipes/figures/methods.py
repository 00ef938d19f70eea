"""Train one network with several methods, and measure at every epoch."""

import math
import shutil
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
from micronorm.recipes.networks import NETWORKS, build_network
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
    """Return everything that decides the numbers, in JSON's types.

    Raises:
        ValueError: the network does not fit the data set.
    """
    dataset = request.dataset or "digits"
    network = request.network or networks[dataset]
    known = ["digits"] if dataset == "digits" else [name for name in NETWORKS if name.startswith("cifar-")]
    if network not in known:
        raise ValueError(f"no network {network!r} for {dataset}; there are {', '.join(known)}")
    return {
        "dataset": dataset,
        "network": network,
        "seed": request.seed or 0,
        "seeds": SEEDS[dataset],
        "methods": {
            name: [repr(norm), None if weight is None else repr(weight)] for name, (norm, weight) in methods.items()
        },
        "training": describe(training_settings(request, epochs=epochs, seed=request.seed or 0)),
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
    measured. The probe is made from the model, the task and the seed. An interrupted training continues from its last
    checkpoint.

    Raises:
        KeyboardInterrupt: a signal stopped the training.
    """
    request, chosen, data = measurement.request, measurement.settings, measurement.data
    task = open_classification(chosen["dataset"], request.data, device=request.device)
    found = data.numbers.setdefault("methods", {})
    for number, seed in enumerate(range(chosen["seed"], chosen["seed"] + chosen["seeds"])):
        for name, (norm, weight) in methods.items():
            seeds = found.setdefault(name, [])
            if len(seeds) == number:
                seeds.append([])
            rows = seeds[number]
            plan = training_settings(request, epochs=epochs, seed=seed)
            if len(rows) == plan.epochs and "test_error" in rows[-1]:
                continue
            model = build(chosen["network"], norm, weight, seed=seed, classes=DATA[chosen["dataset"]].classes)
            out = data.path.with_name(f"{data.path.stem}.run")
            resume = bool(rows) and out.exists()
            if not resume:
                rows.clear()
                shutil.rmtree(out, ignore_errors=True)
            listener = _EpochRecorder(
                measurement,
                rows,
                make_probe(model, task, seed),
                steps_per_epoch=math.ceil(len(task.train) / plan.step_batch),
                description=f"{data.path.stem}, {name}, seed {seed}",
            )
            where = execution(request.device, plan.step_batch)
            outcome = train(model, task, plan, where, out=out, resume=resume, listener=listener)
            if not outcome.finished:
                raise KeyboardInterrupt
            shutil.rmtree(out)


class _EpochRecorder(Listener):
    """Record a row per epoch in a figure's numbers; pass all events on to the measurement's listener."""

    def __init__(
        self,
        measurement: Measurement,
        rows: list[dict[str, Any]],
        probe: EpochProbe,
        *,
        steps_per_epoch: int,
        description: str,
    ) -> None:
        self.data, self.listener = measurement.data, measurement.listener
        self.rows, self.probe = rows, probe
        self.steps_per_epoch, self.description = steps_per_epoch, description
        self.total_steps = 0

    def on_start(self, total_steps: int, start_step: int, description: str) -> None:
        self.total_steps = total_steps
        epoch = start_step // self.steps_per_epoch
        del self.rows[epoch + 1 :]  # recorded after the checkpoint that the training continues from
        self._begin(epoch)
        self.listener.on_start(total_steps, start_step, self.description)

    def _begin(self, epoch: int) -> None:
        # A training that continues within an epoch keeps what was measured at the epoch's start.
        if len(self.rows) == epoch and epoch * self.steps_per_epoch < self.total_steps:
            self.rows.append({"epoch": epoch + 1, **self.probe.at_start(epoch)})
        self.data.save_progress()

    def on_epoch(self, row: dict[str, Any]) -> None:
        errors = {"train_error": row["train"]["top1"], "test_error": row["test"]["top1"]}
        self.rows[row["epoch"]] |= {"train_loss": row["train"]["loss"], **errors, **self.probe.at_end()}
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
