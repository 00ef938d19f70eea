"""Layers by the kernels beside the same by the reference, and the inputs they are compared on."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from micronorm.nn import BatchChannelNorm
from micronorm.ops.bcn.triton import layout, run, tiling
from tests.poison import poison_memory
from tests.tolerances import assert_close_to_max, tolerance

# Tiles of 8 float64 numbers side by side and 128 in all.
_SMALL_TILES = dict.fromkeys(tiling.REDUCE, tiling.PassKind(tile=128, run=64, programs=1024, warps=4))
_FEW_PIECES = 3  # of several tiles each, the last of them shorter


def _small_twice(shape: tiling.Shape, processors: int, **counts: int) -> tiling.Whole:
    """Two groups a program where tiles can hold several, and tiles of eight positions."""
    groups = 2 if tiling.is_power(shape.size) else 1
    programs = shape.samples * -(-shape.groups // groups)
    return tiling.Whole(groups, tiling.next_power(groups * shape.size), 8, programs, 4, 1, twice=True)


def set_scheme(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """Cut the work by this scheme until the test is over, on whatever device.

    "whole": a program holds some groups; "twice": a program goes over some groups twice; "split": two passes; "pieces":
    two passes over pieces of space; "finish": the same, the second of which does the arithmetic between them.
    """
    monkeypatch.setattr(tiling, "twice", _small_twice if scheme == "twice" else lambda *args, **options: None)
    if scheme == "finish":
        monkeypatch.setattr(tiling, "whole", lambda *args, **options: None)
    elif scheme not in ("whole", "twice"):
        monkeypatch.setattr(tiling, "SMALL_BYTES", 0)
    if scheme in ("pieces", "finish"):
        for name in ("REDUCE", "ELEMENTWISE"):
            monkeypatch.setattr(tiling, name, _SMALL_TILES)
        monkeypatch.setattr(tiling, "MOST_PIECES", _FEW_PIECES)
    for kept in ("_forwards", "_backwards"):  # what was chosen before stays for the tests after this one
        monkeypatch.setattr(run, kept, {})


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels do not write is NaN."""
    poison_memory(monkeypatch, (run, layout))


def _sliced(x: Tensor) -> Tensor:
    wide = x.new_full((x.shape[0], x.shape[1] + 3, *(2 * s for s in x.shape[2:])), torch.nan)
    part = wide[(slice(None), slice(1, -2), *(slice(None, None, 2) for _ in x.shape[2:]))]
    return part.copy_(x)


def _turned(x: Tensor) -> Tensor:
    """The last two axes swapped in memory: dense, but no N×C×S."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "channels_last_3d": lambda x: x.contiguous(memory_format=torch.channels_last_3d),
    "sliced": _sliced,
    "turned": _turned,
    "samples inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels first": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
}


class Case(NamedTuple):
    """A layer, an input and how they meet."""

    shape: tuple[int, ...]
    groups: int
    statistics: str = "step"
    activation: str | None = None
    residual: str | None = None
    """The layout of the residual, or None for no residual."""
    layout: str = "contiguous"
    blend: float = 1.0
    micro_batch: int = 1
    form: str = "train"
    """`train`, `eval`, or `frozen`: in training mode with a weight that is not trained."""

    def __str__(self) -> str:
        """Short enough for the name of a test."""
        other = [
            str(v) for v, default in zip(self[3:], [*self._field_defaults.values()][1:], strict=True) if v != default
        ]
        return "-".join(["x".join(map(str, self.shape)), f"G{self.groups}", self.statistics, *other])


def layer_of(case: Case, device: str, dtype: torch.dtype = torch.float64, **options: Any) -> BatchChannelNorm:
    """The case's layer by the kernels, with parameters and estimates that are not the initial ones."""
    norm = BatchChannelNorm(
        case.shape[1],
        case.groups,
        statistics=case.statistics,  # type: ignore[arg-type]
        rate=0.3,
        micro_batch=case.micro_batch,
        activation=case.activation,
        negative_slope=0.2,
        backend="triton",
        dtype=torch.float64,
        **options,
    )
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(torch.randn_like(p) * 0.5)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    norm._window.follow_estimates()  # as that of a copy does, with which it is compared
    if case.blend != 1:
        norm.warm(10)
        norm.blend.fill_(case.blend)
    norm._window.warned = True  # small groups are what some cases are about
    norm = norm.to(device, dtype)
    norm.weight.requires_grad_(case.form != "frozen")
    return norm.train(case.form != "eval")


def reference_of(norm: BatchChannelNorm) -> BatchChannelNorm:
    """The same layer by the plain equations, in float64 on the CPU."""
    twin = copy.deepcopy(norm).to("cpu", torch.float64)
    twin.backend = "reference"
    twin._window.warned = True
    return twin


def data(case: Case, device: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor | None, Tensor]:
    """x and residual as leaves in their layouts, and dL/dy."""
    x, residual, g = (torch.randn(case.shape, dtype=torch.float64).to(device, dtype) for _ in range(3))
    x = LAYOUTS[case.layout](x * 1.5 + 0.7).detach().requires_grad_()
    return x, None if case.residual is None else LAYOUTS[case.residual](residual).detach().requires_grad_(), g


def outcome(norm: BatchChannelNorm, x: Tensor, residual: Tensor | None, g: Tensor) -> dict[str, Tensor]:
    """Output, all gradients, what was gathered, and the estimates after a commit."""
    y = norm(x, residual=residual)
    sources = {"x": x} | ({} if residual is None else {"residual": residual})
    sources |= {name: p for name, p in norm.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(y, list(sources.values()), g)
    found = {"y": y.detach()} | {f"d{name}": d for name, d in zip(sources, grads, strict=True)}
    found["sums"] = norm._window.sums.clone()
    torch.optim.SGD(norm.parameters(), lr=0.0).step()
    return found | {"mean": norm.running_mean.clone(), "var": norm.running_var.clone()}


def expected_of(norm: BatchChannelNorm, x: Tensor, residual: Tensor | None, g: Tensor) -> dict[str, Tensor]:
    """`outcome` of the reference, for the same numbers in float64."""
    wide = [None if t is None else t.detach().to("cpu", torch.float64) for t in (x, residual, g)]
    x, residual, g = (None if t is None else t.requires_grad_() for t in wide)  # type: ignore[assignment]
    return outcome(reference_of(norm), x, residual, g)


def assert_agree(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Two equal computations in float64 whose sums are cut differently."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # A gradient may cancel altogether: of γ^b where a group is one channel. Its terms are of the size of g, one.
        scale = max(1.0, value.abs().max().item())
        assert_close_to_max(found[name], value, tol=tolerance("one_step", torch.float64), scale=scale)
