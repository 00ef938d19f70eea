"""`mn.export.onnx`: write a model as an ONNX file, and verify the file with onnxruntime before it appears.

`verify` compares the outputs of any two models on inputs of several sizes.
"""

import errno
import importlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from micronorm.convert.trace import as_call, tensors_in
from micronorm.export.fold import bare_copy, fold, is_ours
from micronorm.ops.private_api import tree_map

LOWEST_OPSET = 21  # the first for which torch writes GroupNormalization, with an affine per channel
_LARGEST_MESSAGE = 2**31 - 2**20  # protobuf's limit, less some space for the graph itself

Dynamic = bool | Literal["batch"]


@dataclass(frozen=True)
class OnnxReport:
    """The result of `mn.export.onnx`.

    Attributes:
        path: the file.
        opset: its operator set.
        group_normalizations: the number of its GroupNormalization nodes.
        shapes: the shapes of the inputs it was verified on.
        worst: the largest difference from the model, relative to the maximum of an output.
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
    """Fold the model, write it as ONNX, and compare the file with the model in onnxruntime on the CPU.

    The file is verified on the example and on a second batch and image size. It appears only after that: if anything
    fails, no file is written, and an existing one is not changed.

    Args:
        model: a float32 model, with or without layers of micronorm. It is not changed.
        path: the file. Weights beyond 2 GB go to `path` + ".data" beside it.
        example_inputs: a tuple of arguments, a dictionary of keyword arguments, or the one argument; tensors are N×C×….
        opset: at least 21; below, torch writes group normalization as a dozen elementwise operations.
        dynamic: the sizes that may change: True, batch and space; "batch", the batch only, for models that compute with
            the size of their images; False, none.
        other_inputs: inputs of the second size. By default one sample more and 32 or 64 positions more per axis.
        tol: the largest difference allowed, relative to the maximum of an output.
        input_names: names in the file, one per tensor.
        output_names: names in the file, one per tensor.

    Returns:
        An `OnnxReport`.

    Raises:
        ImportError: onnx, onnxscript or onnxruntime is missing.
        ValueError: a bad argument, or the model does not run on the inputs.
        RuntimeError: torch cannot export the model, or the file computes something else.
        OSError: the file cannot be written; the message names it and the space it needs.

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
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(
            f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent} for {path.name}"
        )
    if path.exists() and not path.is_file():  # the rename below would replace a device, such as /dev/null
        raise ValueError(f"{path} is a pipe or a device, not a file")
    inputs = [example_inputs]
    if dynamic:
        inputs.append(_other_size(example_inputs, dynamic) if other_inputs is None else other_inputs)
    reference = bare_copy(model).eval()
    _check_runs(reference, inputs)
    folded = fold(model, example_inputs=example_inputs) if any(map(is_ours, model.modules())) else bare_copy(model)
    folded = folded.eval().cpu()
    names = {"input_names": input_names, "output_names": output_names}
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            written = Path(folder) / path.name
            _export(folded, written, _cpu(example_inputs), opset=opset, dynamic=dynamic, **names)
            found = _count_group_normalizations(written)
            worst = verify(reference, _Session(written), inputs, tol=tol)
            for part in sorted(Path(folder).iterdir(), reverse=True):  # the ".data" file first
                os.replace(part, path.parent / part.name)
    except OSError as fault:
        full = fault.errno in (errno.ENOSPC, errno.EDQUOT)
        needed = f" (about {_size(folded):,} bytes are needed)" if full else ""
        raise OSError(fault.errno, f"{fault.strerror or fault}{needed}", str(path)) from fault
    shapes = tuple(tuple(t.shape) for example in inputs for t in tensors_in(example))
    return OnnxReport(path, opset, found, shapes, worst)


def _require(*packages: str) -> None:
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as fault:
            raise ImportError(f"exporting to ONNX needs {package}: pip install onnx onnxruntime onnxscript") from fault


