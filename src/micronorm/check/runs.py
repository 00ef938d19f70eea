"""Run one optimizer step on a private copy of the model, in any cut, and keep its gradients, buffers and calls."""

import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.check.report import Kind
from micronorm.check.trace import Trace, Tracer
from micronorm.commit import Handle
from micronorm.commit.snapshot import RandomState
from micronorm.convert.surgery import refuse_wrappers
from micronorm.nn.batch_renorm import BatchRenorm
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.ops.private_api import TorchDispatchMode, tree_map

Cut = Sequence[Sequence[int]]
"""The sample indices of each part."""

_RATE = 0.1  # replaces rate="lr", because no optimizer runs here; any rate shows whether two windows differ
_FORWARDS = 10  # the work of a check in forward passes: three steps, and a repetition with another seed
_LONG = 120.0  # seconds


@dataclass(eq=False)
class StepRun:
    """The results of one step. `error` is the exception that ended the run, if a part raised one.

    `state` holds gradients, estimates and buffers after the step by kind and name, `aliased` pairs of parameters whose
    gradients share memory.
    """

    cut: Cut
    traces: list[Trace] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    counts: list[float | None] = field(default_factory=list)
    state: dict[tuple[Kind, str], Tensor] = field(default_factory=dict)
    aliased: dict[str, str] = field(default_factory=dict)
    coarsest: float = 0.0
    error: Exception | None = None

    @property
    def sizes(self) -> list[int]:
        """Return the number of samples of each part."""
        return [len(part) for part in self.cut]

    @property
    def count(self) -> float:
        """Return the divisor of the step: the sum of the parts' counts, or the number of samples."""
        return sum(n if c is None else c for n, c in zip(self.sizes, self.counts, strict=True))

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by the names of their parameters."""
        return {name: tensor for (kind, name), tensor in self.state.items() if kind == "gradient"}

    def compared(self) -> dict[tuple[Kind, str], Tensor]:
        """Return the sum and count of the loss, and the state, by kind and name."""
        total, count = (torch.tensor(number, dtype=torch.float64) for number in (sum(self.sums), self.count))
        return {("loss", "sum"): total, ("count", "count"): count, **self.state}


class Experiment:
    """A model, its batch in float64 and its loss. Each run starts from the same state. `modules` has all by name."""

    def __init__(self, model: nn.Module, batch: tuple, loss: Callable) -> None:
        self.model, self.loss = model, loss
        self.modules = {name: module for module, name in named_members(model, loss).items()}
        self.batch = to_float64(batch)
        tensors = [*model.parameters(), *model.buffers(), *(t for t in batch if isinstance(t, Tensor))]
        self.devices = list({t.device for t in tensors})
        self.runs = 0

    def run(
        self,
        cut: Cut,
        *,
        seed: int = 0,
        backward: bool = True,
        fresh: bool = False,
        perturbed: bool = False,
    ) -> StepRun:
        """Run a step.

        Args:
            cut: the sample indices of each part.
            seed: for all random generators, set once before the first part.
            backward: compute gradients and commit. Otherwise record only the calls and the loss.
            fresh: use a new copy of the model for each part.
            perturbed: move every parameter by one unit in the last place, and record every dtype.
        """
        run = StepRun(cut)
        self.runs += 1
        with _isolated(self.devices), warnings.catch_warnings():
            if self.runs > 1:
                warnings.simplefilter("ignore")  # the first run has already shown them
            for device in self.devices:
                RandomState.seed(seed, device)
            for parts in [[p] for p in cut] if fresh else [cut]:
                model, loss = copy_together(self.model, self.loss)
                for module in (model, owner_of(loss)):
                    if module is not None:
                        module.double().zero_grad()
                if perturbed:
                    _perturb(model)
                _seed_own_generators(model, seed)
                with _Dtypes(run) if perturbed else contextlib.nullcontext():
                    self._run_parts(run, model, loss, parts, backward=backward)
        return run

    def _run_parts(self, run: StepRun, model: nn.Module, loss: Callable, parts: Cut, *, backward: bool) -> None:
        handle = _attach(nn.ModuleList(m for m in (model, owner_of(loss)) if m is not None))
        tracer = Tracer(named_members(model, loss), self.devices)
        try:
            for indices in parts:
                started = time.perf_counter()
                with tracer.part(len(indices)):
                    total, count = read_loss(loss(model, select(self.batch, indices)))
                if self.runs == 1:
                    _warn_if_long(_FORWARDS * (time.perf_counter() - started))
                tracer.note_dtype(total)
                run.sums.append(total.item())
                run.counts.append(count)
                if backward:
                    total.backward()
        except Exception as error:
            run.error = error
        tracer.close()
        run.traces += tracer.traces
        run.coarsest = max(run.coarsest, tracer.coarsest)
        if not backward or run.error is not None:
            return
        handle.commit()
        if run.count == 0:
            raise ValueError("the counts of a step must not add up to 0, the loss returned 0 for every part")
        _collect(run, model, loss)


def _warn_if_long(seconds: float) -> None:
    if seconds > _LONG:
        warnings.warn(
            f"check_cuts will take about {seconds / 60:.0f} minutes: it runs several steps in float64. A batch of two "
            "or three samples, or smaller images, takes less time and gives the same result",
            stacklevel=2,
        )


@contextlib.contextmanager
def _isolated(devices: Sequence[torch.device]) -> Iterator[None]:
    """Compute in float64 with gradients and without autocast; restore random states and modes when the block ends."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(RandomState.preserved(devices))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)  # torch.zeros(n) inside a forward must match the float64 weights
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device_type in {"cpu", *(device.type for device in devices)}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


