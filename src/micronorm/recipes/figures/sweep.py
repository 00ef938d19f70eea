"""One network trained by several methods in turn, with a look into it at every epoch."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from micronorm.convert import convert
from micronorm.engine.optimization import SGD, Cosine, Milestones
from micronorm.engine.settings import Settings, describe
from micronorm.nn import GN
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes import digits
from micronorm.recipes.figures.figure import Request, Work
from micronorm.recipes.figures.training import Training
from micronorm.recipes.networks import NETWORKS, build_network
from micronorm.recipes.protocols import TITLES
from micronorm.recipes.recipe import DATA
from micronorm.tasks.classification import open_classification

Method = tuple[NormSpec, WeightSpec | None]

GROUPS = GN(groups=32, min_channels_per_group=4)
"""The paper's rule for CIFAR, min{32, channels/4} groups."""
SEEDS = {"digits": 3, "cifar10": 1}
_MILESTONES = 81 / 164, 122 / 164  # of the authors' CIFAR code, as shares of the run


class Look(Protocol):
    """Looks into a network in training."""

    def first(self) -> AbstractContextManager[None]:
        """A context around the first iteration of an epoch."""
        ...

    def row(self) -> dict[str, Any]:
        """What was seen, after an epoch."""
        ...

    def state(self) -> dict[str, Any]:
        """What the next row depends on."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        ...


def plan(request: Request, *, epochs: Mapping[str, int], seed: int = 0) -> Settings:
    """The digits table's schedule for digits, that of the authors' CIFAR code for CIFAR-10, cut to `epochs`.

    Example:
        >>> plan(Request(dataset="cifar10"), epochs={"cifar10": 164}).schedule
        Milestones(epochs=(81.0, 122.0), factor_each=0.1)
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
    request: Request, methods: Mapping[str, Method], *, networks: Mapping[str, str], epochs: Mapping[str, int]
) -> dict[str, Any]:
    """All that decides the numbers, in JSON's types; ValueError for a network that cannot see the data."""
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
        "training": describe(plan(request, epochs=epochs, seed=request.seed or 0)),
    }


def sweep(
    work: Work, methods: Mapping[str, Method], look: Callable[[nn.Module], Look], *, epochs: Mapping[str, int]
) -> None:
    """Train by each method with each seed, and keep a row per epoch: `numbers["methods"][name]` has a list per seed.

    A row holds `epoch` (from 1), `train_loss`, `train_error` and `test_error` in %, and what the look has seen.
    """
    request, chosen, sheet = work.request, work.settings, work.sheet
    task = open_classification(chosen["dataset"], request.data, device=request.device)
    found = sheet.numbers.setdefault("methods", {})
    for seed in range(chosen["seed"], chosen["seed"] + chosen["seeds"]):
        for name, (norm, weight) in methods.items():
            lists = found.setdefault(name, [])
            if len(lists) <= seed - chosen["seed"]:
                lists.append([])
            rows = lists[seed - chosen["seed"]]
            if len(rows) == chosen["training"]["epochs"]:
                continue
            model = build(chosen["network"], norm, weight, seed=seed, classes=DATA[chosen["dataset"]].classes)
            training = Training(
                model,
                task,
                plan(request, epochs=epochs, seed=seed),
                device=request.device,
                listener=work.listener,
                description=f"{sheet.path.stem}, {name}, seed {seed}",
            )
            _run(work, training, look(model), rows, key=f"{name}, {seed}")


def _run(work: Work, training: Training, eye: Look, rows: list[dict[str, Any]], *, key: str) -> None:
    sheet = work.sheet
    if rows and sheet.state["key"] == key:
        training.load(sheet.state["training"])
        eye.load(sheet.state["look"])
    else:
        rows.clear()
    training.start()
    while training.epoch < training.settings.epochs:
        trained = training.run_epoch(first=eye.first)
        row = {"epoch": training.epoch, "train_loss": trained.loss[0], "train_error": trained.error[0]}
        rows.append({**row, "test_error": training.test().error[0], **eye.row()})
        sheet.keep({"key": key, "training": training.state(), "look": eye.state()})
    work.listener.on_end()


def subject(settings: Mapping[str, Any]) -> str:
    """What was trained on what, for a caption.

    Example:
        >>> subject({"network": "cifar-resnet20", "dataset": "cifar10"})
        'ResNet-20 on CIFAR-10'
    """
    return f"{TITLES[settings['network']]} on {DATA[settings['dataset']].title}"


def average(lists: Sequence[Sequence[Mapping[str, Any]]], *keys: str) -> list[float]:
    """The value under `keys` by epoch, the mean over seeds.

    Example:
        >>> average([[{"a": {"b": 1.0}}], [{"a": {"b": 2.0}}]], "a", "b")
        [1.5]
    """

    def value(row: Any) -> float:
        for key in keys:
            row = row[key]
        return math.nan if row is None else row

    return [sum(map(value, rows)) / len(rows) for rows in zip(*lists, strict=True)]


def build(network: str, norm: NormSpec, weight: WeightSpec | None, *, seed: int, classes: int) -> nn.Module:
    """The converted network; methods with one seed start from the same weights.

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
