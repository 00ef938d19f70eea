"""Hostile input: a function per kind makes a case from a random generator, in a folder of its own."""

import contextlib
import hashlib
import inspect
import json
import math
import os
import random
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors.torch import save as to_safetensors

from micronorm.cli import app
from micronorm.engine import checkpoint
from micronorm.recipes import find
from tests.fuzz import data_sets, trained_runs
from tests.report.build import full_run
from tests.report.parsed import Parsed

COMMANDS: Mapping[str, Any] = {command.callback.__name__: command.callback for command in app.registered_commands}  # type: ignore[union-attr]


@dataclass(frozen=True)
class Case:
    """A command line, and a check of what it wrote."""

    arguments: list[str]
    check: Callable[[Path], None] = lambda folder: None
    around: Callable[[Path], contextlib.AbstractContextManager[None]] = lambda folder: contextlib.nullcontext()
    """What is replaced or watched while the command runs."""


# --- command lines ----------------------------------------------------------------------------------------------------

FACTORIES = {
    "good": "from torch import nn\ndef make():\n    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), "
    "nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))\n",
    "wrong_syntax": "def make(:\n",
    "wrong_import": "import no_such_package_at_all\n",
    "failing": "raise OSError('at import')\n",
    "strange": "make = 7\ndef none(): return None\ndef empty(): return ()\ndef text(): return ('a', 1, None)\n"
    "def fails(): raise KeyError('x')\ndef asks(argument): return argument\n",
    "null": "\0",
    "own": "from dataclasses import dataclass\nimport micronorm as mn\nfrom torch import nn\n"
    "from micronorm.recipes import find\none = find('digits')\nmany = [one]\n"
    "class Fails(nn.Module):\n    def __init__(self, num_channels):\n        raise KeyError(num_channels)\n"
    "class Wrong(nn.Module):\n    def __init__(self, num_channels):\n        super().__init__()\n"
    "    def forward(self, x):\n        return x.no_such_attribute\n"
    "@dataclass(frozen=True)\nclass Failing(mn.NormSpec):\n    layer = Fails\n"
    "@dataclass(frozen=True)\nclass Wrongs(mn.NormSpec):\n    layer = Wrong\n"
    "@dataclass(frozen=True)\nclass Nothing(mn.NormSpec):\n    def __call__(self, c, *, dims=2): return None\n"
    "@dataclass(frozen=True)\nclass Plain(mn.NormSpec):\n    def __call__(self, c, *, dims=2): return nn.Identity()\n"
    "class Loose(mn.NormSpec):\n    pass\n",
}
_NUMBERS = (*"0 1 1 2 2 3 8 -1 0.5 2147483648 9223372036854775808 1e400 nan inf".split(), "1" * 400)  # noqa: SIM905
_PATHS = (
    *"file file/below folder nowhere/deep/page link fifo run run/run.json model.pt model.safetensors".split(),  # noqa: SIM905
    *("new.csv", "new.safetensors", "new.onnx", ".", "n" * 300, "n/" * 2500 + "n", "a\0b", "\udce9t\udce9"),
)
_TARGETS = (
    *("good:make", "good:make", "good:other", "good:__name__", "good:nn", "good.more:make", "null:make", "json:loads"),
    *("wrong_syntax:make", "wrong_import:make", "failing:make", "strange:make", "strange:none", "strange:empty"),
    *("strange:text", "strange:fails", "strange:asks", "a.b.c:d", "a b:c", "é:é", "..:a", ".:a", ":", "a:", ":a"),
    *("timm:resnet10t", "timm:", "timm:n" * 100, "torchvision:resnet18", "torchvision:x", "recipe:digits", "recipe:"),
    *("recipe:x/y", "x" * 3000 + ":y", "\0:x", "\udce9:x"),
)
_WORDS = (
    *_TARGETS,
    *("", " ", "-", "a b", "[red]", "é", "\x1b[31m", "\n", "x" * 5000),
    *"auto none random digits digits/bcn-ws shapes cifar1 cifar1/c10-bcn-ws imagenet fig:dist fig:".split(),  # noqa: SIM905
    *"float32 ddp fsdp estimates".split(),  # noqa: SIM905
    *"bcn gn bn sn ws wn step sequential batch nchw eager graph 16x64x7x7 1x1 large mn-bcn".split(),  # noqa: SIM905
)
_OWN_NORMS = ("own:Failing", "own:Wrongs", "own.py:Nothing", "own:Plain", "own:Loose", "own:Fails", "own.py:no")
_DEVICES = ("cpu", "cuda", "cuda:7", "cuda:-1", "meta", "mps", "vulkan", "cpu:1", "cuda:x")
_USUAL = {
    "target": ("good:make",) * 20 + _TARGETS,
    "recipe": (
        "digits",
        "digits/gn",
        "shapes",
        "cifar1",
        "imagenet",
        "own:one",
        "own.py:one",
        "own.py:many",
        "own:Fails",
    ),
    "table": ("digits", "cifar1", "imagenet", "fig:dist", "fig:stat_diff"),
    "device": _DEVICES,
    "dtype": ("float32", "float64", "bfloat16", "float16", "int8", "complex64"),
    "norm": ("bcn", "gn", "bn", "sn", "frn", "none", "good:make", "strange:make", "wrong_syntax:x", *_OWN_NORMS),
    "weight": ("ws", "wn", "cwn", "none", "good:make"),
    "statistics": ("step", "sequential", "batch", "x"),
}
_LONG = {"--download", "--compile", "--workers", "--help"}  # the network, and work that takes long
_QUICK = {"train": ["--steps", "1", "--epochs", "1"], "check": ["--size", "8"], "diagnose": ["--size", "8"]}


