"""The hooks of one optimizer step that is looked at, and what they have seen of it.

They change nothing, and what they see stays on the devices until `Taken.read`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.diagnostics.layers import weight_layers
from micronorm.diagnostics.norms import fits, read_norm
from micronorm.diagnostics.onlooker import watch_weight
from micronorm.diagnostics.tally import Figures, NormTally, WeightNumbers, WeightTally, to_host
from micronorm.nn.passive_hook import PassiveHook
from micronorm.nn.recompute import inside_backward
from micronorm.nn.reparameterized import Reparameterized


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The layers whose weights can be looked at; none in a sharded model.

    To read a shard is to ask the other ranks for theirs, and those may not be looking.
    """
    sharded = any(hasattr(parameter, "placements") for parameter in model.parameters())
    return {} if sharded else weight_layers(model)


class Look:
    """The hooks of one step, and what they have seen."""

    def __init__(self, model: nn.Module, *, is_open: Callable[[], bool]) -> None:
        self.model, self._is_open = model, is_open
        self.norms: dict[str, NormTally] = {}
        self.gradients: dict[str, WeightTally] = {}
        self.weights = whole_weights(model)
        self.forwards = 0  # of norms; of the model where it has none
        self.names: list[str] = []
        self._filled: nn.Parameter | None = None
        self._hooks: list[Any] = []
        self._ends: list[Callable[[], None]] = []
        for name, module in model.named_modules():
            self.names.append(name)
            norm = read_norm(module)
            if norm is not None:
                self.norms[name] = NormTally(norm)
                hook = PassiveHook(self._norm_hook(name))
                self._hooks.append(module.register_forward_hook(hook, with_kwargs=True))
        for name, layer in self.weights.items():
            if isinstance(layer, Reparameterized):
                self._watch(name, layer)
                if layer.weight.is_leaf and layer.weight.requires_grad:
                    self._hooks.append(layer.weight.register_post_accumulate_grad_hook(self._fill))
        if not self.norms:
            hook = PassiveHook(self._forward_hook)
            self._hooks.append(model.register_forward_hook(hook))

    def _watch(self, name: str, layer: Any) -> None:
        tally = self.gradients[name] = WeightTally()

        def see(weight: Tensor) -> None:
            if self._is_open():
                self._begin()
                tally.watch(weight)

        self._ends.append(watch_weight(layer, see))

    @property
    def has_seen(self) -> bool:
        """Whether there was a forward."""
        return self.forwards > 0

    def _fill(self, parameter: nn.Parameter) -> None:
        self._filled = parameter

    def _begin(self) -> None:
        """Forget the gradients of a step that was begun and not taken.

        A GradScaler that skips a step says so to nobody, but the parameters' gradients are taken away before the next.
        """
        if self._filled is not None and self._filled.grad is None and not inside_backward():
            self._filled = None
            self.clear_gradients()

    def _forward_hook(self, module: nn.Module, args: Any, output: Any) -> None:
        """Of a model without norms: there was a forward."""
        self.forwards += self._is_open() and not torch.compiler.is_compiling()

    def _norm_hook(self, name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if torch.compiler.is_compiling() or not self._is_open() or inside_backward():
                return
            tally = self.norms[name]
            x = args[0] if args else kwargs.get("input", kwargs.get("x"))
            if not isinstance(x, Tensor) or not fits(tally.norm, x) or _is_no_data(x):
                return
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                tally.add(x.detach(), output.detach(), alone=kwargs.get("residual") is None)
            self.forwards += 1

        return see

    def clear(self) -> None:
        """Forget what was seen; the hooks stay."""
        for name, tally in self.norms.items():
            self.norms[name] = NormTally(tally.norm)
        self.clear_gradients()
        self.forwards = 0

    def clear_gradients(self) -> None:
        """Forget the gradients that were seen."""
        for gradient in self.gradients.values():
            gradient.clear()

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        for gradient in self.gradients.values():
            gradient.close()
        for end in self._ends:
            end()
        self._hooks, self._ends = [], []


def _is_no_data(x: Tensor) -> bool:
    """Whether x is a symbol of something, or of a forward that is being captured and will run later."""
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return x.is_meta or capturing or torch._C._are_functorch_transforms_active()


class Taken:
    """A look whose numbers lie on the devices."""

    def __init__(self, look: Look, *, scale: Tensor | None, weights: bool, draws: bool) -> None:
        self.norms = {name: tally for name, tally in look.norms.items() if not tally.is_empty}
        self.weights = WeightNumbers(look.weights if weights else {}, look.gradients, samples=draws)
        self.scale, self.draws, self.forwards = scale, draws, look.forwards
        self.parts = [*(tally.numbers() for tally in self.norms.values()), self.weights.numbers()]
        self.order = list(look.names)

    def read(self) -> tuple[dict[str, Figures], dict[str, Tensor]]:
        """The figures by layer, and what to draw histograms of. This waits for the devices, once."""
        scales = [] if self.scale is None else [self.scale]
        flat = iter(to_host([*(tensor for part in self.parts for tensor in part), *scales]))
        *of_norms, of_weights = [[next(flat) for _ in part] for part in self.parts]
        loss_scale = float(next(flat)) if scales else 1.0
        figures = self.weights.figures(of_weights, loss_scale=loss_scale)
        pictures = {f"weights/{name}": values for name, values in self.weights.samples(of_weights).items()}
        for (name, tally), numbers in zip(self.norms.items(), of_norms, strict=True):
            figures[name] = tally.figures(numbers)
            if self.draws:
                pictures[f"channel_means/{name}"] = tally.channel_means(numbers)
        return {name: figures[name] for name in self.order if name in figures}, pictures
