"""Every layer the contract tests enumerate, taken from the one registry of specs."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import micronorm as mn
from micronorm.nn import SPECS, NormSpec

# The forms of a spec that compute differently; a spec without an entry is tested as SPECS[name]().
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "BN": [{}, {"micro_batch": 2}],
    "SN": [{}, {"micro_batch": 2}],
    "BRN": [{}, {"micro_batch": 2}],
    "FRN": [{}, {"tlu": False}],
    "GN": [{"groups": 4}],
    "EvoNormS0": [{"groups": 4}],
    "BCN": [
        {"groups": 4, "rate": 0.1, "statistics": "step"},
        {"groups": 4, "rate": 0.1, "statistics": "sequential"},
        {"groups": 4, "rate": 0.1, "statistics": "sequential", "micro_batch": 2},
        {"groups": 4, "rate": 0.1, "statistics": "batch"},
    ],
    "WS": [{}, {"scale": False}, {"center": False}],
}
CHANNELS = 8
KINDS: dict[str, Callable[[], nn.Module]] = {
    "Conv1d": lambda: nn.Conv1d(4, 6, 3, groups=2, padding=1),
    "Conv2d": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "Conv3d": lambda: nn.Conv3d(4, 6, (1, 2, 3), bias=False),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(4, 6, 3, groups=2, padding=1),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1),
    "ConvTranspose3d": lambda: nn.ConvTranspose3d(4, 6, 2, bias=False),
    "Linear": lambda: nn.Linear(4, 6),
}
SHAPES = {1: (2, 4, 5), 2: (2, 4, 5, 5), 3: (2, 4, 2, 5, 5)}


@dataclass(frozen=True)
class Case:
    """One layer under test: how to make it and an input shape it takes."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    torchs_own: bool = False
    """The layer is torch's: what it does at the edges is torch's affair."""

    def __str__(self) -> str:
        return self.name

    def layer(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The layer with parameters that are neither ones nor zeros, and statistics that are not (0, 1)."""
        torch.manual_seed(0)
        made = self.make().to(dtype)
        with torch.no_grad():
            if isinstance(made, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear) or "Transpose" in type(made).__name__:
                return made
            for p in made.parameters():
                p.add_(torch.randn_like(p) * 0.3)
            for name, buffer in made.named_buffers():
                if name in ("running_mean", "running_var"):
                    buffer.add_(torch.rand_like(buffer) * 0.3)
        return made

    def input(self, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] | None = None) -> Tensor:
        torch.manual_seed(1)
        return (torch.randn(shape or self.shape, dtype=torch.float64) * 1.5 + 0.7).to(dtype)


def _norm_cases() -> list[Case]:
    cases = []
    for name, spec in SPECS.items():
        if not issubclass(spec, NormSpec):
            continue
        for options in VARIANTS.get(name, [{}]):
            made = spec(**options)  # refused here, not in a test, if the registry and VARIANTS disagree
            label = name + "".join(f" {k}={v}" for k, v in options.items() if k not in ("groups", "rate"))
            own = type(made(CHANNELS)).__module__.startswith("torch.")
            cases.append(Case(label, lambda made=made: made(CHANNELS), (4, CHANNELS, 5, 3), own))
    return cases


def _weight_cases() -> list[Case]:
    cases = []
    for name, spec in SPECS.items():
        if issubclass(spec, NormSpec):
            continue
        for options in VARIANTS.get(name, [{}]):
            made: Any = spec(**options)
            for kind, plain in KINDS.items():
                dims = int(kind[-2]) if kind != "Linear" else 1
                label = f"{name}{kind}" + "".join(f" {k}={v}" for k, v in options.items())
                shape = (3, 4) if kind == "Linear" else SHAPES[dims]
                cases.append(Case(label, lambda plain=plain, made=made: made(plain()), shape))
    return cases


NORMS = _norm_cases()
OURS = [case for case in NORMS if not case.torchs_own]
"""Norms that are not torch's, those given by --spec included."""
HOUSE = [case for case in OURS if SPECS[case.name.split()[0]].__module__.startswith("micronorm.")]
"""The norms of micronorm, whose messages and repr follow the rules of the house."""
WEIGHTS = _weight_cases()
ALL = NORMS + WEIGHTS


def as_function(layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The layer as a pure function of its input and parameters: every call starts from the same buffers."""
    names = [name for name, _ in layer.named_parameters()]
    values = tuple(p.detach().clone().requires_grad_() for p in layer.parameters())

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(copy.deepcopy(layer), dict(zip(names, parameters, strict=True)), (x,))

    return function, values


def run(layer: nn.Module, x: Tensor, g: Tensor | None = None) -> dict[str, Tensor]:
    """Output, all gradients, and all buffers after one training forward and backward."""
    x = x if x.requires_grad else x.detach().requires_grad_()
    y = layer(x)
    if g is None:
        torch.manual_seed(2)
        g = torch.randn(y.shape, dtype=torch.float64).to(y.dtype)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    grads = torch.autograd.grad(y, (x, *parameters), g, allow_unused=True)
    result = {"y": y.detach(), "x.grad": grads[0]}
    result |= {f"{n}.grad": d for n, d in zip(names, grads[1:], strict=True) if d is not None}
    return result | {n: b.clone() for n, b in layer.named_buffers() if b.is_floating_point()}


assert {case.name.split()[0] for case in NORMS} == {n for n, s in SPECS.items() if issubclass(s, NormSpec)}
assert mn.nn.SPECS is SPECS
