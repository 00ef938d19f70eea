"""A training script of somebody else's, examples/train_reference.py, with and without the one line."""

import importlib.util
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import micronorm as mn
from tests.networks import assert_same_state
from tests.tolerances import tolerance

pytest.importorskip("torchvision")

SCRIPT = Path(__file__).parents[2] / "examples" / "train_reference.py"
IMAGES = 4


@cache
def script():
    spec = importlib.util.spec_from_file_location("train_reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*options: str) -> nn.Module:
    one_step = ["--dtype", "float64", "--epochs", "1", "--steps", "1", "--no-test", "--batch-size", str(IMAGES)]
    return script().main(script().get_args_parser().parse_args([*one_step, *options]))


@cache
def after_one_step(micro_batch: int, *options: str) -> dict[str, Tensor]:
    """Parameters and buffers of a resnet18 after one step of four images, cut into micro-batches."""
    return run("--micro-batch", str(micro_batch), *options).state_dict()


def difference(actual: dict[str, Tensor], expected: dict[str, Tensor], kind: str) -> float:
    """The largest over tensors, relative to the tensor's maximum."""
    names = [name for name in expected if (kind in name) and expected[name].is_floating_point()]
    assert names
    return max(((actual[n] - expected[n]).abs().max() / expected[n].abs().max()).item() for n in names)


@pytest.mark.parametrize("micro_batch", [2, 1])
def test_without_the_line_a_step_depends_on_the_cut(micro_batch):
    whole, cut = after_one_step(IMAGES), after_one_step(micro_batch)
    assert difference(cut, whole, "running_var") > 0.1
    assert difference(cut, whole, "conv1.weight") > 1e-3


@pytest.mark.parametrize("micro_batch", [2, 1])
def test_with_the_line_a_step_does_not_depend_on_the_cut(micro_batch):
    whole, cut = after_one_step(IMAGES, "--micronorm"), after_one_step(micro_batch, "--micronorm")
    assert any(name.endswith("group_weight") for name in whole)
    assert_same_state(cut, whole, tol=tolerance("one_step", torch.float64))


def test_with_the_line_an_unequal_cut_gives_the_same_step_too():
    whole, cut = after_one_step(IMAGES, "--micronorm"), after_one_step(3, "--micronorm")
    assert_same_state(cut, whole, tol=tolerance("one_step", torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("options, holds", [((), False), (("--micronorm",), True)], ids=["without", "with"])
def test_check_cuts_agrees(options, holds):
    model = run(*options)
    train, _ = script().load_data(script().get_args_parser().parse_args(["--dtype", "float64"]))

    def loss(model, part):
        x, y = part
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    assert mn.check_cuts(model.train(), train[:3], loss).ok is holds


def test_the_script_runs_from_the_command_line(capsys):
    run("--micronorm", "--micro-batch", "2", "--image-size", "32")
    assert "loss: " in capsys.readouterr().out
