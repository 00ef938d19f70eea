"""The statistics of one observed optimizer step, recorded by hooks that change nothing.

Everything is summed over micro-batches by counts, so it does not depend on how the step was cut. The numbers stay on
their devices until `StepStatistics.read` transfers them at once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.diagnostics.channels import RunningMoments, count_positive, rare_channels
from micronorm.diagnostics.lipschitz import GradientSum, Shares, layer_shares, observe_weight
from micronorm.diagnostics.norm_stats import norm_row
from micronorm.diagnostics.norms import NormLayer, as_norm_layer
from micronorm.diagnostics.weights import weight_layers
from micronorm.nn.checkpointing import inside_backward
from micronorm.nn.passive_hook import PassiveHook
from micronorm.nn.reparameterized import Reparameterized
from micronorm.ops.bcn import batch_channel_norm
from micronorm.ops.moments import Moments, as_ncs, compute_dtype, moments, wide_dtype
from micronorm.ops.private_api import foreach_norm, functorch_transforms_active

Row = dict[str, Any]


def observable_weights(model: nn.Module) -> dict[str, Any]:
    """Return the layers whose weights can be observed. A sharded model has none: reading a shard needs all ranks."""
    sharded = any(hasattr(parameter, "placements") for parameter in model.parameters())
    return {} if sharded else weight_layers(model)


# --- norms -----------------------------------------------------------------------------------------------------------


class NormSums:
    """The moments of one norm's inputs and normalized channels, and its positive outputs, summed over forwards."""

    def __init__(self, norm: NormLayer) -> None:
        self.norm = norm
        # Side by side: the input, the values that are normalized together, and the normalized values.
        self._moments = RunningMoments()
        self._positive: Tensor | None = None
        self._outputs = 0  # per channel

    @property
    def is_empty(self) -> bool:
        """Return whether no forward was added."""
        return self._moments.count == 0

    def add(self, x: Tensor, output: Tensor, *, alone: bool) -> None:
        """Add one forward. `alone` says that the forward did not add a residual to the output."""
        x = self.norm.channels_first(x)
        data = _moments(x)
        grouped, normalized = self.norm.normalize(x, data)
        positions = x.numel() // data.mean.numel()
        parts = [data, normalized] if grouped is data else [data, grouped, normalized]
        self._moments.add(Moments(*(torch.cat(part, 1) for part in zip(*parts, strict=True))), positions=positions)
        y = self.norm.channels_first(output) if alone else _own_output(self.norm, x, data)
        if y is not None and y.shape == x.shape:
            positive = count_positive(y)
            self._positive = positive if self._positive is None else self._positive + positive
            self._outputs += data.mean.shape[0] * positions

    def tensors(self) -> list[Tensor]:
        """Return what `row` needs, on the device."""
        found = list(self._moments.moments)
        return found if self._positive is None else [*found, self._positive]

    def row(self, numbers: Sequence[Tensor]) -> Row:
        """Return the row of kind "norm" of `micronorm.records`, given the numbers on the host."""
        parts = [Moments(*part) for part in zip(*(t.split(self.norm.channels) for t in numbers[:2]), strict=True)]
        row = norm_row(type(self.norm.module).__name__, self.norm.groups, parts[-2], parts[-1], eps=self.norm.eps)
        if len(numbers) > 2:
            active = numbers[2] / self._outputs
            row |= {
                "active": float(active.mean()),
                "dead": int((active == 0).sum()),
                "rare": int(rare_channels(active).sum()),
            }
        return row


def _moments(x: Tensor) -> Moments:
    """Return the moments of x; on a GPU by one launch, which is accurate enough for an observation."""
    if x.device.type == "cpu":
        return moments(x)
    var, mean = torch.var_mean(as_ncs(x).to(compute_dtype(x.dtype)), -1, correction=0)
    wide = wide_dtype(x.device)
    return Moments(mean.to(wide), var.to(wide))


