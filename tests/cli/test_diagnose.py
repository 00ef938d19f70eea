"""`micronorm diagnose`: exit codes, what is printed, and which models and checkpoints it takes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import micronorm as mn
from micronorm import records
from micronorm.cli import app, diagnose
from micronorm.cli.targets import resolve

FACTORIES = """
import torch
from torch import nn

def network(norm=nn.BatchNorm2d, channels=1):
    torch.manual_seed(0)
    first, second = nn.Conv2d(channels, 8, 3), nn.Conv2d(8, 8, 3)
    return nn.Sequential(first, norm(8), nn.ReLU(), second, norm(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def groups():
    return network(lambda c: nn.GroupNorm(2, c))

def offset():
    model = groups()
    with torch.no_grad():
        model[3].bias[:2] += 200
    return model

def with_batch():
    return groups(), (torch.randn(40, 1, 9, 9), torch.zeros(40)), None

def without_norms():
    return nn.Conv2d(1, 2, 1)

def failing():
    raise KeyError("my own error")

pair = (3, 4)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a module of factories, and a path that forgets it again."""
    (tmp_path / "factories_of_diagnose.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p != ""])
    monkeypatch.delitem(sys.modules, "factories_of_diagnose", raising=False)


def invoke(name: str, *arguments: str) -> Any:
    target = name if ":" in name else f"factories_of_diagnose:{name}"
    return CliRunner().invoke(app, ["diagnose", target, *arguments])


def state_of(name: str) -> dict[str, torch.Tensor]:
    return resolve(f"factories_of_diagnose:{name}").model.state_dict()


DIGITS = ("--data", "digits", "--images", "64")


def test_a_healthy_network_ends_with_0():
    result = invoke("network", *DIGITS)
    assert result.exit_code == 0, result.output
    assert "factories_of_diagnose:network on digits, 64×1×8×8" in result.output
    assert "No layer is near an elimination singularity. 2 of 2 norms judged" in result.output


def test_a_layer_in_trouble_ends_with_1_and_is_named_with_the_way_out():
    result = invoke("offset", *DIGITS)
    assert result.exit_code == 1, result.output
    assert "1 LAYER IS IN TROUBLE: 4." in result.output
    assert "4 (GroupNorm) normalizes channels together that differ too much [stat_diff]" in result.output
    assert "fix: mn.convert(model, mn.BCN(), mn.WS())" in result.output
    assert "micronorm plan factories_of_diagnose:offset" in result.output


def test_the_table_lists_as_many_of_the_worst_layers_as_asked():
    lines = invoke("offset", *DIGITS, "--layers", "1").output.splitlines()
    head = lines.index("worst layers:")
    assert lines[head + 1].split()[0] == "layer"
    assert lines[head + 2].split()[:3] == ["4", "GroupNorm", "relu"]
    assert lines[head + 3].startswith("1 LAYER IS IN TROUBLE")
    assert "worst layers" not in invoke("offset", *DIGITS, "--layers", "0").output


def test_the_report_as_json():
    result = invoke("offset", *DIGITS, "--json")
    assert result.exit_code == 1, result.output
    report = json.loads(result.output)
    assert (report["ok"], report["images"], report["data"], report["checkpoint"]) == (False, 64, "digits", None)
    assert [(one["layer"], one["problem"]) for one in report["findings"]] == [("4", "stat_diff")]
    assert report["layers"]["1"]["kind"] == "norm"


@pytest.mark.parametrize("kind", ["safetensors", "torch", "wrapped"])
def test_a_checkpoint_is_what_is_judged(kind):
    state = state_of("offset")
    path = f"weights.{'safetensors' if kind == 'safetensors' else 'pt'}"
    if kind == "safetensors":
        save_file(state, path)
    else:
        wrapped = {"epoch": 3, "state_dict": {f"module.{key}": value for key, value in state.items()}}
        torch.save(wrapped if kind == "wrapped" else state, path)
    assert invoke("groups", *DIGITS).exit_code == 0
    result = invoke("groups", *DIGITS, "--checkpoint", path)
    assert result.exit_code == 1, result.output
    assert "4 (GroupNorm)" in result.output


def test_a_checkpoint_of_a_converted_model_is_loaded_into_a_converted_model():
    model = mn.convert(resolve("factories_of_diagnose:groups").model, mn.BCN(), mn.WS())
    torch.save(model.state_dict(), "converted.pt")
    arguments = (*DIGITS, "--checkpoint", "converted.pt")
    unfit = invoke("groups", *arguments)
    assert unfit.exit_code == 2
    assert "use --norm, --groups and --weight" in unfit.stderr
    result = invoke("groups", *arguments, "--norm", "bcn", "--weight", "ws", "--json")
    assert result.exit_code in (0, 1), result.output
    assert json.loads(result.output)["layers"]["1"]["norm"] == "BatchChannelNorm"


def test_estimates_are_judged_in_a_checkpoint_and_not_in_a_fresh_network():
    torch.save({key: value + 3 if key == "0.bias" else value for key, value in state_of("network").items()}, "new.pt")
    assert invoke("network", *DIGITS).exit_code == 0
    result = invoke("network", *DIGITS, "--checkpoint", "new.pt")  # running statistics still at (0, 1)
    assert result.exit_code == 1
    assert "[estimates]" in result.output
    assert invoke("network", *DIGITS, "--checkpoint", "new.pt", "--by", "batch").exit_code == 0


def test_tied_tensors_may_be_written_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.two = nn.Conv2d(1, 2, 1)

    model = Tied()
    save_file({"one.weight": torch.ones(2, 1, 1, 1), "one.bias": torch.zeros(2)}, "tied.safetensors")
    diagnose._load(model, Path("tied.safetensors"))
    assert model.two.weight.tolist() == torch.ones(2, 1, 1, 1).tolist()


def test_the_batch_that_a_factory_brings_is_used_and_random_images_where_there_is_none():
    assert "on its own batch, 40×1×9×9" in invoke("with_batch").output
    result = invoke("groups", "--size", "12", "--images", "33")
    assert "on random, 33×1×12×12" in result.output
    assert "note: random images tell little" in result.output


def test_a_run_directory_as_target_names_the_option_that_takes_it():
    Path("run").mkdir()
    Path("run/run.json").write_text("{}")
    result = CliRunner().invoke(app, ["diagnose", "run"])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert "'run' is a run directory" in line
    assert "diagnose recipe:TABLE/ROW --checkpoint run" in line


def test_a_recipe_is_a_target_with_its_own_data():
    result = invoke("recipe:digits/gn", "--images", "40")
    assert result.exit_code == 0, result.output
    assert "recipe:digits/gn on digits, 40×1×8×8" in result.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nothing"], "has no 'nothing'"),
        (["failing"], "factories_of_diagnose:failing fails (KeyError: 'my own error')"),
        ([":f"], "is not a target: write timm:NAME, torchvision:NAME, recipe:NAME, package."),
        (["groups", "--checkpoint", "."], "no file model.safetensors"),
        (["no_such_module_here:f"], "no module 'no_such_module_here'"),
        (["pair"], "must give a model or a tuple that begins with one, got int"),
        (["recipe:digit/bn"], "no table 'digit'"),
        (["without_norms"], "has no group, layer, instance, batch or batch-channel normalization"),
        (["groups", "--data", "nowhere"], "no data 'nowhere'"),
        (["groups", "--data", "."], "no pictures (.jpg, .jpeg, .png, .bmp, .webp, .tif, .tiff) in ."),
        (["groups", "--data", "factories_of_diagnose.py"], "no data 'factories_of_diagnose.py'"),
        (["groups", "--checkpoint", "nowhere.pt"], "no file nowhere.pt"),
        (["groups", "--checkpoint", "factories_of_diagnose.py"], "is not a state dict of torch.save, or contains code"),
        (["groups", "--checkpoint", "text.pt"], "or contains code, which is not run: KeyError"),
        (["groups", "--size", "2"], "the model fails on images of 128×1×2×2"),
        (["groups", "--norm", "bcm"], "no spec 'bcm'; near it: bcn"),
        (["groups", "--groups", "4"], "--groups needs another norm than none"),
        (["groups", "--device", "abacus"], "--device must be cpu, cuda or cuda:N, got 'abacus'"),
        (["groups", "--device", "meta"], "--device must be cpu, cuda or cuda:N, got 'meta'"),
    ],
)
def test_misuse_ends_with_2_and_one_line(arguments, message):
    Path("text.pt").write_text("hello")
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize("content", [b"", bytes(range(7, 250)), b"\x80\x02}q\x00.", b"PK\x03\x04 and no more", b"s"])
def test_of_bytes_that_are_no_tensors_no_advice_to_run_them_is_repeated(content):
    Path("noise.pt").write_bytes(content)
    result = invoke("groups", "--checkpoint", "noise.pt")
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("micronorm diagnose: ")
    assert "weights_only" not in line
    assert "trust" not in line


def test_a_run_directory_stands_for_its_weights():
    Path("run").mkdir()
    save_file(state_of("offset"), "run/model.safetensors")
    result = invoke("groups", *DIGITS, "--checkpoint", "run")
    assert result.exit_code == 1, result.output
    assert "4 (GroupNorm)" in result.output


def test_nothing_in_a_checkpoint_is_executed():
    class Bomb:
        def __reduce__(self) -> tuple:
            return Path.touch, (Path("exploded"),)

    torch.save({"0.weight": Bomb()}, "bomb.pt")
    result = invoke("groups", "--checkpoint", "bomb.pt")
    assert result.exit_code == 2
    assert not Path("exploded").exists()


@pytest.mark.parametrize("name", ["resnet10t", "mobilenetv3_small_050", "test_vit"])
def test_small_stock_networks_of_timm_are_not_accused(name):
    result = invoke(f"timm:{name}", "--images", "32", *(["--size", "64"] if name != "test_vit" else []))
    assert result.exit_code == 0, result.output


TEN = ["resnet18", "resnet50", "resnet50_gn", "resnetv2_50x1_bit", "densenet121", "vgg11_bn", "regnety_002",
       "mobilenetv3_small_100", "efficientnet_b0", "convnext_atto"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TEN)
def test_ten_stock_networks_of_timm_with_random_weights_are_not_accused(name):
    result = invoke(f"timm:{name}", "--images", "32", "--size", "96")
    assert result.exit_code == 0, result.output


def test_a_network_that_was_never_trained_is_said_to_be_one():
    notes = json.loads(
        invoke("torchvision:resnet18", "--data", "random", "--images", "2", "--size", "32", "--json").stdout
    )
    assert any("never trained, and batch normalization used its batches" in note for note in notes["notes"])


def test_a_run_that_collapsed_at_its_start_is_reported_with_what_to_do():
    Path("run").mkdir()
    save_file(state_of("groups"), "run/model.safetensors")
    facts = {key: {} for key in ("settings", "execution", "data", "environment")}
    facts |= {"format": 1, "recipe": "mine", "revision": None, "command": "", "date": ""}
    sentence = records.find_collapse([2.4, 9.0, 31.0, 12.0, *[2.3] * 96])
    for extra, code in (({}, 0), ({"collapse": sentence}, 1)):
        Path("run/run.json").write_text(json.dumps(facts | extra))
        result = invoke("groups", *DIGITS, "--checkpoint", "run/model.safetensors")
        assert result.exit_code == code, result.output
        assert ("TRAINING FAILED" in result.output) == bool(code)
        assert ("zero_init_residual=True" in result.output) == bool(code)
