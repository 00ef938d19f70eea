"""Models by name on the command line: `package.module:factory`, `torchvision:NAME` or `timm:NAME`."""

import difflib
import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

MISUSE = 2
"""The exit code for a wrong target or option."""


class TargetError(Exception):
    """A target or an option that cannot be used; the message is one line for the user."""


def resolve(target: str, *, also: Sequence[str] = ()) -> nn.Module | tuple:
    """Build the model that a target names, without pretrained weights.

    Args:
        target: The target as given on the command line.
        also: Other forms that the command accepts, to be listed in the error message.

    Returns:
        The model; or the model or tuple that the user's factory returns.

    Raises:
        TargetError: The name is unknown (the message lists similar names), or the factory fails or returns something
            else.
    """
    source, colon, name = target.partition(":")
    if not colon or not source or not name:
        *known, last = "package.module:factory", "torchvision:NAME", "timm:NAME", *also
        raise TargetError(f"{target!r} is not a target: write {', '.join(known)} or {last}")
    if source == "torchvision":
        return _torchvision(name)
    if source == "timm":
        return _timm(name)
    return _factory(source, name)


def resolve_model(target: str) -> nn.Module:
    """Build the model that a target names, as `resolve` does; take the first item if a factory returns a tuple."""
    made = resolve(target)
    model = made if isinstance(made, nn.Module) else next(iter(made), None)
    if not isinstance(model, nn.Module):
        raise TargetError(f"{target} must give a model or a tuple that begins with one, got {type(model).__name__}")
    return model


def _torchvision(name: str) -> nn.Module:
    models: Any = _library("torchvision.models", "torchvision")
    known = models.list_models()
    if name not in known:
        raise TargetError(unknown(f"torchvision has no model {name!r}", name, known))
    accepted = inspect.signature(models.get_model_builder(name)).parameters
    # By default segmentation and detection models download the weights of their backbone.
    off = {key: None for key in ("weights", "weights_backbone") if key in accepted}
    return models.get_model(name, **off)


def _timm(name: str) -> nn.Module:
    timm: Any = _library("timm", "timm")
    if not timm.is_model(name):
        raise TargetError(unknown(f"timm has no model {name!r}", name, timm.list_models()))
    return timm.create_model(name, pretrained=False)


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TargetError(f"{package} is not installed: pip install {package}") from error


def _factory(source: str, name: str) -> nn.Module | tuple:
    here = str(Path.cwd())
    if here not in sys.path:  # a console script, unlike `python -m`, does not search it
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(source)
    except ModuleNotFoundError as error:
        missing = error.name or source
        if source == missing or source.startswith(missing + "."):
            raise TargetError(f"no module {source!r} on the path or in {here}") from error
        raise TargetError(f"{source} imports {missing!r}, which is not installed") from error
    except Exception as error:  # a user's module may raise anything, such as SyntaxError
        raise TargetError(f"{source} cannot be imported ({type(error).__name__}: {error})") from error
    factory = getattr(module, name, None)
    if factory is None:
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise TargetError(unknown(f"{source} has no {name!r}", name, public))
    try:
        made = factory() if callable(factory) and not isinstance(factory, nn.Module) else factory
    except Exception as error:  # a user's factory may raise anything
        raise TargetError(f"{source}:{name} fails ({type(error).__name__}: {error})") from error
    if not isinstance(made, (nn.Module, tuple)):
        raise TargetError(f"{source}:{name} must give a model or (model, batch, loss), got {type(made).__name__}")
    return made


def unknown(message: str, name: str, known: Sequence[str]) -> str:
    """Extend a message about an unknown name by the most similar known names."""
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    if near:
        return f"{message}; near it: {', '.join(near)}"
    some = f" ({', '.join(known)})" if len(known) <= 20 else ""
    return f"{message}, and none of {len(known)} names is similar{some}"