def _own_output(norm: NormLayer, x: Tensor, data: Moments) -> Tensor | None:
    """Return the norm's output without the residual that its forward added, or None if the family is not known."""
    layer = norm.module
    if norm.family == "group":
        return torch.group_norm(x, layer.num_groups, layer.weight, layer.bias, layer.eps)
    if norm.family != "batch-channel":
        return None
    estimates = None if norm.uses_batch else norm.estimates()
    affine = (layer.weight, layer.bias, layer.group_weight, layer.group_bias)
    options: dict[str, Any] = {"groups": layer.num_groups, "eps": float(layer.eps), "blend": layer.blend}
    return batch_channel_norm(x, estimates, *affine, **options, data=data)


# --- weights ---------------------------------------------------------------------------------------------------------


class WeightStatistics:
    """The gradient shares and norms of all weights with a gradient, before the optimizer changes them."""

    def __init__(self, layers: Mapping[str, Any], sums: Mapping[str, GradientSum]) -> None:
        self._reparameterized = set(sums)
        self._methods: dict[str, str] = {}
        self._tensors: list[Tensor] = []
        gradients = {name: sums[name].total if name in sums else layer.weight.grad for name, layer in layers.items()}
        known = {name: g for name, g in gradients.items() if g is not None and layers[name].weight.grad is not None}
        for name, gradient in known.items():
            self._methods[name], shares = layer_shares(layers[name], gradient)
            self._tensors.append(torch.stack(shares))
        weights = [layers[name].weight for name in known]
        if weights:
            # The norm of the parameter's own gradient: that of the effective weight may carry a loss scale.
            self._tensors += [*foreach_norm(weights), *foreach_norm([weight.grad for weight in weights])]

    def tensors(self) -> list[Tensor]:
        """Return what `rows` needs, on the device: the shares of each layer, the norms, and the gradients' norms."""
        return self._tensors

    def rows(self, numbers: Sequence[Tensor], *, loss_scale: float) -> dict[str, Row]:
        """Return the rows of kind "weight" of `micronorm.records` by layer, given the numbers on the host."""
        count = len(self._methods)
        parts = (numbers[k * count : (k + 1) * count] for k in range(3))
        rows: dict[str, Row] = {}
        stale = False
        for (name, method), terms, norm, grad in zip(self._methods.items(), *parts, strict=True):
            shares = Shares(*terms)
            norms = {"norm": float(norm), "grad": float(grad) / loss_scale}
            rows[name] = {"kind": "weight", "weight": method, **shares.totals(), **norms}
            stale |= bool(grad.isfinite()) and not shares.square.isfinite().all()
        if stale:  # the sums still hold gradients of a skipped step, also for layers where they are finite
            rows = {name: row for name, row in rows.items() if name not in self._reparameterized}
        return rows


# --- one step --------------------------------------------------------------------------------------------------------


