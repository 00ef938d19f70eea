"""`mn.export.onnx`: a model as an ONNX file that onnxruntime computes as torch does, or no file at all."""

import importlib
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from micronorm.convert.flow.trace import as_call
from micronorm.export.fold import bare_copy, fold, is_ours
from micronorm.export.verify import verify
from micronorm.ops.private_api import tree_leaves, tree_map

LOWEST_OPSET = 21  # the first in which GroupNormalization has an affine per channel, and for which torch emits it
_LARGEST_MESSAGE = 2**31 - 2**20  # protobuf's limit, with room for the graph itself

Dynamic = bool | Literal["batch"]


@dataclass(frozen=True)
class OnnxReport:
    """What was written, and how it was verified.

    Attributes:
        path: the file.
        opset: its operator set.
        group_normalizations: how many GroupNormalization nodes it has.
        shapes: of the inputs it was verified on.
        worst: the largest difference from the model on them, relative to an output's maximum.
    """

    path: Path
    opset: int
    group_normalizations: int
    shapes: tuple[tuple[int, ...], ...]
    worst: float


def onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Any,
    *,
    opset: int = LOWEST_OPSET,
    dynamic: Dynamic = True,
    other_inputs: Any = None,
    tol: float = 1e-4,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
) -> OnnxReport:
    """Fold the model, write it as ONNX and compare the file with the model, in onnxruntime on the CPU.

    The file appears once it has been verified, on the example and on a second batch and image size; where anything
    fails there is none, and one that was there before stays as it was.

    Args:
        model: a float32 model, with layers of ours or without. It is left as it was.
        path: the file. Weights beyond 2 GB go to `path` + ".data" beside it.
        example_inputs: a tuple of arguments, a dictionary of keyword arguments, or the one argument; tensors are N×C×….
        opset: 21 or more: below, torch writes group normalization as a dozen elementwise operations.
        dynamic: which sizes stay open: True, those of batch and space; "batch", that of the batch alone, for models
            that compute with the size of their images; False, none.
        other_inputs: the second size to verify at. By default one sample more and 32 or 64 positions more per axis.
        tol: the largest difference, relative to an output's maximum, that is rounding.
        input_names: names in the file, one per tensor.
        output_names: likewise.

    Example:
        >>> from micronorm.nn import BatchChannelNorm, WSConv2d
        >>> model = nn.Sequential(WSConv2d(3, 8, 3), BatchChannelNorm(8), nn.ReLU())
        >>> path = Path(tempfile.mkdtemp()) / "model.onnx"
        >>> report = onnx(model, path, torch.randn(1, 3, 16, 16))
        >>> report.group_normalizations, report.shapes, report.worst < 1e-5
        (1, ((1, 3, 16, 16), (2, 3, 48, 80)), True)
    """
    _require("onnx", "onnxscript", "onnxruntime")
    _check_arguments(model, opset, dynamic, other_inputs)
    path = Path(path)
    inputs = [example_inputs]
    if dynamic:
        inputs.append(_other_size(example_inputs, dynamic) if other_inputs is None else other_inputs)
    reference = bare_copy(model).eval()
    _check_runs(reference, inputs)
    folded = fold(model, example_inputs=example_inputs) if any(map(is_ours, model.modules())) else bare_copy(model)
    folded = folded.eval().cpu()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        written = Path(folder) / path.name
        names = {"input_names": input_names, "output_names": output_names}
        _export(folded, written, _cpu(example_inputs), opset=opset, dynamic=dynamic, **names)
        found = _count_group_normalizations(written, expected=_group_norms(folded, _cpu(example_inputs)))
        worst = verify(reference, _Session(written), inputs, tol=tol)
        for part in sorted(Path(folder).iterdir(), reverse=True):  # the weights of a large model before the graph
            os.replace(part, path.parent / part.name)
    shapes = tuple(tuple(t.shape) for example in inputs for t in _tensors(example))
    return OnnxReport(path, opset, found, shapes, worst)


def _require(*packages: str) -> None:
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as fault:
            raise ImportError(f"exporting to ONNX needs {package}: pip install 'micronorm[onnx]'") from fault


def _check_arguments(model: nn.Module, opset: int, dynamic: Dynamic, other_inputs: Any) -> None:
    if opset < LOWEST_OPSET:
        raise ValueError(f"opset must be at least {LOWEST_OPSET}, the first with GroupNormalization, got {opset}")
    if dynamic not in (True, False, "batch"):
        raise ValueError(f'dynamic must be True, False or "batch", got {dynamic!r}')
    if other_inputs is not None and not dynamic:
        raise ValueError("other_inputs are of another size, which dynamic=False rules out")
    odd = sorted({str(p.dtype) for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32})
    if odd:
        raise ValueError(f"a float32 model is needed, onnxruntime's CPU kernels being so, got {', '.join(odd)}")


