"""A run of a few milliseconds: two epochs of three steps, over 20 images of 5×5, with every kind of chance in it."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import micronorm as mn
from micronorm.data.samples import MemorySamples, PadCropFlip, Standardization
from micronorm.engine.loop import train
from micronorm.engine.optimization import SGD, Cosine
from micronorm.engine.settings import Execution, Outcome, Settings
from micronorm.engine.task import Listener
from micronorm.tasks.classification import Classification

STEPS = 6
SETTINGS = Settings(epochs=2, step_batch=8, optimizer=SGD(0.02), schedule=Cosine(), seed=3, dtype=torch.float64)


class Noise(nn.Module):
    """Draws from the global generators, which no key governs: a resumed run must find their states again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-3 * torch.randn_like(x) * random.random() * numpy.random.rand()


def tiny_model(*, channels: int = 4, noise: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        mn.nn.WSConv2d(1, channels, 3),
        mn.nn.BatchChannelNorm(channels, 2),
        nn.ReLU(),
        Noise() if noise else nn.Identity(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(9 * channels, 3),
    )


def tiny_task() -> Classification:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (28, 1, 5, 5), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 3, (28,), generator=generator)
    grey, chance = Standardization((127.5,), (73.6,)), PadCropFlip(pad=1, flip=True)
    learn = MemorySamples(images[:20], labels[:20], standardization=grey, augmentation=chance)
    return Classification(learn, MemorySamples(images[20:], labels[20:], standardization=grey), classes=3)


class Heard(Listener):
    """Keeps messages, and does something at a step."""

    def __init__(self, at: int | None = None, act: Any = None) -> None:
        self.messages: list[str] = []
        self.at, self.act = at, act

    def on_message(self, text: str) -> None:
        self.messages.append(text)

    def on_step(self, row: dict[str, Any]) -> None:
        if row["step"] == self.at:
            self.act()


def run(out: Path | None, *, model: nn.Module | None = None, listener: Heard | None = None, **options: Any) -> Outcome:
    """Train the tiny model; options are those of Settings and Execution, `resume`, `facts` and `observer`."""
    how = {"out": out, "listener": listener, "resume": options.pop("resume", False)}
    how |= {"observer": options.pop("observer", None), "facts": options.pop("facts", None)}
    changes = {name: options.pop(name) for name in list(options) if name != "steps" and hasattr(SETTINGS, name)}
    execution = Execution(**{"save_steps": 2, "device": torch.device("cpu"), **options})
    settings = replace(SETTINGS, **changes)
    return train(model or tiny_model(), tiny_task(), settings, execution, **how)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, to see that nothing has changed."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