class StepRecorder:
    """Record the norms and weights of a model during one step.

    Args:
        model: the model, without a wrapper.
        is_active: returns whether the present forward counts.
    """

    def __init__(self, model: nn.Module, *, is_active: Callable[[], bool]) -> None:
        self.model, self._is_active = model, is_active
        self.norms: dict[str, NormSums] = {}
        self.gradients: dict[str, GradientSum] = {}
        self.weights = observable_weights(model)
        self.forwards = 0  # of norms; of the model if it has no norms
        self.names: list[str] = []
        self._with_grad: nn.Parameter | None = None  # a parameter that got a gradient since the last step
        self._stops: list[Callable[[], None]] = []
        for name, module in model.named_modules():
            self.names.append(name)
            norm = as_norm_layer(module)
            if norm is not None:
                self.norms[name] = NormSums(norm)
                hook = PassiveHook(self._norm_hook(name))
                self._stops.append(module.register_forward_hook(hook, with_kwargs=True).remove)
        for name, layer in self.weights.items():
            if isinstance(layer, Reparameterized):
                self.gradients[name] = GradientSum()
                self._stops.append(observe_weight(layer, self._weight_hook(name)))
                self._stops.append(self.gradients[name].close)
                if layer.weight.is_leaf and layer.weight.requires_grad:
                    self._stops.append(layer.weight.register_post_accumulate_grad_hook(self._after_grad).remove)
        if not self.norms:
            self._stops.append(model.register_forward_hook(PassiveHook(self._model_hook)).remove)

    def _norm_hook(self, name: str) -> Callable[..., None]:
        def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if torch.compiler.is_compiling() or not self._is_active() or inside_backward():
                return
            sums = self.norms[name]
            x = args[0] if args else kwargs.get("input", kwargs.get("x"))
            if not isinstance(x, Tensor) or not sums.norm.accepts(x) or _has_no_values(x):
                return
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                sums.add(x.detach(), output.detach(), alone=kwargs.get("residual") is None)
            self.forwards += 1

        return observe

    def _weight_hook(self, name: str) -> Callable[[Tensor], None]:
        def observe(weight: Tensor) -> None:
            if self._is_active():
                self._forget_skipped_step()
                self.gradients[name].watch(weight)

        return observe

    def _model_hook(self, module: nn.Module, args: Any, output: Any) -> None:
        self.forwards += self._is_active() and not torch.compiler.is_compiling()

    def _after_grad(self, parameter: nn.Parameter) -> None:
        self._with_grad = parameter

    def _forget_skipped_step(self) -> None:
        """Clear the gradients of a step that a GradScaler skipped: no hook ran, but `zero_grad` was called."""
        if self._with_grad is not None and self._with_grad.grad is None and not inside_backward():
            self._with_grad = None
            self.clear_gradients()

    def clear(self) -> None:
        """Forget everything recorded. The hooks stay."""
        for name, sums in self.norms.items():
            self.norms[name] = NormSums(sums.norm)
        self.clear_gradients()
        self.forwards = 0

    def clear_gradients(self) -> None:
        """Forget the recorded gradients."""
        for gradient in self.gradients.values():
            gradient.total = None

    def close(self) -> None:
        """Remove the hooks."""
        while self._stops:
            self._stops.pop()()


def _has_no_values(x: Tensor) -> bool:
    """Return whether x is symbolic, or belongs to a forward that is being captured and runs later."""
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return x.is_meta or capturing or functorch_transforms_active()


class StepStatistics:
    """The statistics of a recorded step, on their devices.

    Args:
        recorder: the record of the step.
        scale: the loss scale of the gradients, or None.
        weights: whether to compute statistics of the weights, which the optimizer must not have changed yet.
    """

    def __init__(self, recorder: StepRecorder, *, scale: Tensor | None, weights: bool) -> None:
        self.norms = {name: sums for name, sums in recorder.norms.items() if not sums.is_empty}
        self.weights = WeightStatistics(recorder.weights if weights else {}, recorder.gradients)
        self.scale, self.forwards = scale, recorder.forwards
        self.parts = [*(sums.tensors() for sums in self.norms.values()), self.weights.tensors()]
        self.order = list(recorder.names)

    def read(self) -> dict[str, Row]:
        """Return the rows by layer. This waits for the devices once."""
        scales = [] if self.scale is None else [self.scale]
        flat = iter(_to_host([*(tensor for part in self.parts for tensor in part), *scales]))
        *of_norms, of_weights = [[next(flat) for _ in part] for part in self.parts]
        loss_scale = float(next(flat)) if scales else 1.0
        rows = self.weights.rows(of_weights, loss_scale=loss_scale)
        for (name, sums), numbers in zip(self.norms.items(), of_norms, strict=True):
            rows[name] = sums.row(numbers)
        return {name: rows[name] for name in self.order if name in rows}


def _to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors in float64 on the CPU, by one transfer per device."""
    tensors = list(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    found: dict[int, Tensor] = {}
    for device, places in by_device.items():
        parts = [tensors[i] for i in places]
        flat = torch.cat([part.reshape(-1).to(wide_dtype(device)) for part in parts]).to("cpu", torch.float64)
        for i, part, values in zip(places, parts, flat.split([part.numel() for part in parts]), strict=True):
            found[i] = values.reshape(part.shape)
    return [found[i] for i in range(len(tensors))]
