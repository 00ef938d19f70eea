"""Train one network with several methods, and measure at every epoch."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from micronorm.convert import convert
from micronorm.engine import Cosine, Execution, Listener, Milestones, Settings, train
from micronorm.engine.settings import Outcome, describe
from micronorm.nn import GN
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes import cifar, digits
from micronorm.recipes.figures.figure import Figure, FigureData, Request
from micronorm.recipes.networks import TITLES, build_network
from micronorm.recipes.protocols import OPTIMIZER
from micronorm.recipes.recipe import DATA
from micronorm.tasks.classification import Classification, open_classification

Specs = tuple[NormSpec, WeightSpec | None]
"""What a method converts norms and weights to."""

GROUPS = GN(groups=32, min_channels_per_group=4)
"""The paper's rule for CIFAR: min{32, channels/4} groups."""
SEEDS = {"digits": 3, "cifar10": 1}
_MILESTONES = 81 / 164, 122 / 164  # from the authors' CIFAR code, as shares of the run


def training_settings(request: Request, *, epochs: Mapping[str, int], seed: int = 0, cosine: bool = False) -> Settings:
    """Return the schedule of our table `digits`, or for CIFAR-10 that of the authors' code scaled to `epochs`.

    Args:
        request: may give another data set and length.
        epochs: the usual length, by data set.
        seed: the seed of the training.
        cosine: use a cosine on CIFAR-10, too.

    Example:
        >>> training_settings(Request(dataset="cifar10"), epochs={"cifar10": 164}).schedule.epochs
        (81.0, 122.0)
    """
    dataset = request.dataset or "digits"
    length = request.epochs or epochs[dataset]
    steps = Milestones(tuple(share * length for share in _MILESTONES))
    return Settings(
        epochs=length,
        step_batch=digits.STEP_BATCH if dataset == "digits" else cifar.STEP_BATCH,
        optimizer=OPTIMIZER,
        schedule=Cosine() if cosine or dataset == "digits" else steps,
        seed=seed,
    )


def train_network(
    name: str, model: nn.Module, task: Classification, plan: Settings, request: Request, listener: Listener, **how: Any
) -> Outcome:
    """Train as figures are trained: a step's samples at once, in channels_last, captured on a GPU.

    Args:
        name: what is trained, for the listener.
        model: trained in place.
        task: its data and loss.
        plan: the schedule.
        request: says on which device.
        listener: receives the events.
        how: further fields of `Execution`.

    Raises:
        KeyboardInterrupt: a signal stopped the training.
    """
    device = request.device
    how |= {"micro_batch": plan.step_batch, "channels_last": True, "cuda_graph": device.type == "cuda"}
    outcome = train(model, task, plan, Execution(device=device, **how), facts={"recipe": name}, listener=listener)
    if not outcome.finished:
        raise KeyboardInterrupt
    return outcome


class EpochRecorder(Listener):
    """Record a row per epoch, and pass all events on to another listener. A figure overrides what it measures.

    Args:
        model: the network in training.
        task: its data and loss.
        plan: its schedule.
        listener: gets all events.
    """

    def __init__(self, model: nn.Module, task: Any = None, plan: Any = None, listener: Listener | None = None) -> None:
        self.model, self.task, self.plan = model, task, plan
        self.listener = listener = listener or Listener()
        self.on_step, self.on_test = listener.on_step, listener.on_test
        self.on_message, self.on_end = listener.on_message, listener.on_end
        self.rows: list[dict[str, Any]] = []

    def before_epoch(self, epoch: int) -> dict[str, Any]:
        """Return what to record before the first step of an epoch."""
        return {}

    def after_epoch(self) -> dict[str, Any]:
        """Return what to record after an epoch."""
        return {}

    def on_start(self, total_steps: int, start_step: int, description: str) -> None:
        """Begin the row of the first epoch."""
        self._begin(0)
        self.listener.on_start(total_steps, start_step, description)

    def _begin(self, epoch: int) -> None:
        self.rows.append({"epoch": epoch + 1, **self.before_epoch(epoch)})

    def on_epoch(self, row: dict[str, Any]) -> None:
        """Complete the row of the epoch, and begin the next one."""
        errors = {"train_error": row["train"]["top1"], "test_error": row["test"]["top1"]}
        self.rows[-1] |= {"train_loss": row["train"]["loss"], **errors, **self.after_epoch()}
        if row["epoch"] + 1 < self.plan.epochs:
            self._begin(row["epoch"] + 1)
        self.listener.on_epoch(row)


def methods_figure(
    methods: Mapping[str, Specs],
    recorder: type[EpochRecorder],
    *,
    networks: Mapping[str, str],
    epochs: Mapping[str, int],
    **fields: Any,
) -> Figure:
    """Return a figure for which a network is trained with each method and seed.

    `numbers["methods"][name]` becomes a list of epochs for each seed. An epoch is a mapping with `epoch` (from 1),
    `train_loss`, `train_error` and `test_error` in %, and what the recorder measured. An interrupted measurement keeps
    the trainings that were finished.

    Args:
        methods: specs by the name of the method.
        recorder: what is measured.
        networks: the network of each data set.
        epochs: the usual length of the training on each data set.
        fields: further fields of `Figure`.
    """

    def settings(request: Request) -> dict[str, Any]:
        dataset = request.dataset or "digits"
        specs = {
            name: [repr(norm), None if weight is None else repr(weight)] for name, (norm, weight) in methods.items()
        }
        return {
            "dataset": dataset,
            "network": networks[dataset],
            "seed": 0,
            "seeds": SEEDS[dataset],
            "methods": specs,
            "training": describe(training_settings(request, epochs=epochs)),
        }

    def measure(request: Request, data: FigureData, listener: Listener) -> None:
        chosen = data.settings
        task = open_classification(chosen["dataset"], request.data, device=request.device)
        found = data.numbers.setdefault("methods", {})
        for seed, (name, (norm, weight)) in product(range(chosen["seeds"]), methods.items()):
            seeds = found.setdefault(name, [])
            if len(seeds) > seed:
                continue
            plan = training_settings(request, epochs=epochs, seed=seed)
            model = build(chosen["network"], norm, weight, seed=seed, classes=DATA[chosen["dataset"]].classes)
            rows = recorder(model, task, plan, listener)
            train_network(f"{data.path.stem}, {name}, seed {seed}", model, task, plan, request, rows)
            seeds.append(rows.rows)
            data.save_progress()

    return Figure(settings=settings, measure=measure, datasets=tuple(networks), **fields)


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
