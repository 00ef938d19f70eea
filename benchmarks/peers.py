"""What is compared: our layer in its modes, and what a user would run instead.

Every method is norm + ReLU on C channels with the same number of groups. The rectifiers are in place, as torchvision
writes them: none of the normalizations before them needs its own output in the backward, and it is the faster form.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torch import nn

import micronorm as mn
from micronorm.nn.bcn import STATISTICS, Statistics

RATE = 0.1  # a float, so that "sequential" needs no optimizer; its value changes no operation


@dataclass(frozen=True)
class Method:
    """One contestant: `build` makes its layer, in the mode it is measured in, from the number of channels."""

    name: str
    mode: str
    build: Callable[[int], nn.Module]
    is_ours: bool = False

    @property
    def label(self) -> str:
        """Name and mode in one."""
        return f"{self.name} ({self.mode})"


def groups_for(channels: int) -> int:
    """The group count of all methods at this width: the library's own rule."""
    return mn.BCN().groups_for(channels)


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(groups_for(channels), channels)


def _bcn(channels: int, mode: str, activation: str | None) -> nn.Module:
    return mn.nn.BatchChannelNorm(
        channels,
        groups_for(channels),
        statistics=cast(Statistics, mode),
        rate=RATE,
        micro_batch=1,
        activation=activation,
    )


def _ours(mode: str) -> tuple[Method, Method]:
    return (
        Method("BCN+ReLU", mode, lambda channels: _bcn(channels, mode, "relu"), is_ours=True),
        Method(
            "BCN then ReLU",
            mode,
            lambda channels: nn.Sequential(_bcn(channels, mode, None), nn.ReLU(inplace=True)),
            is_ours=True,
        ),
    )


def _batch_group(channels: int, *, training: bool) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(channels).train(training), _group_norm(channels), nn.ReLU(inplace=True))


BN_GN = Method("BN>GN>ReLU", "train", lambda channels: _batch_group(channels, training=True))
BN_EVAL_GN = Method("BN>GN>ReLU", "eval", lambda channels: _batch_group(channels, training=False))
BN = Method("BN>ReLU", "train", lambda channels: nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True)))
GN = Method("GN>ReLU", "train", lambda channels: nn.Sequential(_group_norm(channels), nn.ReLU(inplace=True)))

OURS = tuple(method for mode in ("step", "sequential", "batch") for method in _ours(mode))
PEERS = (BN_GN, BN_EVAL_GN, BN, GN)
METHODS = OURS + PEERS

RATIOS = {"to_bn_gn": BN_GN, "to_bn_eval_gn": BN_EVAL_GN, "to_bn": BN}
"""The columns of ratios, and the peer whose median time divides each method's."""

assert {method.mode for method in OURS} == set(STATISTICS)
