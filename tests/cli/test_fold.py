"""`micronorm fold`: from a checkpoint of a converted model to plain layers on disk."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import micronorm as mn
from micronorm.cli import app
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


def test_a_checkpoint_becomes_an_onnx_file_that_onnxruntime_has_run(tmp_path):
    checkpoint, out = tmp_path / "model.safetensors", tmp_path / "model.onnx"
    # the file says itself what it was saved from
    save_file(trained().state_dict(), checkpoint, metadata={"model": MODEL, "norm": "bcn", "groups": "32"})
    result = run(checkpoint, "--onnx", out, "--size", "64", "64")
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
    assert "saved from the model before its conversion" in result.stderr
