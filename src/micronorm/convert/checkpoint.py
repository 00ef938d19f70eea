"""Read state dicts from files of torch.save and safetensors without running code in them, and load them."""

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.nn.fingerprint import KEY, MISMATCH, UNABSORBED, fingerprints, layer_of_torch, with_fingerprints

_WRAPPERS = ("state_dict", "model", "model_state_dict")  # keys under which training scripts save a state dict
_PREFIXES = ("module.", "_orig_mod.")  # of DataParallel and DistributedDataParallel, and of torch.compile
_DEEPEST = 8  # of nested wrappers; a dictionary in a file may contain itself


def read_state(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state dict in a file of torch.save or safetensors, or in its contents, without wrapping dictionaries.

    Raises:
        ValueError: the file cannot be read, or has no state dict.
    """
    found = source if isinstance(source, Mapping) else _read(os.fspath(source))
    for _ in range(_DEEPEST):
        found = next((found[key] for key in _WRAPPERS if isinstance(found.get(key), Mapping)), found)
    others = [key for key, value in found.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
    if others or not found:
        has = f"{shorten(others)} in it are no tensors" if others else "it is empty"
        where = "" if isinstance(source, Mapping) else f" in {os.fspath(source)}"
        raise ValueError(f"no state dict found{where}, neither bare nor under one of {', '.join(_WRAPPERS)}: {has}")
    return with_fingerprints(found, fingerprints(found))


def read_header(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata of a safetensors file; nothing for other files. Anyone can write anything there."""
    if not os.fspath(path).endswith(".safetensors"):
        return {}
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def _read(path: str) -> Mapping[str, Any]:
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        header = read_header(path)  # raises if this is no safetensors file
        try:
            found = json.loads(header.get(KEY, "{}"))
            return with_fingerprints(load_file(path), {name: str(text) for name, text in found.items()})
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: its metadata {KEY!r} do not say what its layers compute: {error}") from error
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # files that are not checkpoints fail in many ways
        why = loading_fault(error)
        raise ValueError(
            f"{path} is not a state dict of torch.save, or contains code, which is not run: {why}"
        ) from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds a {type(found).__name__}, not a state dict")
    return found


def loading_fault(error: Exception) -> str:
    """Return the message of an error of torch.load, without its advice to load the file in a way that runs its code."""
    text = " ".join(str(error).split())
    text = text.rpartition("WeightsUnpickler error:")[2].partition("Check the documentation of torch.load")[0]
    text = text.partition("Please use `torch.serialization")[0].strip()
    # Text files fail with a KeyError whose message is a byte.
    return type(error).__name__ if not text or text.isdecimal() or "weights_only" in text else text


def strip_prefixes(state: dict[str, Tensor], expected: Iterable[str]) -> tuple[dict[str, Tensor], str]:
    """Return the state dict without the prefixes that wrappers add to every key, and these prefixes."""
    stripped, expected = "", list(expected)
    while prefix := next((p for p in _PREFIXES if _all_start(state, p) and not _all_start(expected, p)), ""):
        found = {name.removeprefix(prefix): text for name, text in fingerprints(state).items()}
        state = with_fingerprints({key.removeprefix(prefix): value for key, value in state.items()}, found)
        stripped += prefix
    return state, stripped


def load_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load a state dict whose tied tensors may be stored once, and whose keys may have the prefixes of wrappers.

    Raises:
        ValueError: a key is missing or unknown, or a shape differs. The message is one line.
    """
    expected = model.state_dict()
    state, _ = strip_prefixes(state, expected)
    other = layer_of_torch(model, state)
    if other is not None:
        raise ValueError(f"it does not fit the model: {other}")
    places = {key: (tensor.data_ptr(), tensor.shape) for key, tensor in expected.items() if tensor.numel()}
    given = {places[key]: state[key] for key in state.keys() & places.keys()}
    for key in expected:
        if key not in state and places.get(key) in given:
            state[key] = given[places[key]]
    try:
        with warnings.catch_warnings():  # the error says the same
            warnings.filterwarnings("ignore", f".*({MISMATCH}|{re.escape(UNABSORBED)})", UserWarning)
            model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"it does not fit the model: {' '.join(str(error).split())}") from error


def _all_start(keys: Iterable[str], prefix: str) -> bool:
    return all(key.startswith(prefix) for key in keys)


def shorten(names: list[str]) -> str:
    """Return the names in quotes, at most twelve."""
    rest = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(map(repr, names[:12])) + rest


def pack_state(source: nn.Module | Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the state dict of a model, or tensors by name, as the bytes of a safetensors file.

    Tied tensors of a model are stored once, under their first name. Equal states give equal bytes.
    """
    from safetensors.torch import save

    if isinstance(source, nn.Module):
        kept = source.state_dict()
        once = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        source = {name: tensor.detach() for name, tensor in once.items() if name in kept}
    data = save({name: t.contiguous() for name, t in source.items()}, {"format": "pt", **(metadata or {})})
    # safetensors writes metadata in random order. Equal states must give equal bytes, so the header is sorted.
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:]


def header_of(model: nn.Module) -> dict[str, str]:
    """Return metadata for a safetensors file that say what the model's layers compute; see `nn.fingerprint`."""
    return {KEY: json.dumps(fingerprints(model.state_dict()))}
