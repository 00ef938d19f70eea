"""Checkpoints whose digest is right and whose contents are not: each is refused in one line that names the cause."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from micronorm.engine import checkpoint, journal
from tests.engine.test_checkpoint import put, saved
from tests.engine.tiny import contents, run, tiny_model

CYCLIC_LIST: list[Any] = []
CYCLIC_LIST.append(CYCLIC_LIST)
CYCLIC_DICT: dict[str, Any] = {}
CYCLIC_DICT["a"] = CYCLIC_DICT
DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]

FAMILIES = {
    "wrong types": [None, "x", 0.5, [1], {"a": 1}, {}, [], torch.ones(3)],
    "numbers": [-1, 3, 10**400, 10**5000, float("nan")],
    "cyclic": [CYCLIC_LIST, CYCLIC_DICT],
    "deep": [DEEP],
    "missing": [...],
}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A run that was stopped after four steps, without its checkpoints, and what the newest of them held."""
    out = tmp_path_factory.mktemp("crafted")
    run(out, model=tiny_model(noise=False), steps=4)
    newest, *_ = found = checkpoint.checkpoints(out / journal.CHECKPOINTS)
    state = torch.load(newest, weights_only=True)
    for path in found:
        path.unlink()
    return out, state


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all fields; of a list only the first entry."""
    if isinstance(value, dict):
        inner = list(value.items())
    else:
        inner = list(enumerate(value[:1])) if isinstance(value, list) else []
    return [found for key, item in inner for found in [(*path, key), *places(item, (*path, key))]]


def with_field(value: Any, path: tuple, new: Any) -> Any:
    """A copy with one field replaced, or left out if `new` is an ellipsis."""
    if not path:
        return new
    changed = value.copy()
    if new is ... and len(path) == 1:
        changed.pop(path[0])
    else:
        changed[path[0]] = with_field(value[path[0]], path[1:], new)
    return changed


def resume(out: Path, state: dict[str, Any]) -> str | None:
    """What a run says that is resumed from this state; None if it accepts it. Other errors than ValueError pass."""
    path = put(out / journal.CHECKPOINTS, 4, saved(state))
    before, model = contents(out), tiny_model(noise=False)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        run(out, model=model, resume=True, steps=5)
    except ValueError as error:
        assert contents(out) == before
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        return str(error)
    finally:
        for left in (path, *checkpoint.checkpoints(out / journal.CHECKPOINTS)):
            left.unlink(missing_ok=True)
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_crafted_field_gives_one_line_or_is_harmless(good, family):
    out, state = good
    draw = random.Random(family)
    cases = [(path, new) for path in places(state) for new in FAMILIES[family]]
    for path, new in draw.sample(cases, 20):
        said = resume(out, with_field(state, path, new))
        assert said is None or ("\n" not in said and len(said) < 1000), (path, said)


@pytest.mark.parametrize(
    "path, new, cause",
    [
        (("optimizer",), [1], "optimizer must be dict, got list"),
        (("optimizer", "0.weight"), "x", "optimizer.0.weight must be dict, got str"),
        (
            ("optimizer", "0.weight", "momentum_buffer"),
            torch.ones(3),
            "optimizer.0.weight.momentum_buffer does not have",
        ),
        (("optimizer",), {"other": {}}, "optimizer has 'other', which is not a parameter"),
        (("model",), {7: torch.ones(1)}, "the keys of model must be strings"),
        (("windows", 0, "sums"), ..., "windows[0] lacks 'sums'"),
        (("windows", 0, "forwards", 0), 10**400, "windows[0].forwards[0] is an integer of more than 64 bits"),
        (("windows", 0, "lost", 0), torch.ones(3, 3), "RuntimeError: The size of tensor"),
        (("random", 0, "torch"), ..., "random[0] lacks 'torch'"),
        (("random", 0, "numpy"), CYCLIC_LIST, "not enough values"),
        (("buffers", 0), {"a": torch.ones(1)}, "buffers has 'a', which is not a buffer"),
        (("epoch_sums", "loss"), torch.ones(3), "epoch_sums.loss must be int or float, got Tensor"),
        (("position", "step"), 3, "position.step is not the step in its name"),
        (("step",), torch.ones(3), "it does not hold the step in its name"),
        (("settings",), DEEP, "settings must be dict, got list"),
    ],
)
def test_the_line_names_the_cause(good, path, new, cause):
    out, state = good
    said = resume(out, with_field(state, path, new))
    assert said is not None
    assert f"is damaged or from another version of micronorm: {cause}" in said
    assert said.endswith("delete it to start again")
