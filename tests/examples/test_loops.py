"""The loops of examples/: eight images one at a time train the network that eight at once train."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import micronorm as mn
from tests.networks import assert_same_state
from tests.tolerances import tolerance

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPS = {
    "plain_pytorch": None,
    "lightning_loop": "lightning",
    "accelerate_loop": "accelerate",
    "hf_trainer": "transformers",
}
ONE_BY_ONE = {"accumulate": 8, "micro_batch": 1}
IN_PAIRS = {"accumulate": 4, "micro_batch": 2}
AT_ONCE = {"accumulate": 1, "micro_batch": 8}

# The libraries take long to import.
loops = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if library else ()) for name, library in LOOPS.items()]
)
pytestmark = [
    # Lightning's advice where there are more than two cores, or a GPU
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]


@cache
def script(name: str) -> ModuleType:
    if LOOPS[name] and importlib.util.find_spec(LOOPS[name]) is None:
        pytest.skip(f"{LOOPS[name]} is not installed")
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, cut: dict[str, int], steps: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return script(name).main(steps=steps, dtype=dtype, **cut)


@loops
def test_a_step_does_not_depend_on_its_cut_in_float32(name):
    one_by_one, at_once = (run(name, cut, steps=1, dtype=torch.float32) for cut in (ONE_BY_ONE, AT_ONCE))
    assert_same_state(one_by_one, at_once, tol=tolerance("one_step", torch.float32))


@loops
@pytest.mark.parametrize("cut", [ONE_BY_ONE, IN_PAIRS], ids=["one by one", "in pairs"])
def test_several_steps_do_not_depend_on_their_cut(name, cut):
    assert_same_state(run(name, cut, steps=5), run(name, AT_ONCE, steps=5), tol=tolerance("fifty_steps", torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning_loop", "accelerate_loop"])
def test_a_library_divides_the_loss_as_the_plain_loop_does(name):
    tol = tolerance("fifty_steps", torch.float64)
    assert_same_state(run(name, ONE_BY_ONE, steps=5), run("plain_pytorch", ONE_BY_ONE, steps=5), tol=tol)


@loops
def test_without_the_one_line_the_cut_shows(name, monkeypatch):
    monkeypatch.setattr(mn, "convert", lambda model: model)
    one_by_one, at_once = run(name, ONE_BY_ONE, steps=1), run(name, AT_ONCE, steps=1)
    assert (one_by_one["0.weight"] - at_once["0.weight"]).abs().max() > 1e-3


@pytest.mark.slow
def test_a_loss_that_is_not_divided_by_the_count_of_the_step_shows(monkeypatch):
    """The Trainer does not divide what compute_loss_func returns; clipped gradients would hide it."""

    def mean_loss(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels)

    monkeypatch.setattr(script("hf_trainer"), "summed_loss", mean_loss)
    one_by_one, at_once = (run("hf_trainer", cut, steps=1) for cut in (ONE_BY_ONE, AT_ONCE))
    assert (one_by_one["0.weight"] - at_once["0.weight"]).abs().max() > 1e-3


@loops
def test_a_loop_learns_and_says_so(name, capsys):
    state = run(name, ONE_BY_ONE, steps=21, dtype=torch.float32)
    out = capsys.readouterr().out
    assert out.count("loss") >= 2
    assert "the estimates of the mean moved by up to" in out
    assert state["1.running_mean"].all()
    assert (state["1.running_var"] != 1).all()
