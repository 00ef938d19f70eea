"""Weights in files: read by a run that starts from them, written at the end of a run."""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from micronorm.convert.checkpoint import header_of, pack_state, read_state, strip_prefixes
from micronorm.engine.checkpoint import whole_state
from micronorm.engine.parallel import ShardedRanks
from micronorm.engine.step import Step
from micronorm.nn.fingerprint import fingerprints, layer_of_torch, with_fingerprints
from micronorm.records import write_atomically


@dataclass(frozen=True)
class LoadedWeights:
    """The result of `load_weights`, by the names of tensors."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """Tensors of the model that the file lacks; they keep their initial values."""
    unused: tuple[str, ...]
    """Tensors of the file that the model lacks, without BatchNorm's counters of batches."""
    other_shape: tuple[str, ...]
    """Tensors whose shapes differ, such as a classifier of other classes; the model's keep their initial values."""

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded"]
        for found, what in (
            (self.other_shape, "dropped for their shape"),
            (self.unused, "dropped, the model lacks them"),
            (self.missing, "missing, they keep their initial values"),
        ):
            if found:
                more = f" and {len(found) - 4} more" if len(found) > 4 else ""
                parts.append(f"{len(found)} {what}: {', '.join(found[:4])}{more}")
        return "; ".join(parts)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file or of a torch checkpoint. Nothing in the file is executed.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it holds no weights.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    return read_state(path)


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> LoadedWeights:
    """Copy tensors of matching name and shape into a model, before training, and report the rest.

    The prefixes that DDP and torch.compile add to every name are ignored. Weights of a backbone are loaded into the
    part of the model that has their names: `layer1.0.conv1.weight` of a classifier is
    `backbone.body.layer1.0.conv1.weight` in a detector of torchvision.

    Warn if a layer of the model uses a loaded weight in another way than the layer it was saved from: with Weight
    Standardization instead of without, for example.

    Raises:
        ValueError: nothing matches.

    Example:
        >>> import torch
        >>> print(load_weights(nn.Linear(2, 3), {"weight": torch.ones(3, 2), "bias": torch.ones(5)}))
        1 tensors loaded; 1 dropped for their shape: bias
    """
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    tensors, _ = strip_prefixes(with_fingerprints(tensors, fingerprints(tensors)), own)
    part = _find_part(tensors, own)
    layers = {part + name: text for name, text in fingerprints(tensors).items()}
    tensors = {part + name: value for name, value in tensors.items()}
    common = own.keys() & tensors.keys()
    fitting = {name: tensors[name] for name in common if tensors[name].shape == own[name].shape}
    if not fitting:
        raise ValueError(
            f"none of the {len(tensors)} tensors fits the model: the file has {next(iter(tensors), 'nothing')!r}, the "
            f"model {next(iter(own), 'nothing')!r}, for example"
        )
    fitting = with_fingerprints(fitting, layers)
    other = layer_of_torch(model, fitting)
    if other is not None:
        warnings.warn(other, UserWarning, stacklevel=2)
    model.load_state_dict(fitting, strict=False)  # warns if a layer computes something else
    return LoadedWeights(
        loaded=tuple(sorted(fitting)),
        missing=tuple(sorted(own.keys() - tensors.keys())),
        unused=tuple(sorted(name for name in tensors.keys() - own.keys() if not name.endswith("num_batches_tracked"))),
        other_shape=tuple(sorted(common - fitting.keys())),
    )


def _find_part(tensors: Iterable[str], own: Iterable[str]) -> str:
    """Return the prefix with which most names are names of the model; "" if two prefixes are equally good."""
    names, found = set(tensors), Counter({"": 0})
    for key in own:
        parts = key.split(".")
        for k in range(len(parts)):
            if ".".join(parts[k:]) in names:
                found["".join(part + "." for part in parts[:k])] += 1
    (best, most), *others = found.most_common()
    return "" if any(count == most for _, count in others) else best


def save_weights(step: Step, path: Path, tensors: dict[str, Tensor] | None = None, *, recipe: str = "") -> None:
    """Write the model, or `tensors`, as safetensors, atomically. Collective.

    The metadata hold the recipe's name, and what the layers compute.
    """
    if tensors is None and isinstance(step.parallel, ShardedRanks):
        tensors = whole_state(step)["model"]
    if step.parallel.rank == 0:
        metadata = header_of(step.model) | ({"model": f"recipe:{recipe}"} if recipe else {})
        write_atomically(path, pack_state(step.model if tensors is None else tensors, metadata))