def _check_arguments(model: nn.Module, opset: int, dynamic: Dynamic, other_inputs: Any) -> None:
    if opset < LOWEST_OPSET:
        raise ValueError(f"opset must be at least {LOWEST_OPSET}, the first with GroupNormalization, got {opset}")
    if dynamic not in (True, False, "batch"):
        raise ValueError(f'dynamic must be True, False or "batch", got {dynamic!r}')
    if other_inputs is not None and not dynamic:
        raise ValueError("other_inputs have another size than example_inputs, which dynamic=False does not allow")
    odd = sorted({str(p.dtype) for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32})
    if odd:
        raise ValueError(f"the model must be float32 like onnxruntime's CPU kernels, got {', '.join(odd)}")


def _check_runs(model: nn.Module, inputs: list[Any]) -> None:
    """Raise ValueError if the model does not accept the inputs, before the export, which takes minutes."""
    for example, hint in zip(inputs, ("", '; give other_inputs, or dynamic="batch"'), strict=False):
        args, kwargs = as_call(example)
        try:
            with torch.no_grad():
                output = model(*args, **kwargs)
        except Exception as fault:
            sizes = ", ".join("×".join(map(str, t.shape)) for t in tensors_in(example))
            raise ValueError(f"the model does not run on inputs of sizes {sizes}{hint}: {_reason(fault)}") from fault
        if isinstance(output, list | tuple) and output and all(isinstance(item, dict) for item in output):
            raise ValueError(
                f"{type(model).__name__} returns a dictionary for each image, as detectors do. The number of boxes "
                "depends on the image, which torch cannot export: export the part before, such as model.backbone, with "
                "mn.export.onnx"
            )


# --- sizes -----------------------------------------------------------------------------------------------------------


def _open_axes(tensor: Tensor, dynamic: Dynamic) -> list[int]:
    """Return the axes whose size may change. A spatial axis of size 1 is taken as fixed."""
    if not dynamic or tensor.ndim == 0:
        return []
    return [0, *(axis for axis in range(2, tensor.ndim) if dynamic is True and tensor.shape[axis] > 1)]


def _other_size(inputs: Any, dynamic: Dynamic) -> Any:
    """Return inputs with one sample and 32 (in the last axis 64) positions more, so that strides still divide them."""
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
        for axis, size in enumerate(shape):  # repeat its values: other integers may be invalid
            leaf = leaf.index_select(axis, torch.arange(size, device=leaf.device) % leaf.shape[axis])
        return leaf

    return tree_map(grow, inputs)


def _at_least_two(inputs: Any) -> Any:
    """Repeat a single sample: torch.export treats a size of 1 as a constant."""
    return tree_map(
        lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == 1 else leaf,
        inputs,
    )


def _cpu(inputs: Any) -> Any:
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, inputs)


# --- the file --------------------------------------------------------------------------------------------------------


def _export(model: nn.Module, path: Path, inputs: Any, *, opset: int, dynamic: Dynamic, **names: Any) -> None:
    args, kwargs = as_call(_at_least_two(inputs) if dynamic else inputs)

    def sizes(leaf: Any) -> dict[int, Any] | None:
        axes = _open_axes(leaf, dynamic) if isinstance(leaf, Tensor) else []
        return dict.fromkeys(axes, torch.export.Dim.DYNAMIC) if axes else None

    try:
        with warnings.catch_warnings():  # the exporter itself calls what torch deprecates
            warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
            torch.onnx.export(
                model,
                args,
                path,
                kwargs=kwargs,
                dynamo=True,
                verbose=False,
                opset_version=opset,
                external_data=_size(model) > _LARGEST_MESSAGE,
                dynamic_shapes=tree_map(sizes, kwargs or args) if dynamic else None,
                **names,
            )
    except Exception as fault:
        if isinstance(_root(fault), OSError):  # a full disk is no fault of the model
            raise _root(fault) from fault
        hint = {True: 'try dynamic="batch", then dynamic=False', "batch": "try dynamic=False", False: ""}[dynamic]
        reason = _reason(fault)
        raise RuntimeError(f"torch could not export the model{f'; {hint}' if hint else ''}: {reason}") from fault


