"""`micronorm plan`: what is printed, as a table, as text and as JSON, and what exit code says what."""

import json
import sys
from functools import partial

import pytest
from rich.console import Console
from typer.testing import CliRunner

import micronorm as mn
from micronorm.cli import app, plan
from micronorm.cli.printing import TargetError
from micronorm.cli.targets import norm_spec, weight_spec
from micronorm.recipes.networks import NETWORKS
from micronorm.recipes.rcnn import build_rcnn
from tests.tasks.detectors import OPTIONS


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_piped_it_is_the_plan_as_text():
    result = run("torchvision:resnet18")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split() == ["name", "type", "becomes", "reason"]
    assert any(line.split()[:3] == ["conv1", "Conv2d", "WSConv2d"] for line in lines)
    assert "20 norms converted, 0 norms left, 20 convolutions converted, 0 convolutions left" in result.output


def test_on_a_terminal_it_is_a_table(monkeypatch):
    monkeypatch.setattr(plan, "Console", partial(Console, force_terminal=True, width=160))
    output = run("torchvision:resnet18", "--weight", "none").output
    assert "───" in output
    assert "weight=None" in output


def test_as_json_it_is_the_plan_with_its_target():
    result = run("timm:resnet18d", "--norm", "bcn", "--groups", "32", "--weight", "ws", "--json")
    record = json.loads(result.output)
    assert record["target"] == "timm:resnet18d"
    assert record["totals"]["norms converted"] == sum(
        d["role"] == "norm" and d["becomes"] is not None for d in record["decisions"]
    )
    assert record["decisions"][0]["becomes"] == "WSConv2d"


def test_fusion_can_be_left_out():
    assert "17 norms fused" in run("torchvision:resnet18").output
    assert "0 norms fused" in run("torchvision:resnet18", "--no-fuse").output


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["timm:resnet50dd"], 2, "near it: resnet50d"),
        (["torchvision:maskrcnn_resnet50_fpn_v3"], 2, "maskrcnn_resnet50_fpn_v2"),
        (["timm:resnet18", "--norm", "bnc"], 2, "no spec 'bnc'; near it: bn"),
        (["timm:resnet18", "--norm", "ln", "--groups", "4"], 2, "ln takes no --groups"),
        (["timm:resnet18", "--groups", "0"], 2, "groups must be at least 1, got 0"),
        (["timm:resnet18", "--norm", "none", "--weight", "none"], 2, "leave nothing to convert"),
        (["timm:vit_tiny_patch16_224"], 1, "nothing to convert. Looked at patch_embed.proj"),
    ],
)
def test_one_line_says_what_is_wrong_and_the_exit_code_of_what_kind(arguments, code, message):
    result = run(*arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_specs_are_named_in_any_case_and_take_their_own_options():
    assert norm_spec("BCN", groups=8, statistics="batch") == mn.BCN(groups=8, statistics="batch")
    assert norm_spec("evonorms0", groups=None) == mn.EvoNormS0()
    assert weight_spec("Cwn") == mn.CWN()
    assert norm_spec("none", groups=None) is None
    with pytest.raises(TargetError, match="--groups needs another norm than none"):
        norm_spec("none", groups=3)
    with pytest.raises(TargetError, match="no spec 'bcn'"):
        weight_spec("bcn")


def test_a_recipe_is_planned_by_its_own_specs():
    output = run("recipe:digits/gn").output
    assert "GroupNorm(16/4)" in output
    assert "weight=None" in output
    assert "BatchChannelNorm(16/4)" in run("recipe:digits/gn", "--norm", "bcn").output
    assert "name one with --norm too" in run("recipe:digits/gn", "--groups", "2").stderr


NORMS = """
from dataclasses import dataclass
from micronorm.nn import GN, NormSpec

@dataclass(frozen=True)
class Tall(NormSpec):
    eps: float = 1e-3

    def __call__(self, num_channels, *, dims=2):
        return GN(eps=self.eps)(num_channels)

small = GN(groups=2)
number = 3
"""


@pytest.mark.parametrize("source", ["norms_of_plan", "norms_of_plan.py"])
def test_a_norm_of_ones_own_is_named_by_its_module_or_file(tmp_path, monkeypatch, source):
    (tmp_path / "norms_of_plan.py").write_text(NORMS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "norms_of_plan", raising=False)
    spec = norm_spec(f"{source}:Tall")
    assert spec is not None
    assert spec(8).eps == 1e-3
    assert norm_spec(f"{source}:small", groups=4) == mn.GN(groups=4)
    with pytest.raises(TargetError, match="takes no --groups"):
        norm_spec(f"{source}:Tall", groups=4)
    with pytest.raises(TargetError, match=r"must be a NormSpec of micronorm\.nn, a class or a value; got 3"):
        norm_spec(f"{source}:number")
    result = run("recipe:digits", "--norm", f"{source}:small", "--weight", "none")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("name", ["label_maps", "image_folders", "objects"])
def test_a_recipe_for_data_of_ones_own_is_planned_without_a_number_of_classes(name, monkeypatch):
    # The plan of a detector runs it on an image.
    monkeypatch.setitem(NETWORKS, "maskrcnn-resnet50", partial(build_rcnn, (1, 1, 1, 1), masks=True, **OPTIONS))
    result = run(f"recipe:{name}")
    assert result.exit_code == 0
    assert " 0 norms left" in result.output
