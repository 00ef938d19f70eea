"""`micronorm fold`: from a checkpoint of a converted model to plain layers on disk."""

import os
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import micronorm as mn
from micronorm import recipes
from micronorm.cli import app
from micronorm.engine.settings import Execution
from micronorm.recipes.run import run_recipe
from tests.tolerances import assert_close_to_max, tolerance

MODEL = "tests.cli.test_fold:network"


def network() -> nn.Module:
    """Return a small network without BCN, which the command builds by this name."""
    first = [nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU()]
    second = [nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(32, 10))


def run(*arguments: str | Path):
    return CliRunner().invoke(app, ["fold", *map(str, arguments)])


def trained() -> nn.Module:
    """A converted network, absorbed, whose estimates have moved."""
    torch.manual_seed(0)
    model = mn.convert(network(), absorb=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 3, 64, 64)).square().mean().backward()
    optimizer.step()
    return model.eval()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_checkpoint_becomes_a_state_dict_of_plain_layers(tmp_path, suffix):
    model, checkpoint, out = trained(), tmp_path / f"model{suffix}", tmp_path / "plain.safetensors"
    if suffix == ".pt":
        torch.save({"state_dict": model.state_dict()}, checkpoint)
    else:
        save_file(model.state_dict(), checkpoint)
    result = run(checkpoint, "--model", MODEL, "--out", out)
    assert result.exit_code == 0, result.stderr
    plain = mn.fold(mn.convert(network()))
    plain.load_state_dict(load_file(out))
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert_close_to_max(plain(x), model(x), tol=tolerance("folded", torch.float32))


@pytest.mark.slow
def test_a_checkpoint_becomes_an_onnx_file_that_onnxruntime_has_run(tmp_path):
    checkpoint, out = tmp_path / "model.safetensors", tmp_path / "model.onnx"
    save_file(trained().state_dict(), checkpoint)
    result = run(checkpoint, "--model", MODEL, "--groups", "32", "--onnx", out, "--size", "64", "64")
    assert result.exit_code == 0, result.stderr
    assert out.is_file()
    assert "GroupNormalization" in result.output


def test_what_is_wrong_is_said_in_one_line_and_nothing_is_written(tmp_path):
    checkpoint, out = tmp_path / "model.safetensors", tmp_path / "plain.safetensors"
    save_file({"group_weight": torch.ones(1)}, checkpoint)
    for arguments, code, message in (
        ([checkpoint, "--model", MODEL], 2, "give --out FILE.safetensors"),
        ([checkpoint, "--out", out], 2, "give the model: --model"),
        ([checkpoint, "--model", MODEL, "--out", tmp_path / "x.pt"], 2, "--out writes safetensors, got 'x.pt'"),
        ([tmp_path / "none.pt", "--model", MODEL, "--out", out], 2, "no file"),
        ([checkpoint, "--model", "torchvision:shufflenet", "--out", out], 2, "near it: shufflenet_v2"),
        ([checkpoint, "--model", MODEL, "--out", out], 1, "Missing key"),
    ):
        result = run(*arguments)
        assert result.exit_code == code, (arguments, result.stderr)
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert not out.exists()


def test_a_checkpoint_from_before_the_conversion_is_refused(tmp_path):
    checkpoint = tmp_path / "bn.safetensors"
    save_file(network().state_dict(), checkpoint)
    result = run(checkpoint, "--model", MODEL, "--out", tmp_path / "plain.safetensors")
    assert result.exit_code == 1
    assert "saved before the conversion. Give a checkpoint of the converted model" in result.stderr


