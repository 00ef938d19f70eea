"""Models, recipes and specs by name on the command line.

A model is `timm:NAME`, `torchvision:NAME`, `recipe:NAME` or `package.module:factory`; a spec `--norm bcn --groups 32
--weight ws` or `--norm my_norms:DyT`.
"""

import importlib
import importlib.util
import inspect
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from torch import nn

from micronorm.cli.printing import TargetError
from micronorm.convert import convert
from micronorm.data.files import import_optional
from micronorm.engine.journal import WEIGHTS
from micronorm.nn import SPECS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes import Recipe, find, unknown
from micronorm.records import FACTS

ANY_CLASSES = 2
"""Outputs of a recipe that takes their number from its data set, for commands whose result does not depend on it."""


class Target(NamedTuple):
    """What a target names: a model, what the user's factory returned after it, and the recipe that built it."""

    model: nn.Module
    rest: tuple = ()
    recipe: Recipe | None = None


def resolve(target: str, *, classes: int | None = None, from_file: bool = False) -> Target:
    """Build the model that a target names, without pretrained weights. The network of a recipe is converted.

    Args:
        target: `torchvision:NAME`, `timm:NAME`, `recipe:NAME`, `package.module:factory` or `file.py:factory`. A
            factory returns a model, or a tuple that begins with one.
        classes: The number of outputs of a recipe that takes it from its data set.
        from_file: The target was read from a data file. Such a target must not run code of the file's choice, so
            factories are refused.

    Raises:
        TargetError: The name is unknown (the message lists similar names), the factory fails or returns something
            else, or the recipe needs `classes`.
        ValueError: We have no such recipe.
    """
    found = _look_up(target, from_file=from_file)
    if isinstance(found, Recipe):
        if not (found.classes or classes):
            raise TargetError(
                f"{target} has as many outputs as its data set has classes, and the file does not say how many: give "
                "the run directory of `micronorm train`"
            )
        return Target(attempt(lambda: found.build(seed=0, classes=classes), f"{target} fails"), recipe=found)
    callable_ = callable(found) and not isinstance(found, nn.Module)
    made = attempt(found, f"{target} fails") if callable_ else found
    model, *rest = made if isinstance(made, tuple) and made else (made,)
    if not isinstance(model, nn.Module):
        raise TargetError(f"{target} must give a model or a tuple that begins with one, got {type(model).__name__}")
    return Target(model, tuple(rest))


def _look_up(target: str, *, from_file: bool) -> Any:
    """Return the model of a library, the recipe, or the object in the user's code that a target names."""
    source, colon, name = target.rpartition(":") if ".py:" in target else target.partition(":")
    if not colon and (Path(target) / FACTS).is_file():
        raise TargetError(
            f"{target!r} is a run directory: name its network, recipe:TABLE/ROW. With its weights: micronorm diagnose "
            f"recipe:TABLE/ROW --checkpoint {target}, or micronorm fold {target}"
        )
    if not colon or not source or not name:
        raise TargetError(
            f"{target!r} is not a target: write timm:NAME, torchvision:NAME, recipe:NAME, package.module:factory or "
            "file.py:factory"
        )
    known = {"torchvision": _torchvision, "timm": _timm, "recipe": find}
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