def command_line(chance: random.Random, folder: Path) -> Case:
    """Return a command with random options and values, of which about half have the right type."""
    _furnish(folder)
    name = chance.choice(sorted(COMMANDS))
    words, options = [], []
    for parameter in inspect.signature(COMMANDS[name]).parameters.values():
        kind, about = str(parameter.annotation), parameter.annotation.__metadata__[0]
        if isinstance(about, typer.models.ArgumentInfo):
            words += [_value(chance, parameter.name, kind)] if chance.random() < 0.97 else []
            continue
        option = (about.param_decls or [f"--{parameter.name.replace('_', '-')}"])[0]
        values = 0 if "bool" in kind else 2 if "tuple" in kind else 1
        if option not in _LONG:
            options.append([option, *(_value(chance, parameter.name, kind) for _ in range(values))])
    for option in chance.sample(options, min(len(options), chance.choice((0, 1, 1, 2, 3)))):
        words += option
    quick = _QUICK.get(name, []) if chance.random() < 0.9 or name == "train" else []
    return Case([name, *words, *quick])


def _value(chance: random.Random, name: str, kind: str) -> str:
    if chance.random() < 0.15:
        return chance.choice((*_NUMBERS, *_PATHS, *_WORDS))
    if "[int" in kind or "float" in kind or "tuple" in kind:
        return chance.choice(_NUMBERS)
    if "Path" in kind or name == "data":
        return chance.choice(_PATHS)
    if name in _USUAL and chance.random() < 0.8:
        return chance.choice(_USUAL[name])
    return chance.choice(_WORDS if chance.random() < 0.9 else _PATHS)


def _furnish(folder: Path) -> None:
    """Put there what the words name."""
    (folder / "file").write_text("text")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("link")
    os.mkfifo(folder / "fifo")
    for name, text in FACTORIES.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text("{}")
    (folder / "model.pt").write_bytes(b"PK\x03\x04 not a checkpoint")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


# --- run directories --------------------------------------------------------------------------------------------------

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**63, 10**399, -(10**399), 1e308, -1e308, 5e-324, 0.5, "", "text", "1"),
    *("\0", "\x1b[31m", "\ud800", "<script>", "$x$", "x" * 3000, [], [1], {}, {"a": 1}, {"float": "nan"}),
    *({"float": "inf"}, {"float": "-inf"}, {"float": "text"}, [[[]]], {"": {}}, [None]),
)


def run_directory(chance: random.Random, folder: Path) -> Case:
    """Return a command that reads a run directory in which something was changed."""
    names = ("one",) if chance.random() < 0.8 else ("one", "two")
    for name in names:
        looks = chance.random() < 0.5  # pages without them take a third of the time
        full_run(folder / "runs" / name, epochs=2, steps_per_epoch=2, layers=2, looks=looks, paper={"top1": 5.0})
    (folder / "runs" / "one" / "checkpoints").mkdir()
    for _ in range(chance.choice((1, 1, 2, 6))):
        _damage(chance, folder / "runs" / "one")
    commands = (
        ["report", "runs", "--out", "page.html"],
        ["report", "runs/one", "--out", "page.html", "--plots", "plots"],
        ["reproduce", "digits", "--json", "--runs", "runs"],
        ["reproduce", "digits", "--runs", "runs"],
        ["train", "digits", "--resume", "--out", "runs/one", "--steps", "1"],
        ["reproduce", "fig:dist", "--json", "--runs", "runs"],
    )
    return Case(list(chance.choices(commands, (6, 3, 2, 1, 1, 1))[0]), _check_page)


