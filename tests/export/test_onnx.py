import errno
import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import micronorm as mn
from tests.export.networks import randomized
from tests.networks import SmallResNet
from tests.tolerances import tolerance

ONNX = importlib.import_module("micronorm.export.onnx")  # the module: the name in the room is the function


def small() -> nn.Sequential:
    return randomized(nn.Sequential(mn.nn.WSConv2d(3, 8, 3), mn.nn.BatchChannelNorm(8), nn.ReLU(), nn.Conv2d(8, 2, 1)))


class Masked(nn.Module):
    """Two inputs by name, nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = mn.nn.WSConv2d(3, 8, 3, padding=1), mn.nn.BatchChannelNorm(8)
        randomized(self)

    def forward(self, x: Tensor, *, mask: Tensor) -> dict[str, list[Tensor]]:
        y = self.conv(x)
        return {"raw": [y], "normalized": [self.norm(y) * mask, x.mean((2, 3))]}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[nn.Module, mn.export.OnnxReport]:
    """A residual network and the report of its export."""
    model = randomized(SmallResNet(weight=mn.WS()))
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    return model, mn.export.onnx(model, path, torch.randn(1, 3, 16, 16), input_names=["image"], output_names=["logits"])


def test_the_file_is_verified_at_the_example_and_at_another_batch_and_image_size(exported):
    _, report = exported
    assert report.shapes == ((1, 3, 16, 16), (2, 3, 48, 80))
    assert report.worst <= tolerance("folded", torch.float32)


def test_group_normalization_is_one_node_per_norm(exported):
    _, report = exported
    assert (report.group_normalizations, report.opset) == (6, 21)


def test_one_file_is_left_which_holds_the_weights(exported):
    model, report = exported
    assert files(report.path.parent) == ["net.onnx"]
    assert report.path.stat().st_size > sum(4 * p.numel() for p in model.parameters())


def test_the_file_computes_the_model_at_any_size(exported):
    model, report = exported
    session = importlib.import_module("onnxruntime").InferenceSession(report.path, providers=["CPUExecutionProvider"])
    assert [entry.name for entry in session.get_inputs()] == ["image"]
    assert [entry.name for entry in session.get_outputs()] == ["logits"]
    model = model.eval()
    inputs = [torch.randn(shape) for shape in ((1, 3, 9, 11), (5, 3, 8, 40))]
    mn.export.verify(model, lambda x: torch.from_numpy(session.run(None, {"image": x.numpy()})[0]), inputs)


def test_named_inputs_nested_outputs_and_open_batches_export(tmp_path):
    inputs = {"x": torch.randn(1, 3, 8, 8), "mask": torch.rand(1, 1, 8, 8)}
    report = mn.export.onnx(Masked(), tmp_path / "masked.onnx", inputs, dynamic="batch")
    assert report.shapes == ((1, 3, 8, 8), (1, 1, 8, 8), (2, 3, 8, 8), (2, 1, 8, 8))


def test_a_folded_model_and_fixed_sizes_export(tmp_path):
    report = mn.export.onnx(mn.fold(small()), tmp_path / "folded.onnx", torch.randn(1, 3, 8, 8), dynamic=False)
    assert report.shapes == ((1, 3, 8, 8),)
    assert report.group_normalizations == 1


# --- nothing is left behind ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, b"the last good one"], ids=["no file before", "a file before"])
def test_a_mismatch_leaves_no_file(tmp_path, monkeypatch, before):
    def wrong(self, *args):
        return [1.001 * tensor for tensor in right(self, *args)]

    right = ONNX._Session.__call__
    monkeypatch.setattr(ONNX._Session, "__call__", wrong)
    path = tmp_path / "net.onnx"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(
        RuntimeError, match=r"output 0 on inputs 1×3×8×8 differs by 0\.001 of its maximum, above 0\.0001"
    ):
        mn.export.onnx(small(), path, torch.randn(1, 3, 8, 8))
    assert files(tmp_path) == ([] if before is None else ["net.onnx"])
    assert before is None or path.read_bytes() == before


def test_a_model_that_cannot_be_exported_says_why_and_what_to_try(tmp_path):
    class Branching(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) if input.sum() > -1e9 else input

    with pytest.raises(RuntimeError, match=r'could not export the model; try dynamic="batch", then dynamic=False: '):
        mn.export.onnx(Branching(*small()), tmp_path / "net.onnx", torch.randn(1, 3, 8, 8))
    assert files(tmp_path) == []


def test_a_full_disk_is_named_with_the_file_and_the_space(tmp_path, monkeypatch):
    def fail(model: nn.Module, args: object, path: Path, **options: object) -> None:
        path.write_bytes(b"half")
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as full:
            raise RuntimeError("pages of advice") from full

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(OSError, match=r"No space left on device \(about [\d,]+ bytes are needed\): '.*net\.onnx'"):
        mn.export.onnx(small(), tmp_path / "net.onnx", torch.randn(1, 3, 8, 8))
    assert files(tmp_path) == []


def test_a_place_that_cannot_be_written_is_named_before_the_export(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "net.onnx", "no folder .*none for net.onnx"),
        (tmp_path / "pipe", "is a pipe or a device"),
    ):
        with pytest.raises(ValueError, match=message):
            mn.export.onnx(small(), path, torch.randn(1, 3, 8, 8))
    with pytest.raises(OSError, match=r"'/proc/net\.onnx'"):
        mn.export.onnx(small(), "/proc/net.onnx", torch.randn(1, 3, 8, 8))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs {package}: pip install onnx onnxruntime onnxscript"):
        mn.export.onnx(small(), tmp_path / "net.onnx", torch.randn(1, 3, 8, 8))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"opset": 20}, "opset must be at least 21"),
        ({"dynamic": "space"}, "dynamic must be True, False or \"batch\", got 'space'"),
        ({"dynamic": False, "other_inputs": torch.zeros(1)}, "dynamic=False does not allow"),
        ({"other_inputs": torch.zeros(1, 4, 8, 8)}, r"does not run on inputs of sizes 1×4×8×8; give other_inputs"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        mn.export.onnx(small(), tmp_path / "net.onnx", torch.randn(1, 3, 8, 8), **options)
    assert files(tmp_path) == []


def test_a_whole_detector_is_refused_before_the_export(tmp_path):
    class Detector(nn.Sequential):
        def forward(self, input: Tensor) -> list[dict[str, Tensor]]:
            return [{"boxes": y[y > 0]} for y in super().forward(input)]

    with pytest.raises(ValueError, match=r"Detector returns a dictionary for each image, .* such as model\.backbone"):
        mn.export.onnx(Detector(*small()), tmp_path / "net.onnx", torch.randn(2, 3, 8, 8))


def test_other_dtypes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the model must be float32 .* got torch\.float64"):
        mn.export.onnx(small().double(), tmp_path / "net.onnx", torch.randn(1, 3, 8, 8).double())


def test_the_model_is_left_as_it_was(tmp_path):
    model = small().train()
    model[1].register_forward_hook(lambda *_: None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="does not run"):
        mn.export.onnx(model, tmp_path / "net.onnx", torch.randn(1, 4, 8, 8))
    mn.export.onnx(model, tmp_path / "net.onnx", torch.randn(1, 3, 8, 8), dynamic=False)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(module.training for module in model.modules())
    assert len(model[1]._forward_hooks) == 1
