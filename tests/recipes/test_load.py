"""`mn.load`: the trained network of a run directory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import micronorm as mn
from micronorm import recipes
from micronorm.convert.checkpoint import pack_state
from micronorm.engine.settings import Execution
from micronorm.engine.task import Listener
from micronorm.recipes.run import Variation, _start_from, run_recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A run directory of two steps, and the network that was trained."""
    out, recipe = tmp_path_factory.mktemp("runs") / "run", recipes.find("digits")
    model = recipe.build(seed=3)
    run_recipe(recipe, out=out, model=model, execution=Execution(steps=2, micro_batch=64))
    return out, model.eval()


def change(run: Path, tmp_path: Path, **facts: object) -> Path:
    """Return a copy of the run directory with other facts."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("run.json", "model.safetensors"):
        (copy / name).write_bytes((run / name).read_bytes())
    (copy / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | facts))
    return copy


def test_a_run_directory_gives_the_trained_network_in_eval_mode(trained):
    run, model = trained
    loaded = mn.load(run)
    assert not any(module.training for module in loaded.modules())
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(loaded(x), model(x))


@pytest.mark.slow  # a second process imports torch
def test_a_fresh_process_gives_the_same_network(trained, tmp_path):
    run, model = trained
    code = "import sys, torch, micronorm as mn; torch.save(mn.load(sys.argv[1]).state_dict(), sys.argv[2])"
    subprocess.run([sys.executable, "-c", code, str(run), str(tmp_path / "state.pt")], check=True, timeout=120)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_recipe_of_ones_own_needs_its_network(trained, tmp_path):
    run, model = trained
    own = change(run, tmp_path, recipe="mine/first")
    with pytest.raises(ValueError, match=r"'mine/first' is not one of micronorm's.*build\(seed=0\).*--model FILE.py"):
        mn.load(own)
    loaded = mn.load(own, model=recipes.find("digits").build(seed=0))
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(loaded(x), model(x))


def test_a_recipe_that_has_changed_since_the_run_is_refused(trained, tmp_path):
    definition = recipes.find("digits").definition() | {"norm": "GN(groups=32)"}
    with pytest.raises(ValueError, match=r"changed since the run: norm was GN\(groups=32\) and is BCN"):
        mn.load(change(trained[0], tmp_path, definition=definition))


def test_a_folder_without_a_finished_run_says_what_is_missing(trained, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no run\.json"):
        mn.load(tmp_path)
    unfinished = change(trained[0], tmp_path)
    (unfinished / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"the run has not ended"):
        mn.load(unfinished)


@pytest.mark.parametrize("row, told", [("bn", True), ("bcn-ws", False)])
def test_weights_of_a_network_without_bcn_are_told_to_compute_something_else(tmp_path, row, told):
    file = tmp_path / "weights.safetensors"
    file.write_bytes(pack_state(recipes.find(f"digits/{row}").build(seed=0), {}))
    heard: list[str] = []
    listener = Listener()
    listener.on_message = heard.append
    facts = _start_from(recipes.find("digits/bcn-ws").build(seed=1), file, listener)
    assert ["without BCN" in text for text in heard] == ([False, True] if told else [False])
    assert facts["unused"] == []


def test_a_run_is_not_resumed_with_other_weights(trained):
    out, _ = trained
    with pytest.raises(ValueError, match="started from initial weights; leave --weights out"):
        run_recipe(recipes.find("digits"), out=out, variation=Variation(weights="other.safetensors"), resume=True)