@pytest.mark.parametrize("metadata", [{"model": "payload:run"}, {"model": "os:abort"}])
def test_a_file_cannot_choose_code_to_run(tmp_path, monkeypatch, metadata):
    (tmp_path / "payload.py").write_text("open('ran', 'w').close()\ndef run(): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "abort", lambda: (tmp_path / "ran").touch())
    save_file(trained().state_dict(), "model.safetensors", metadata={"model": "timm:resnet10t", **metadata})
    result = run("model.safetensors", "--out", "plain.safetensors")
    assert result.exit_code == 2
    assert next(iter(metadata.values())) in result.stderr
    assert not Path("ran").exists()


def test_a_file_may_name_a_recipe_or_a_model_of_timm_and_torchvision(tmp_path):
    checkpoint, out = tmp_path / "model.safetensors", tmp_path / "plain.safetensors"
    recipe = recipes.find("digits/gn-ws").build(seed=0)
    for target, model in {
        "recipe:digits/gn-ws": recipe,
        "timm:resnet10t": mn.convert(timm.create_model("resnet10t")),
        "torchvision:resnet18": mn.convert(torchvision.models.resnet18()),
    }.items():
        save_file(model.state_dict(), checkpoint, metadata={"model": target})
        result = run(checkpoint, "--out", out)
        assert result.exit_code == 0, result.stderr


def converted() -> nn.Module:
    """Return the network after its conversion, as many projects build it."""
    return mn.convert(network(), mn.GN())


def test_a_factory_of_a_converted_network_is_not_converted_again(tmp_path):
    checkpoint, out = tmp_path / "model.safetensors", tmp_path / "plain.safetensors"
    save_file(converted().state_dict(), checkpoint)
    result = run(checkpoint, "--model", "tests.cli.test_fold:converted", "--out", out)
    assert result.exit_code == 0, result.stderr
    mn.fold(converted()).load_state_dict(load_file(out))
    result = run(checkpoint, "--model", "tests.cli.test_fold:converted", "--norm", "gn", "--out", out)
    assert (result.exit_code, "leave out --norm" in result.stderr) == (2, True)


def test_a_run_directory_is_all_that_folding_needs(tmp_path):
    model = recipes.find("digits").build(seed=0)
    run_recipe(recipes.find("digits"), out=tmp_path, model=model, execution=Execution(steps=2, micro_batch=64))
    plain, x = mn.fold(recipes.find("digits").build(seed=1)), torch.randn(4, 1, 8, 8)
    for source in (tmp_path, tmp_path / "model.safetensors"):
        result = run(source, "--out", tmp_path / "plain.safetensors")
        assert result.exit_code == 0, result.stderr
        plain.load_state_dict(load_file(tmp_path / "plain.safetensors"))
        with torch.no_grad():
            assert_close_to_max(plain(x), model.eval()(x), tol=tolerance("folded", torch.float32))


@pytest.mark.parametrize("option", ["--out", "--onnx"])
@pytest.mark.parametrize("folder", ["none", "/proc"])
def test_a_place_that_cannot_be_written_ends_in_one_line_that_names_it(tmp_path, monkeypatch, option, folder):
    monkeypatch.chdir(tmp_path)
    save_file(trained().state_dict(), "model.safetensors")
    result = run("model.safetensors", "--model", MODEL, "--size", "64", "64", option, f"{folder}/x.safetensors")
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
    assert folder in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["cyclic.pt", "garbage.pt", "garbage.safetensors"])
def test_a_file_without_a_state_dict_ends_in_one_line_that_names_it(tmp_path, name):
    checkpoint, cyclic = tmp_path / name, {}
    cyclic["state_dict"] = cyclic
    if name == "cyclic.pt":
        torch.save(cyclic, checkpoint)
    else:
        checkpoint.write_bytes(b"garbage" * 100)
    for command in (["fold", checkpoint, "--model", MODEL, "--out", tmp_path / "x.safetensors"],
                    ["diagnose", "recipe:digits", "--checkpoint", checkpoint]):  # fmt: skip
        result = CliRunner().invoke(app, list(map(str, command)))
        assert isinstance(result.exception, SystemExit)
        assert result.exit_code in (1, 2)
        assert str(checkpoint) in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def of_one_size() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))


def of_volumes() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU())


def test_a_network_of_one_image_size_is_exported_for_this_size(tmp_path):
    checkpoint, out = tmp_path / "model.safetensors", tmp_path / "model.onnx"
    save_file(mn.convert(of_one_size()).state_dict(), checkpoint)
    arguments = checkpoint, "--model", "tests.cli.test_fold:of_one_size", "--onnx", out
    result = run(*arguments)
    assert (result.exit_code, "; give --size or --shape" in result.stderr) == (1, True), result.stderr
    result = run(*arguments, "--size", 8, 8)
    assert (result.exit_code, "use --fixed-size" in result.stderr) == (1, True), result.stderr
    result = run(*arguments, "--size", 8, 8, "--fixed-size")
    assert (result.exit_code, "at 2×1×8×8 and 3×1×8×8" in result.stdout) == (0, True), result.stderr


def test_a_network_of_volumes_is_exported_for_a_shape(tmp_path):
    checkpoint, out = tmp_path / "model.safetensors", tmp_path / "model.onnx"
    save_file(mn.convert(of_volumes()).state_dict(), checkpoint)
    arguments = checkpoint, "--model", "tests.cli.test_fold:of_volumes", "--onnx", out
    for wrong, text in (((), "--shape 1x32x48x32"), (("--shape", "1x8xa"), "channels and sizes")):
        result = run(*arguments, *wrong)
        assert (result.exit_code, text in result.stderr) == (2, True), result.stderr
    result = run(*arguments, "--shape", "1x8x4x6")
    assert (result.exit_code, "at 2×1×8×4×6" in result.stdout) == (0, True), result.stderr