def _damage(chance: random.Random, run: Path) -> None:
    file = chance.choice([path for path in sorted(run.iterdir()) if path.name != "checkpoints"])
    way = chance.random()
    if way < 0.75 and file.is_file() and not file.is_symlink():
        lines = file.read_text("utf-8", errors="replace").splitlines()
        if not lines:
            return
        if file.suffix == ".json":
            file.write_text(json.dumps(_changed(chance, _parsed("\n".join(lines)))))
        else:
            k = chance.randrange(len(lines))
            lines[k] = json.dumps(_changed(chance, _parsed(lines[k])))
            file.write_text("\n".join(lines) + "\n")
        return
    with contextlib.suppress(IsADirectoryError):
        file.unlink()
    if file.exists():
        return
    match chance.randrange(8):
        case 0:
            os.mkfifo(file)
        case 1:
            file.mkdir()
        case 2:
            file.symlink_to(file.name)
        case 3:
            file.write_text("[" * 100_000)
        case 4:
            file.write_text('{"a":' * 3_000 + "1" + "}" * 3_000 + "\n")
        case 5:
            file.write_bytes(chance.randbytes(64))
        case 6:
            file.write_text('{"step": ' + "9" * 5000 + "}\n")
        case _:
            file.write_text(chance.choice(("", "null\n", "7\n", "[]\n", "{}\n", "NaN\n", '{"step": 1e999}\n')))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


def _changed(chance: random.Random, value: Any) -> Any:
    """Return the value with one part at any depth replaced or removed."""
    if isinstance(value, (dict, list)) and value and chance.random() < 0.85:
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        copy: Any = value.copy()
        if chance.random() < 0.1:
            del copy[key]
        else:
            copy[key] = _changed(chance, value[key])
        return copy
    return chance.choice(_VALUES)


def _check_page(folder: Path) -> None:
    """Check that the page's elements are closed, that nothing in it is executed, and that pictures are XML."""
    for page in folder.glob("*.html"):
        parsed = Parsed(page.read_text("utf-8"))
        assert parsed.open == [], "elements are left open"
        for tag, attributes in parsed.tags:
            assert tag != "script", "a script got on the page"
            assert not any(name.startswith("on") for name in attributes), f"{tag} has {attributes}"
    for picture in folder.glob("plots/*.svg"):
        ET.parse(picture)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def crafted_checkpoint(chance: random.Random, folder: Path) -> Case:
    """Return a command that reads a file of weights, or a checkpoint, with fields of wrong types."""
    _furnish(folder)
    state: Any = {"step": 1, "model": find("digits/bcn-ws").build(seed=0).state_dict()}
    if chance.random() < 0.4:  # a checkpoint with a valid digest
        state = {"format": checkpoint.FORMAT, "version": checkpoint.VERSION, "optimizer": {}, "epoch": 0, **state}
        state = _changed_state(chance, state)
        full_run(folder / "run2", epochs=1, steps_per_epoch=1, looks=False)
        torch.save(state, folder / "state.pt")
        content = (folder / "state.pt").read_bytes()
        place = folder / "run2" / "checkpoints" / f"step-00000001.{hashlib.sha256(content).hexdigest()[:16]}.pt"
        place.parent.mkdir()
        place.write_bytes(content)
        return Case(["train", "digits", "--out", "run2", "--resume", "--steps", "2"])
    suffix = chance.choice((".pt", ".pth", ".safetensors"))
    file = folder / f"weights{suffix}"
    if suffix == ".safetensors":
        tensors = {name: value for name, value in state["model"].items() if chance.random() < 0.9}
        words = {chance.choice(("model", "norm", "groups", "weight", "statistics")): chance.choice(_WORDS)}
        words = {key: value.encode("utf-8", "replace").decode() for key, value in words.items()}
        content = to_safetensors(tensors, words if chance.random() < 0.7 else None)
        if chance.random() < 0.5:
            cut = chance.randrange(len(content))
            content = chance.choice((content[:cut], content[:cut] + b"\xff" + content[cut + 1 :], b"", b"{}"))
        file.write_bytes(content)
    else:
        torch.save(_changed_state(chance, state), file)
        if chance.random() < 0.3:
            content = file.read_bytes()
            file.write_bytes(content[: chance.randrange(len(content))])
    commands = (
        ["fold", file.name, "--model", "good:make", "--out", "folded.safetensors"],
        ["fold", file.name, "--out", "folded.safetensors"],
        ["diagnose", "good:make", "--checkpoint", file.name, "--size", "8", "--images", "4"],
        ["diagnose", "recipe:digits", "--checkpoint", file.name, "--images", "4"],
        ["diagnose", "good:make", "--data", file.name, "--images", "4"],
        ["train", "digits", "--weights", file.name, "--steps", "1", "--epochs", "1"],
    )
    return Case(list(chance.choice(commands)))


