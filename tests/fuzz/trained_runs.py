"""Hostile run directories of a training that really ended, and the commands that load their network."""

import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from micronorm import recipes
from micronorm.engine.settings import Execution
from micronorm.recipes.run import run_recipe
from tests.fuzz import values

_RECIPES = ("digits", "digits/gn", "shapes")


@functools.cache
def _trained(recipe: str) -> Path:
    """Return the run directory of one step of a recipe. It is removed when this process ends."""
    place = tempfile.TemporaryDirectory(prefix="micronorm-fuzz-runs-")
    _kept.append(place)
    execution = Execution(device=torch.device("cpu"), steps=1)
    run_recipe(recipes.find(recipe), out=Path(place.name) / "run", execution=execution)
    return Path(place.name) / "run"


_kept: list[tempfile.TemporaryDirectory[str]] = []


def write(chance: random.Random, folder: Path) -> list[str]:
    """Write a run directory with something changed, and images; return a command that loads its network."""
    shutil.copytree(_trained(chance.choice(_RECIPES)), folder / "run")
    _write_images(chance, folder / "images")
    for _ in range(chance.choice((1, 1, 2, 4))):
        _damage(chance, folder / "run")
    command = chance.choice(
        (
            ["predict", "run", "images"],
            ["predict", "run", "images", "--out", chance.choice(("out", "run", "images/a.png", "fifo", "out/deep"))],
            ["predict", "run", "images/a.png", "images/a.png", "--recipe", chance.choice(("digits", "own:one", "x:y"))],
            ["fold", "run", "--out", "folded.safetensors"],
            ["fold", "run", "--model", "recipe:digits", "--out", "folded.safetensors"],
            ["fold", "run/model.safetensors", "--out", "folded.safetensors"],
            ["diagnose", "recipe:digits", "--checkpoint", "run/model.safetensors", "--images", "4"],
            ["train", "digits", "--weights", "run/model.safetensors", "--steps", "1", "--out", "next"],
            ["train", "digits", "--resume", "--out", "run", "--steps", "1"],
        )
    )
    return [*command, *(["--device", "cpu"] if command[0] in ("predict", "train") else [])]


def _write_images(chance: random.Random, place: Path) -> None:
    place.mkdir()
    Image.new("RGB", (9, 7)).save(place / "a.png")
    match chance.randrange(6):
        case 0:
            (place / "b.png").write_bytes(chance.randbytes(40))
        case 1:
            values.pipe(place / "b.jpg")
        case 2:
            (place / "b.JPG").symlink_to("b.JPG")
        case 3:
            (place / "b.png").mkdir()
        case 4:
            Image.new(chance.choice(("1", "P", "I;16", "RGBA", "LA")), (1, chance.choice((1, 300)))).save(
                place / "b.png"
            )
        case _:
            pass


def _damage(chance: random.Random, run: Path) -> None:
    facts, weights = run / "run.json", run / "model.safetensors"
    way = chance.random()
    if way < 0.7 and facts.is_file():
        content = json.loads(facts.read_text())
        part = chance.choice([*content, "definition", "definition", "data", "data", "variation", "recipe"])
        content[part] = values.changed(chance, content.get(part))
        facts.write_text(json.dumps(content))
    elif way < 0.9 and weights.is_file():
        weights.write_bytes(_changed_tensors(chance, weights.read_bytes()))
    else:
        file = chance.choice([path for path in sorted(run.iterdir()) if path.is_file()] or [facts])
        file.unlink(missing_ok=True)
        chance.choice((values.pipe, Path.mkdir, lambda path: path.symlink_to(path.name), lambda path: None))(file)


def _changed_tensors(chance: random.Random, content: bytes) -> bytes:
    """Return a safetensors file with another header, or other bytes."""
    end = 8 + int.from_bytes(content[:8], "little")
    if chance.random() < 0.3:
        at = chance.randrange(len(content) + 1)
        return chance.choice((content[:at], content[:at] + b"\xff\xff" + content[at + 2 :], b""))
    try:
        header: Any = json.loads(content[8:end])
    except (ValueError, RecursionError):
        return content  # it was damaged before
    name = chance.choice([*header, "__metadata__", "__metadata__"])
    inner = header.get(name)
    if isinstance(inner, dict) and name == "__metadata__" and chance.random() < 0.7:
        inner = {**inner, chance.choice(("model", "micronorm", "norm")): chance.choice(values.TEXTS)}
    else:
        inner = values.changed(chance, inner)
    text = json.dumps({**header, name: inner}).encode("utf-8", "replace")
    return len(text).to_bytes(8, "little") + text + content[end:]
