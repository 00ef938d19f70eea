"""Say in the metadata of a state dict what its layers compute, and compare that when it is loaded.

Tensors of the same names and shapes fit layers of different functions: a weight fits a convolution with and without
Weight Standardization, an affine fits 16 groups and 32. So each layer writes a fingerprint, such as
"WS(center=True, scale=True, eps=1e-05)", into its entry of `state_dict()._metadata`, which torch.save keeps. A strict
load raises if a layer has another one; `strict=False` warns. Layers without an entry are not compared: state dicts of
unconverted networks, and tensors alone, load as before.
"""

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

KEY = "micronorm"
"""The key of a fingerprint in a layer's metadata, and of all fingerprints in the metadata of a safetensors file."""

MISMATCH = "was saved from"
UNABSORBED = "is loaded without the mean and scale that mn.convert(absorb=True) or warm_steps stored"
_PLAIN = "a plain weight"


class Fingerprinted:
    """Mixin for layers that write a fingerprint into their state dict and compare it when they load one."""

    function: ClassVar[tuple[str, ...]]
    """The name of the function, then the attributes that determine it beside the tensors."""

    def fingerprint(self) -> str:
        """Return what the layer computes, in the form of a spec."""
        name, *attributes = self.function
        return f"{name}({', '.join(f'{attribute}={getattr(self, attribute)!r}' for attribute in attributes)})"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {})[KEY] = self.fingerprint()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        _, _, unexpected_keys, _ = args  # torch passes all of them by position
        _compare(self.fingerprint(), state_dict, prefix, local_metadata, unexpected_keys)
        # Without the fingerprint: this layer may have been plain and marked before it was converted.
        others = {key: value for key, value in local_metadata.items() if key != KEY}
        super()._load_from_state_dict(state_dict, prefix, others, *args, **kwargs)  # type: ignore[misc]


def mark_plain(layer: nn.Module) -> None:
    """Make a convolution that conversion left unchanged write and compare the fingerprint of a plain weight."""
    if not _is_marked(layer):
        layer._register_state_dict_hook(_write_plain)
        layer._register_load_state_dict_pre_hook(_compare_plain)


def _is_marked(layer: nn.Module) -> bool:
    return _write_plain in layer._state_dict_hooks.values()


def unmark(layer: nn.Module) -> None:
    """Undo `mark_plain`, so that a folded model depends on torch alone, also when it is pickled."""
    for table, ours in ((layer._state_dict_hooks, _write_plain), (layer._load_state_dict_pre_hooks, _compare_plain)):
        for key in [key for key, hook in table.items() if getattr(hook, "hook", hook) is ours]:
            del table[key]


def fingerprints(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the fingerprints in a state dict by the names of their layers. Damaged metadata have none."""
    metadata = getattr(state, "_metadata", None)
    entries = metadata.items() if isinstance(metadata, Mapping) else ()
    return {str(name): str(entry[KEY]) for name, entry in entries if isinstance(entry, Mapping) and KEY in entry}


def with_fingerprints(tensors: Mapping[str, Tensor], found: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors as a state dict whose metadata hold these fingerprints."""
    made: Any = OrderedDict(tensors)
    made._metadata = OrderedDict((name, {KEY: text}) for name, text in found.items())
    return made


def layer_of_torch(model: nn.Module, state: Mapping[str, Tensor]) -> str | None:
    """Return a message if a layer of torch would load the weight of a layer that computes something else, else None.

    Layers of torch do not compare fingerprints themselves. Those of a network that was never converted are compared
    here, for the loaders of micronorm.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, saved in fingerprints(state).items():
        layer = modules.get(name)
        compared = layer is None or isinstance(layer, Fingerprinted) or _is_marked(layer)
        if saved != _PLAIN and not compared:
            return f"{name}: its weight {MISMATCH} {saved}, but the model has {type(layer).__name__}; convert it first"
    return None


def _write_plain(layer: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    local_metadata.setdefault(KEY, _PLAIN)  # a layer converted since has written its own


def _compare_plain(
    state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool, *lists: list[str]
) -> None:
    _, unexpected_keys, _ = lists
    _compare(_PLAIN, state_dict, prefix, local_metadata, unexpected_keys)


def _compare(
    own: str, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], unexpected_keys: list[str]
) -> None:
    """Warn if a layer whose weight is loaded has another fingerprint; a strict load raises in addition.

    torch does not pass `strict` to layers. It raises for unexpected keys in strict loads only, so the message is added
    to these keys: once, not for each of a hundred layers.
    """
    saved = local_metadata.get(KEY)
    if saved in (None, own) or prefix + "weight" not in state_dict:
        return
    difference = f"{MISMATCH} {saved}, but the model has {own}"
    if not any(difference in key for key in unexpected_keys):
        advice = "With these weights the outputs differ: convert the model as it was when they were saved"
        unexpected_keys.append(f"{prefix}weight (and perhaps others): {difference}. {advice}, by mn.convert")
        warnings.warn(unexpected_keys[-1], UserWarning, stacklevel=2)


def report_unabsorbed(state_dict: dict[str, Any], prefix: str, unexpected_keys: list[str]) -> None:
    """Warn if a weight is loaded into a layer that absorbed another kernel; a strict load raises in addition.

    The layer keeps the mean and scale of the kernel that it had, so the function is that of neither network.
    """
    if prefix + "weight" not in state_dict or any(UNABSORBED in key for key in unexpected_keys):
        return
    advice = "Those of the old kernel would be added to the new one: load the weights first, then call mn.convert"
    unexpected_keys.append(f"{prefix}weight (and perhaps others): {UNABSORBED}. {advice}")
    warnings.warn(unexpected_keys[-1], UserWarning, stacklevel=2)