def find_weights(checkpoint: Path) -> Path:
    """Return the file of weights: the checkpoint itself, or the one in a run directory."""
    file = checkpoint / WEIGHTS if checkpoint.is_dir() else checkpoint
    if not file.is_file():
        raise TargetError(f"no file {file}")
    return file


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name, also as `recipe:NAME`, or one of the user's code: `file.py:name`, `module:name`.

    Raises:
        TargetError: the user's code has no such recipe.
        ValueError: we have no such recipe.
    """
    source, colon, attribute = name.rpartition(":")
    if not colon or source == "recipe":  # other commands write recipe:NAME
        return find(attribute)
    found = import_object(source, attribute)
    if not isinstance(found, Recipe):
        raise TargetError(f"{name} must be a recipes.Recipe, got {type(found).__name__}")
    return found


def import_object(source: str, name: str) -> Any:
    """Return an attribute of the user's module, by the module's name or by the path of its `.py` file."""
    load = _import_file if source.endswith(".py") else _import_module
    module = attempt(lambda: load(source), f"{source} cannot be imported")
    if not hasattr(module, name):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise TargetError(unknown(f"{source} has no {name!r}", name, public))
    return getattr(module, name)


def attempt(call: Any, fault: str, hint: str = "") -> Any:
    """Return what code of the user returns, which may raise anything: turn that into a TargetError of one sentence."""
    try:
        return call()
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"{fault} ({type(error).__name__}: {error}){hint}") from error


def _torchvision(name: str) -> nn.Module:
    models = import_optional("torchvision.models", "models of torchvision", "torchvision")
    known = models.list_models()
    if name not in known:
        raise TargetError(unknown(f"torchvision has no model {name!r}", name, known))
    accepted = inspect.signature(models.get_model_builder(name)).parameters
    # By default segmentation and detection models download the weights of their backbone.
    off = {key: None for key in ("weights", "weights_backbone") if key in accepted}
    return models.get_model(name, **off)


def _timm(name: str) -> nn.Module:
    timm = import_optional("timm", "models of timm", "timm")
    if not timm.is_model(name):
        raise TargetError(unknown(f"timm has no model {name!r}", name, timm.list_models()))
    return timm.create_model(name, pretrained=False)


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


def _import_file(source: str) -> Any:
    path = Path(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise TargetError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look a class's module up there
    sys.path.insert(0, str(path.parent.absolute()))  # the file may import its neighbours
    spec.loader.exec_module(module)
    return module


_CHANNELS = 64  # of the layer that a spec of the user's code is tried on

Norm = Annotated[
    str, typer.Option(help="Convert the norms to bcn, gn, bn, sn, …, or module:Spec of your own; none keeps them.")
]
Groups = Annotated[
    int | None, typer.Option(help="Groups of channels; fewer in layers whose channels they do not divide.")
]
Weight = Annotated[
    str, typer.Option(help="Convert the weights to ws, wn, cwn, or module:Spec of your own; none keeps them.")
]
Statistics = Annotated[str | None, typer.Option(help="BCN's statistics: step, sequential or batch. Default: step.")]


def norm_spec(name: str, **options: Any) -> NormSpec | None:
    """Return the norm spec of that name in any case, or None for "none". Options that are None keep their default.

    `module:Spec` and `file.py:Spec` name a spec of the user's own code.
    """
    return _spec(name, NormSpec, options)


def weight_spec(name: str) -> WeightSpec | None:
    """Return the weight spec of that name, as `norm_spec` does."""
    return _spec(name, WeightSpec, {})


def converted(model: nn.Module, norm: str, groups: int | None, weight: str) -> nn.Module:
    """Convert a model as the options say; return it as it is if both are "none"."""
    wanted = norm_spec(norm, groups=groups), weight_spec(weight)
    return convert(model, *wanted) if any(spec is not None for spec in wanted) else model


def _spec(name: str, kind: type, options: dict[str, Any]) -> Any:
    given = {key: value for key, value in options.items() if value is not None}
    if name.lower() == "none":
        if given:
            raise TargetError(f"--{', --'.join(given)} needs another norm than none; name it with --norm")
        return None
    known: dict[str, Any] = {key.lower(): spec for key, spec in SPECS.items() if issubclass(spec, kind)}
    source, _, attribute = name.rpartition(":")
    own = source and attribute
    spec: Any
    if own:
        spec = import_object(source, attribute)
        if not (isinstance(spec, kind) or (isinstance(spec, type) and issubclass(spec, kind))):
            raise TargetError(f"{name} must be a {kind.__name__} of micronorm.nn, a class or a value; got {spec!r}")
    elif name.lower() in known:
        spec = known[name.lower()]
    else:
        raise TargetError(unknown(f"no spec {name!r}", name.lower(), [*known, "none"]))
    foreign = sorted(given.keys() - {field.name for field in fields(spec)})
    if foreign:
        raise TargetError(f"{name} takes no --{', --'.join(foreign)}")
    return _build_own(name, spec, given) if own else spec(**given)


def _build_own(name: str, spec: Any, given: dict[str, Any]) -> Any:
    """Return a spec of the user's code, which may raise anything; build one layer to see it here and not later."""
    made = attempt(lambda: spec(**given) if isinstance(spec, type) else replace(spec, **given), f"{name} fails")
    sample: Any = _CHANNELS if isinstance(made, NormSpec) else nn.Conv2d(_CHANNELS, _CHANNELS, 3)
    layer = attempt(lambda: made(sample), f"{name} fails")
    if not isinstance(layer, nn.Module):
        raise TargetError(f"{name} must build an nn.Module, got {type(layer).__name__}")
    return made
