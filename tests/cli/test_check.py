"""`micronorm check`: exit codes, what is printed, and what a target may be."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from micronorm.cli import app, check
from micronorm.cli.printing import TargetError
from micronorm.cli.targets import resolve

FACTORIES = """
import torch
from torch import nn
import torch.nn.functional as F

def network(norm):
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Flatten(), nn.Linear(4 * 36, 3))

def clean():
    return network(nn.GroupNorm(2, 4))

def batch_norm():
    return network(nn.BatchNorm2d(4))

def averaged():
    loss = lambda model, part: F.cross_entropy(model(part[0]), part[1])
    return network(nn.GroupNorm(2, 4)), (torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])), loss

def pair():
    return clean(), None

def one_sample():
    return clean(), (torch.randn(1, 1, 8, 8),), lambda model, part: model(part[0]).sum()

def evaluating():
    return clean().eval(), (torch.randn(3, 1, 8, 8),), lambda model, part: model(part[0]).sum()

def two_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = clean()
        def forward(self, x):
            return {"scores": self.net(x)}
    return Two()

number = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a module of factories, and a path that forgets it again."""
    (tmp_path / "factories_of_check.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p != ""])
    monkeypatch.delitem(sys.modules, "factories_of_check", raising=False)


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["check", *arguments])


SMALL = ("--size", "8")


def test_a_model_that_keeps_the_law_ends_with_0():
    result = invoke("factories_of_check:clean", *SMALL)
    assert result.exit_code == 0, result.output
    assert "6 samples, split as whole (6), halved (3+3), one by one (6×1): " in result.output
    assert "does not depend on the split" in result.output


def test_a_model_that_breaks_the_law_ends_with_1_and_names_the_module():
    result = invoke("factories_of_check:batch_norm", *SMALL, "--batch", "4")
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    assert lines[0].endswith("THE STEP DEPENDS ON THE SPLIT.")
    assert lines[1].startswith("1 (BatchNorm2d)")
    assert "[batch_statistics]" in lines[1]
    assert "\x1b" not in result.output


def test_a_factory_may_bring_its_own_batch_and_loss():
    result = invoke("factories_of_check:averaged", "--json")
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert report["ok"] is False
    assert report["samples"] == 4
    assert [(f["where"], f["cause"]) for f in report["findings"]] == [("loss", "averaged_loss")]


def test_json_of_a_clean_model_says_so_and_names_the_target():
    report = json.loads(invoke("factories_of_check:clean", *SMALL, "--json").output)
    assert (report["ok"], report["findings"], report["target"]) == (True, [], "factories_of_check:clean")


def test_a_terminal_gets_colours(monkeypatch):
    monkeypatch.setattr(check, "Console", partial(Console, force_terminal=True, width=100))
    assert "\x1b[" in invoke("factories_of_check:batch_norm", *SMALL).output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["resnet18"], "write timm:NAME, torchvision:NAME, recipe:NAME, package.module:factory or file.py:factory"),
        (["torchvision:resnet81"], "near it: resnet18"),
        (["timm:resnet81"], "near it: resnet"),
        (["timm:" + "z" * 30], "nor one like it"),
        (["factories_of_check:clear"], "near it: clean"),
        (["factories_of_check:number"], "got int"),
        (["factories_of_check:pair"], "got 2 values"),
        (["factories_of_check:one_sample"], "at least 2 samples, got 1"),
        (["factories_of_check:evaluating"], "call model.train() first"),
        (["factories_of_check:two_outputs", *SMALL], "returns a dict, not logits"),
        (["factories_of_check:clean", "--size", "9"], "fails on an image of 1×1×9×9"),
        (["factories_of_check:clean", *SMALL, "--classes", "4"], "above the model's 3 outputs"),
        (["no_such_module_here:f"], "no module 'no_such_module_here'"),
    ],
)
def test_a_wrong_target_ends_with_2_and_one_line(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_missing_dependency_of_a_target_is_told_from_a_missing_target(tmp_path):
    (tmp_path / "needs_of_check.py").write_text("import no_such_library_here")
    with pytest.raises(TargetError, match="needs_of_check imports 'no_such_library_here'"):
        resolve("needs_of_check:f")


def test_targets_resolve_to_models_without_weights():
    assert type(resolve("torchvision:resnet18").model).__name__ == "ResNet"
    assert type(resolve("timm:resnet18").model).__name__ == "ResNet"
    assert isinstance(resolve("torchvision:lraspp_mobilenet_v3_large").model, nn.Module)
    assert isinstance(resolve("factories_of_check:clean").model, nn.Sequential)


def test_a_segmenter_is_checked_on_its_pixels():
    model, data, loss = check._subject(resolve("torchvision:lraspp_mobilenet_v3_large"), batch=2, size=32, classes=None)
    assert data[1].shape == (2, 32, 32)
    assert loss(model, data)[1] == 2 * 32 * 32


def test_torchvision_s_resnet18_is_found_wanting_at_its_first_batch_norm():
    result = invoke("torchvision:resnet18", "--size", "32", "--batch", "2", "--classes", "10", "--json")
    assert result.exit_code == 1, result.output
    assert json.loads(result.output)["findings"][0]["where"] == "bn1"


def test_dropout_can_be_switched_off_to_see_what_lies_behind_it(tmp_path):
    (tmp_path / "dropping_of_check.py").write_text(
        "from torch import nn\n"
        "def model():\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 3))\n"
    )
    arguments = ["check", "dropping_of_check:model", "--size", "8"]
    assert CliRunner().invoke(app, arguments).exit_code == 1
    assert CliRunner().invoke(app, [*arguments, "--no-dropout"]).exit_code == 0


def test_a_note_says_whether_the_loss_jumps_at_the_given_learning_rate():
    runner = CliRunner()
    for lr, jumps in (("0.001", False), ("100", True)):
        result = runner.invoke(app, ["check", "factories_of_check:clean", "--size", "8", "--lr", lr])
        assert result.exit_code == 0, result.output
        said = " ".join(result.output.split())
        assert ("the loss rose from" in said, "the loss does not jump" in said) == (jumps, not jumps)
