"""Synthetic run directories with rows of every kind, made by formula: nothing is trained."""

import base64
import io
import math
from pathlib import Path
from typing import Any

from PIL import Image

from micronorm.records import Run, write_predictions

EVIL = "<script>alert(1)</script>\"'&<img src=x onerror=alert(1)>"

FACTS = {
    "recipe": "digits",
    "settings": {"epochs": 3, "step_batch": 32, "seed": 0},
    "execution": {"micro_batch": 1},
    "data": {"name": "digits", "train": 1297, "test": 500},
    "environment": {"torch": "2.11", "cpu": {"model": "a processor"}},
    "revision": "0123abc",
    "command": "micronorm train digits",
    "date": "2025-01-02T03:04:05+00:00",
}


def begin(folder: Path, **facts: Any) -> Run:
    """A run that has only begun."""
    return Run.create(folder, {**FACTS, **facts})


def full_run(
    folder: Path,
    *,
    epochs: int = 6,
    steps_per_epoch: int = 40,
    layers: int = 8,
    level: float = 1.0,
    looks: bool = True,
    memory: bool = True,
    finished: bool = True,
    evil: str = "",
    **facts: Any,
) -> Path:
    """A run with steps, epochs, looks and predictions. `level` makes its curves higher, `evil` goes into all text."""
    settings = {"epochs": epochs, "step_batch": 64, "seed": 0, "note": evil}
    run = begin(folder, **{"settings": settings, "command": f"micronorm train digits {evil}", **facts})
    for epoch in range(epochs):
        first = epoch * steps_per_epoch + 1
        run.append_steps(
            [
                step_row(step, epoch, level=level, memory=memory, total=epochs * steps_per_epoch)
                for step in range(first, first + steps_per_epoch)
            ]
        )
        done = first + steps_per_epoch - 1
        error = level * 40 / (epoch + 2) ** 1.3
        train, test = {"loss": level * 2.2 / (epoch + 1)}, {"loss": error / 20, "top1": error, "top5": error / 6}
        run.append_epoch({"epoch": epoch, "step": done, "seconds": 1.0, "train": train, "test": test})
        if looks:
            run.append_diagnostics(look_row(done, epoch, epochs, layers=layers, level=level, evil=evil))
    write_predictions(folder, [prediction(k, evil=evil) for k in range(16)])
    if finished:
        run.finish({"steps": epochs * steps_per_epoch, "figures": {}, "finished": True})
    return run.path


def step_row(step: int, epoch: int, *, level: float, memory: bool, total: int) -> dict[str, Any]:
    wave = math.sin(1.7 * step) * math.sin(0.31 * step)
    return {
        "step": step,
        "epoch": epoch,
        "loss": level * (0.05 + 2.2 * math.exp(-3 * step / total)) * (1 + 0.25 * wave),
        "lr": 0.05 * (1 + math.cos(math.pi * step / total)),
        "samples": 64,
        "seconds": 0.02 * (1.2 + 0.2 * wave) / level,
        "micro_batch": 64 if step < total / 3 else 32,
        "memory": int(2.1e9 * level * (1 if step < 5 else 1.15)) if memory else None,
    }


def look_row(step: int, epoch: int, epochs: int, *, layers: int, level: float, evil: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    part = epoch / max(1, epochs - 1)
    for k in range(layers):
        depth = k / max(1, layers - 1)
        spread = level * (0.15 + 0.5 * part * (0.4 + depth))
        found[f"layer{k // 4 + 1}.{k % 4}.bn{evil}"] = {
            "kind": "norm",
            "norm": "GroupNorm",
            "channels": 32,
            "groups": 8,
            "stat_diff": spread,
            "stat_diff_worst": 2 * spread,
            "sigma_mean": 0.8 * spread * (1 + 0.3 * math.sin(3 * k)),
            "sigma_std": 0.4 * spread * (1 + 0.3 * math.cos(5 * k)),
            "active": 0.5,
            "dead": int(2 * level * part),
            "rare": int(1 + level),
        }
        along = 0.02 + 0.05 * depth
        mean = 0.1 + 0.25 * (1 - part) * (1 - 0.5 * depth)
        found[f"layer{k // 4 + 1}.{k % 4}.conv{evil}"] = {
            "kind": "weight",
            "weight": "WS",
            "along": along,
            "mean": mean,
            "rest": 1 - along - mean - 0.002,
            "residual": 0.002,
            "use": 0.55,
        }
    return {"step": step, "epoch": epoch, "layers": found}


def prediction(k: int, *, evil: str = "") -> dict[str, Any]:
    channels = 1 if k % 2 else 3
    pixels = bytes((17 * (x + y + k)) % 256 for y in range(8) for x in range(8) for _ in range(channels))
    said = str(k % 10) if k % 5 else str((k + 1) % 10)
    text = base64.b64encode(pixels).decode()
    whole = {"height": 8, "width": 8, "channels": channels, "pixels": text, "label": f"{k % 10}{evil}"}
    return {**whole, "prediction": f"{said}{evil}", "probability": 0.5 + 0.03 * k}


def scene(k: int, colour: str = "#80ff00", *, evil: str = "") -> dict[str, Any]:
    """A prediction that is a picture itself."""
    files = {name: _png(k, name == "answer", colour) for name in ("image", "truth", "answer")}
    words = {"label": f"sky{evil}", "prediction": f"sea{evil}", "note": f"{k} % right{evil}"}
    return {**files, **words, "colours": {f"sky{evil}": colour}}


def _png(k: int, answer: bool, colour: str) -> str:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), colour if answer else (k, 0, 0)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