def _check_runs(model: nn.Module, inputs: list[Any]) -> None:
    """Refuse sizes that the model itself does not take, before minutes go into exporting it."""
    for example, hint in zip(inputs, ("", '; give other_inputs, or dynamic="batch"'), strict=False):
        args, kwargs = as_call(example)
        try:
            with torch.no_grad():
                model(*args, **kwargs)
        except Exception as fault:
            sizes = ", ".join("×".join(map(str, t.shape)) for t in _tensors(example))
            raise ValueError(f"the model does not run on inputs of sizes {sizes}{hint}: {_reason(fault)}") from fault


# --- sizes -----------------------------------------------------------------------------------------------------------


def _open_axes(tensor: Tensor, dynamic: Dynamic) -> list[int]:
    """The axes whose sizes stay open; one position stays one, it was reduced to that."""
    if not dynamic or tensor.ndim == 0:
        return []
    return [0, *(axis for axis in range(2, tensor.ndim) if dynamic is True and tensor.shape[axis] > 1)]


def _other_size(inputs: Any, dynamic: Dynamic) -> Any:
    """Inputs of one sample and 32 (in the last axis 64) positions more: what strides to 32 divide they still do."""
    generator = torch.Generator().manual_seed(0)

    def grow(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = list(leaf.shape)
        for axis in _open_axes(leaf, dynamic):
            shape[axis] += 1 if axis == 0 else 64 if axis == leaf.ndim - 1 else 32
        if leaf.is_floating_point():
            spread = leaf.std(correction=0) if leaf.numel() else 1
            return torch.randn(shape, generator=generator).to(leaf) * spread + leaf.mean()
        for axis, size in enumerate(shape):  # its own values again: what others mean is not known
            leaf = leaf.index_select(axis, torch.arange(size, device=leaf.device) % leaf.shape[axis])
        return leaf

    return tree_map(grow, inputs)


def _at_least_two(inputs: Any) -> Any:
    """One sample as two: torch.export takes a size of 1 for a constant."""
    return tree_map(
        lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == 1 else leaf,
        inputs,
    )


def _cpu(inputs: Any) -> Any:
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, inputs)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


# --- the file --------------------------------------------------------------------------------------------------------


def _export(model: nn.Module, path: Path, inputs: Any, *, opset: int, dynamic: Dynamic, **names: Any) -> None:
    args, kwargs = as_call(_at_least_two(inputs) if dynamic else inputs)

    def sizes(leaf: Any) -> dict[int, Any] | None:
        axes = _open_axes(leaf, dynamic) if isinstance(leaf, Tensor) else []
        return dict.fromkeys(axes, torch.export.Dim.DYNAMIC) if axes else None

    weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    try:
        torch.onnx.export(
            model,
            args,
            path,
            kwargs=kwargs,
            dynamo=True,
            verbose=False,
            opset_version=opset,
            external_data=weights > _LARGEST_MESSAGE,
            dynamic_shapes=tree_map(sizes, kwargs or args) if dynamic else None,
            **names,
        )
    except Exception as fault:
        hint = {True: 'try dynamic="batch", then dynamic=False', "batch": "try dynamic=False", False: ""}[dynamic]
        reason = _reason(fault)
        raise RuntimeError(f"torch could not export the model{f'; {hint}' if hint else ''}: {reason}") from fault


def _reason(fault: BaseException) -> str:
    """The first line of what torch.export said: the exporter's own report buries it under pages of advice."""
    while fault.__cause__ is not None:
        fault = fault.__cause__
    lines = [line for line in str(fault).strip().splitlines() if line.strip()]
    return f"{type(fault).__name__}: {lines[0][:300]}" if lines else type(fault).__name__


def _group_norms(model: nn.Module, inputs: Any) -> int:
    """How many different things the model's group norms compute; the exporter merges those that compute the same."""
    outputs = set()
    args, kwargs = as_call(inputs)

    def remember(module: nn.Module, args: Any, output: Tensor) -> None:
        outputs.add((output.shape, hash(output.contiguous().numpy().tobytes())))

    with torch.no_grad(), ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.GroupNorm):
                hooks.callback(module.register_forward_hook(remember).remove)
        model(*args, **kwargs)
    return len(outputs)


def _count_group_normalizations(path: Path, *, expected: int) -> int:
    graph = importlib.import_module("onnx").load(path, load_external_data=False).graph
    found = sum(node.op_type == "GroupNormalization" for node in graph.node)
    if found < expected:
        raise RuntimeError(
            f"the file has {found} GroupNormalization nodes for {expected} group normalizations of the model: torch "
            f"{torch.__version__} has taken some apart"
        )
    return found


class _Session:
    """The file as a callable: onnxruntime on the CPU, tensors in and out."""

    def __init__(self, path: Path) -> None:
        runtime = importlib.import_module("onnxruntime")
        self._session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        names = [entry.name for entry in self._session.get_inputs()]
        values = [tensor.detach().cpu().numpy() for tensor in _tensors((args, kwargs))]
        if len(names) != len(values):
            raise RuntimeError(f"the file takes {len(names)} inputs ({', '.join(names)}), the model {len(values)}")
        return [torch.from_numpy(array) for array in self._session.run(None, dict(zip(names, values, strict=True)))]