def _size(model: nn.Module) -> int:
    """Return the bytes of the model's tensors."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def _root(fault: BaseException) -> BaseException:
    """Return the original error behind an error of the exporter, whose own message has pages of advice."""
    while fault.__cause__ is not None:
        fault = fault.__cause__
    return fault


def _reason(fault: BaseException) -> str:
    """Return the class and first line of the original error."""
    fault = _root(fault)
    lines = [line for line in str(fault).strip().splitlines() if line.strip()]
    return f"{type(fault).__name__}: {lines[0][:300]}" if lines else type(fault).__name__


def _count_group_normalizations(path: Path) -> int:
    graph = importlib.import_module("onnx").load(path, load_external_data=False).graph
    return sum(node.op_type == "GroupNormalization" for node in graph.node)


class _Session:
    """Call the file like a model: onnxruntime on the CPU, with tensors as inputs and outputs."""

    def __init__(self, path: Path) -> None:
        runtime = importlib.import_module("onnxruntime")
        self._session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        names = [entry.name for entry in self._session.get_inputs()]
        values = [tensor.detach().cpu().numpy() for tensor in tensors_in((args, kwargs))]
        if len(names) != len(values):
            raise RuntimeError(f"the file takes {len(names)} inputs ({', '.join(names)}), the model {len(values)}")
        return [torch.from_numpy(array) for array in self._session.run(None, dict(zip(names, values, strict=True)))]


# --- comparison of outputs -------------------------------------------------------------------------------------------


def verify(
    expected: Callable[..., Any], actual: Callable[..., Any], inputs: Iterable[Any], *, tol: float = 1e-4
) -> float:
    """Return the largest difference between the outputs of two models over all inputs.

    The difference of an output tensor is max|actual − expected| / max|expected|. Outputs may be nested; their tensors
    are compared in order.

    Args:
        expected: the reference model.
        actual: the model to compare with it.
        inputs: the inputs of both, each a tuple of arguments, a dictionary of keyword arguments or the one argument.
        tol: the largest difference allowed.

    Raises:
        RuntimeError: an output differs by more than `tol`, in its shape, or is not finite.
        ValueError: there are no inputs, or the outputs contain no tensor.

    Example:
        >>> verify(torch.sin, lambda x: torch.sin(x) * (1 + 1e-6), [torch.ones(2), torch.ones(3, 4)]) < 1e-5
        True
    """
    worst, count = 0.0, 0
    for example in inputs:
        args, kwargs = as_call(example)
        with torch.no_grad():
            pair = [tensors_in(model(*args, **kwargs)) for model in (expected, actual)]
        where = f"on inputs {' and '.join(_shapes(example))}"
        if len(pair[0]) != len(pair[1]):
            raise RuntimeError(f"{len(pair[1])} outputs where {len(pair[0])} were expected, {where}")
        if not pair[0]:
            raise ValueError(f"no tensor among the outputs {where}: there is nothing to compare")
        for index, (right, other) in enumerate(zip(*pair, strict=True)):
            difference = _difference(right, other, f"output {index} {where}")
            if not difference <= tol:
                raise RuntimeError(
                    f"output {index} {where} differs by {difference:.3g} of its maximum, above {tol:g}. A few 1e-4 can "
                    "be rounding of float32, which deep networks with random or barely trained weights amplify: then "
                    "give a larger tol="
                )
            worst = max(worst, difference)
        count += 1
    if count == 0:
        raise ValueError("no inputs to compare on; give at least one")
    return worst


def _difference(expected: Tensor, actual: Tensor, label: str) -> float:
    if expected.shape != actual.shape:
        raise RuntimeError(f"{label} has shape {tuple(actual.shape)} where {tuple(expected.shape)} was expected")
    if expected.numel() == 0:
        return 0.0
    right, other = (t.detach().to("cpu", torch.float64) for t in (expected, actual))
    for name, tensor in (("expected", right), ("actual", other)):
        if not bool(tensor.isfinite().all()):
            raise RuntimeError(f"{label} is not finite ({name}): it cannot be compared")
    error, size = (right - other).abs().max().item(), right.abs().max().item()
    return error / size if size else (0.0 if error == 0 else float("inf"))


def _shapes(example: Any) -> list[str]:
    return ["×".join(map(str, tensor.shape)) or "scalar" for tensor in tensors_in(example)] or ["without tensors"]