class _Dtypes(TorchDispatchMode):
    """Record the coarsest floating-point dtype of all operations, also of those between modules."""

    def __init__(self, run: StepRun) -> None:
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.is_floating_point():
                self.run.coarsest = max(self.run.coarsest, torch.finfo(t.dtype).eps)
        return out


def _seed_own_generators(model: nn.Module, seed: int) -> None:
    """Seed the generators that modules hold as attributes."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                value.manual_seed(value.initial_seed() + seed)


def _collect(run: StepRun, model: nn.Module, loss: Callable) -> None:
    """Store the gradients and buffers of the model, and of a loss that is a module, each once."""
    seen: set[int] = set()
    memory: dict[int, str] = {}
    for prefix, owner in (("", model), ("loss", owner_of(loss))):
        for path, module in owner.named_modules(prefix=prefix) if owner is not None else ():
            kind: Kind = "estimate" if isinstance(module, BatchChannelNorm) else "buffer"
            scratch = module.scratch if isinstance(module, BatchRenorm) else ()
            attributes = vars(module) if owner is model else {}
            for attribute, value in (*module._parameters.items(), *module._buffers.items(), *attributes.items()):
                if not isinstance(value, Tensor) or value.device.type == "meta" or id(value) in seen:
                    continue
                if attribute in scratch:  # it differs after equal steps
                    continue
                seen.add(id(value))
                name = f"{path}.{attribute}" if path else attribute
                if isinstance(value, nn.Parameter) and value.grad is not None:
                    grad = value.grad.to_dense() if value.grad.is_sparse else value.grad
                    run.state["gradient", name] = grad / run.count
                    other = memory.setdefault(grad.data_ptr(), name)
                    if other != name and grad.numel():
                        run.aliased |= {name: other, other: name}
                if not value.requires_grad:  # a forward may have written to a frozen parameter, as to a buffer
                    run.state[kind, name] = value.detach().clone()


def _attach(holder: nn.Module) -> Handle:
    for layer in holder.modules():
        if isinstance(layer, BatchChannelNorm) and layer.rate == "lr":
            layer.rate = _RATE
    # Without merging: the ranks of a job do not all run the check at the same time.
    return Handle(holder, process_group=None, max_forwards=2**31)


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        p = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        up = torch.rand(p.shape, generator=generator, dtype=torch.float64).to(p.device) < 0.5
        moved = torch.nextafter(p, torch.where(up, torch.inf, -torch.inf).to(p.dtype))
        p.copy_(torch.where(p == 0, p, moved))  # a zero has no rounding error, and 5e-324 would break ties


# --- arguments: a model, a batch and a loss ---------------------------------------------------------------------------


def check_model(model: Any) -> None:
    """Raise unless the model is a plain module in training mode with parameters to train."""
    refuse_wrappers(model)
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameters must have shapes, {name} is lazy; run one forward first")
        if type(p).__name__ == "DTensor":
            raise TypeError(f"parameters must be plain tensors, {name} is a DTensor; pass the model before sharding it")
        if p.device.type in ("meta", "mps"):
            raise ValueError(
                f"the check runs in float64, which {p.device.type} tensors do not support ({name}); use model.cpu()"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no parameter that requires grad; unfreeze the layers you train")
    if not model.training:
        raise ValueError("the check runs a training step, but the model is in eval mode; call model.train() first")


def check_batch(batch: Any) -> int:
    """Return the number of samples. Raise unless the batch is a tuple of tensors and lists of one length."""
    if not isinstance(batch, tuple):
        raise TypeError(
            f"batch must be a tuple of tensors or lists indexed by sample, got {type(batch).__name__}; "
            "for one tensor write (images,), for a dictionary tuple(batch.values())"
        )
    if not batch:
        raise ValueError("batch must hold at least one tensor or list, got an empty tuple")
    lengths = []
    for i, item in enumerate(batch):
        if not isinstance(item, (Tensor, list)):
            raise TypeError(
                f"batch must hold tensors or lists indexed by sample, batch[{i}] is a {type(item).__name__}; "
                "use torch.as_tensor(...) or list(...)"
            )
        if isinstance(item, Tensor) and item.ndim == 0:
            raise ValueError(
                f"batch[{i}] must be indexed by sample, but it is a tensor without axes; put constants into the loss"
            )
        lengths.append(len(item))
    if len(set(lengths)) > 1:
        raise ValueError(f"all of batch must have the same length, the number of samples, got lengths {lengths}")
    if lengths[0] < 2:
        raise ValueError(
            f"a cut needs at least 2 samples, got {lengths[0]}; use six, so that halves differ from single samples"
        )
    return lengths[0]


def to_float64(value: Any) -> Any:
    """Return a copy with every floating-point tensor in float64, also inside lists, tuples and dictionaries."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        return leaf.detach().to(torch.float64 if leaf.is_floating_point() else leaf.dtype, copy=True)

    return tree_map(convert, value)


