"""Models and recipes by name on the command line, such as `timm:NAME`, `recipe:NAME` or `package.module:factory`."""

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from micronorm.recipes import Recipe, find

MISUSE = 2
"""The exit code for a wrong target or option."""


class TargetError(Exception):
    """A target or an option that cannot be used; the message is one line for the user."""


def resolve(target: str, *, from_file: bool = False) -> nn.Module | tuple:
    """Build the model that a target names, without pretrained weights.

    Args:
        target: `torchvision:NAME`, `timm:NAME`, `recipe:NAME`, `package.module:factory` or `file.py:factory`.
        from_file: The target was read from a data file. Such a target must not run code of the file's choice, so
            factories are refused.

    Returns:
        The model; or the model or tuple that the user's factory returns. The network of a recipe is converted.

    Raises:
        TargetError: The name is unknown (the message lists similar names), or the factory fails or returns something
            else.
    """
    return _call(target, _look_up(target, from_file=from_file))


def resolve_model(target: str, *, from_file: bool = False) -> tuple[nn.Module, Recipe | None]:
    """Build the model that a target names, as `resolve` does; take the first item if a factory returns a tuple.

    Returns:
        The model, and the recipe that built it, or None. The network of a recipe is converted already.
    """
    found = _look_up(target, from_file=from_file)
    made = _call(target, found)
    model = made if isinstance(made, nn.Module) else next(iter(made), None)
    if not isinstance(model, nn.Module):
        raise TargetError(f"{target} must give a model or a tuple that begins with one, got {type(model).__name__}")
    return model, found if isinstance(found, Recipe) else None


def _look_up(target: str, *, from_file: bool) -> Any:
    """Return the model of a library, the recipe, or the object in the user's code that a target names."""
    source, colon, name = target.rpartition(":") if ".py:" in target else target.partition(":")
    if not colon or not source or not name:
        raise TargetError(
            f"{target!r} is not a target: write timm:NAME, torchvision:NAME, recipe:NAME, package.module:factory or "
            "file.py:factory"
        )
    known = {"torchvision": _torchvision, "timm": _timm, "recipe": _recipe}
    if source in known:
        return known[source](name)
    if from_file:
        raise TargetError(
            f"the file says that its model is {target!r}, which is not run: a file may name a recipe or a model of "
            f"timm or torchvision only. If you trust that code, give --model {target}"
        )
    return import_object(source, name)


def input_channels(model: nn.Module) -> int:
    """Return the input channels of a model's first convolution over images, or 3."""
    return next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name, or the one that the user's own code defines: `file.py:name`, `module:name`.

    Raises:
        TargetError: the user's code has no such recipe.
        ValueError: we have no such recipe.
    """
    source, colon, attribute = name.rpartition(":")
    if not colon:
        return find(name)
    found = import_object(source, attribute)
    if not isinstance(found, Recipe):
        raise TargetError(f"{name} must be a recipes.Recipe, got {type(found).__name__}")
    return found


def import_object(source: str, name: str) -> Any:
    """Return an attribute of the user's module, by the module's name or by the path of its `.py` file."""
    module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    if not hasattr(module, name):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise TargetError(unknown(f"{source} has no {name!r}", name, public))
    return getattr(module, name)


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


def _recipe(name: str) -> Recipe:
    try:
        return find(name)
    except ValueError as error:
        raise TargetError(str(error)) from error


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TargetError(f"{package} is not installed: pip install {package}") from error


def _import_module(source: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:  # a console script, unlike `python -m`, does not search it
        sys.path.insert(0, here)
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        missing = error.name or source
        if source == missing or source.startswith(missing + "."):
            raise TargetError(f"no module {source!r} on the path or in {here}") from error
        raise TargetError(f"{source} imports {missing!r}, which is not installed") from error
    except Exception as error:  # a user's module may raise anything, a SyntaxError for example
        raise TargetError(f"{source} cannot be imported ({type(error).__name__}: {error})") from error


def _import_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise TargetError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look a class's module up there
    sys.path.insert(0, str(path.parent.absolute()))  # the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything
        raise TargetError(f"{path} cannot be imported ({type(error).__name__}: {error})") from error
    return module


def _call(target: str, factory: Any) -> nn.Module | tuple:
    """Return what a factory makes. A recipe gives its network; a model or a tuple stands for itself."""
    try:
        if isinstance(factory, Recipe):
            return factory.build(seed=0)
        made = factory() if callable(factory) and not isinstance(factory, nn.Module) else factory
    except Exception as error:  # a user's factory may raise anything
        raise TargetError(f"{target} fails ({type(error).__name__}: {error})") from error
    if not isinstance(made, nn.Module | tuple):
        raise TargetError(f"{target} must give a model or (model, batch, loss), got {type(made).__name__}")
    return made


def unknown(message: str, name: str, known: Sequence[str]) -> str:
    """Extend a message about an unknown name by the most similar known names."""
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    if near:
        return f"{message}; near it: {', '.join(near)}"
    some = f" ({', '.join(known)})" if len(known) <= 20 else ""
    return f"{message}, and none of {len(known)} names is similar{some}"