def _changed_state(chance: random.Random, state: Any) -> Any:
    for _ in range(chance.choice((1, 2))):
        if isinstance(state, dict):
            key = chance.choice([*state, 7, "model", "model"])
            inner = state.get(key)
            whole = not isinstance(inner, dict) or chance.random() < 0.5
            state = {**state, key: _odd(chance) if whole else _changed_state(chance, inner)}
    return state if chance.random() < 0.9 else _odd(chance)


def _odd(chance: random.Random) -> Any:
    cycle: dict[str, Any] = {}
    cycle["state_dict"] = cycle
    tensors = [torch.zeros(shape, dtype=dtype) for shape in ((), (0,), (3,)) for dtype in (torch.float16, torch.int64)]
    tensors += [torch.full((3,), math.nan), torch.zeros(2, 2, dtype=torch.complex64), torch.zeros(1, 2).to_sparse()]
    return chance.choice((*tensors, cycle, (1, 2), b"bytes", *(value for value in _VALUES if value != "\ud800")))


# --- names on pages ---------------------------------------------------------------------------------------------------

_PARTS = (
    *("<script>alert(1)</script>", "\"'&", "<img src=x onerror=alert(1)>", "]]>", "<!--", "</style>", "</svg>", "&#0;"),
    *("\0", "\x01", "\x0b", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u202e", "\ufeff", "\ufffe", "\uffff", "\ud800"),
    *("$\\frac{", "$", "\\", "%s", "{0}", "_", "^", "é", "漢字", "\U0001f600", "\n", "\t", " ", "../", "/", "x" * 300),
)


def hostile_names(chance: random.Random, folder: Path) -> Case:
    """Return a report on runs whose recipe, layers, labels and figures have names made of hostile pieces."""
    evil = "".join(chance.choices(_PARTS, k=chance.choice((1, 2, 5))))
    for name in ("one", "two")[: chance.choice((1, 2))]:
        path = folder / "runs" / name
        data = {"name": evil, "train": 1, "test": 1}
        full_run(path, epochs=1, steps_per_epoch=2, layers=1, evil=evil, recipe=f"{evil}{name}", name=evil, data=data)
        rows = [json.loads(line) for line in (path / "epochs.jsonl").read_text().splitlines()]
        for row in rows:
            row["test"][evil] = 1.0
        (path / "epochs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.rmtree(folder / "plots", ignore_errors=True)
    plots = ["--plots", "plots"] if chance.random() < 0.15 else []
    title = evil.replace("\0", "")
    return Case(["report", "runs", "--out", "page.html", f"--title={title}", *plots], _check_page)


# --- data sets and trained runs ---------------------------------------------------------------------------------------


def data_set(chance: random.Random, folder: Path) -> Case:
    """Return the training on a data set in which something was changed."""
    return Case(data_sets.write(chance, folder), around=data_sets.reading)


def trained_run(chance: random.Random, folder: Path) -> Case:
    """Return a command that loads the network of a run directory in which something was changed."""
    _furnish(folder)
    shutil.rmtree(folder / "run")
    return Case(trained_runs.write(chance, folder))


KINDS: Mapping[str, Callable[[random.Random, Path], Case]] = {
    "command-line": command_line,
    "run-directory": run_directory,
    "checkpoint": crafted_checkpoint,
    "names": hostile_names,
    "data-set": data_set,
    "trained-run": trained_run,
}