def select(batch: tuple, indices: Sequence[int]) -> tuple:
    """Return copies of these samples, because a loss may write into its part."""
    return tuple(
        item[torch.as_tensor(indices, device=item.device)]
        if isinstance(item, Tensor)
        else to_float64([item[i] for i in indices])
        for item in batch
    )


def read_loss(result: Any) -> tuple[Tensor, float | None]:
    """Return the sum and its count. The count is None if the loss returned one tensor."""
    total, count = result, None
    if isinstance(result, (tuple, list)):
        if len(result) != 2:
            raise ValueError(f"loss must return (sum, count) or one tensor, got {len(result)} values")
        total, count = result
        if isinstance(count, Tensor) and count.numel() == 1:
            count = count.item()
        if isinstance(count, bool) or not isinstance(count, (int, float)):
            raise TypeError(
                f"loss must return (sum, count) with a number as count, got {type(count).__name__}; "
                "add several terms into one sum"
            )
    if not isinstance(total, Tensor):
        raise TypeError(
            f"loss must return (sum, count) or one tensor, got {type(total).__name__}; return the loss itself"
        )
    if total.numel() != 1:
        raise ValueError(
            f"loss must return one number, a sum over the part, got shape {tuple(total.shape)}; use .sum()"
        )
    if not total.requires_grad:
        raise ValueError("the loss must depend on the model's parameters, but it has no gradient; is it detached?")
    return total.reshape(()), None if count is None else float(count)


def owner_of(loss: Callable) -> nn.Module | None:
    """Return the module that the loss is, or whose method it is; otherwise None."""
    owner = loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def copy_together(model: nn.Module, loss: Callable) -> tuple[nn.Module, Callable]:
    """Return copies of the model and of a loss that is a module or its method. Shared parts stay shared."""
    try:
        twin, loss_twin = copy.deepcopy((model, loss if owner_of(loss) is not None else None))
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"the check needs a deep copy, and {type(model).__name__} cannot be copied: {error}. The usual reason is a "
            "tensor kept from an earlier forward; detach or delete it"
        ) from error
    for old, new in zip(model.parameters(), twin.parameters(), strict=True):
        _copy_gradient_hooks(old, new)
    return twin, loss if loss_twin is None else loss_twin


def _copy_gradient_hooks(old: Tensor, new: Tensor) -> None:
    """Copy the hooks of a parameter, which deepcopy does not: a hook that clips makes a step depend on its cut."""
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def named_members(model: nn.Module, loss: Callable) -> dict[nn.Module, str]:
    """Return every module with its name in reports: "model" for the model, "loss.…" for parts of the loss."""
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        names.setdefault(module, name or "model")
    owner = owner_of(loss)
    for name, module in owner.named_modules() if owner is not None else ():
        if module is not owner:  # a call of the owner is the loss itself
            names.setdefault(module, f"loss.{name}")
    return names
