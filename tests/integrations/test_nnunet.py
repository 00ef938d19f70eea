"""nnU-Net finds our trainer through its environment variable, and builds the same network to train and to predict."""

import contextlib
import importlib.util
import inspect
import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm.integrations.nnunet import TRAINERS

real = [
    pytest.mark.slow,  # importing nnU-Net takes seconds
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what nnU-Net imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def with_nnunet(test):
    """Mark a test that imports the real package."""
    for mark in real:
        test = mark(test)
    return test


RESIDUAL = {
    "n_stages": 3,
    "features_per_stage": [8, 16, 16],
    "conv_op": "torch.nn.modules.conv.Conv3d",
    "kernel_sizes": [[3, 3, 3]] * 3,
    "strides": [[1, 1, 1], [2, 2, 2], [2, 2, 2]],
    "n_blocks_per_stage": [1, 1, 1],
    "n_conv_per_stage_decoder": [1, 1],
    "conv_bias": True,
    "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
    "norm_op_kwargs": {"eps": 1e-5, "affine": True},
    "dropout_op": None,
    "dropout_op_kwargs": None,
    "nonlin": "torch.nn.LeakyReLU",
    "nonlin_kwargs": {"inplace": True},
}
CONFIGURATION = SimpleNamespace(
    network_arch_class_name="dynamic_network_architectures.architectures.unet.ResidualEncoderUNet",
    network_arch_init_kwargs=RESIDUAL,
    network_arch_init_kwargs_req_import=["conv_op", "norm_op", "dropout_op", "nonlin"],
)


@pytest.fixture
def trainer(monkeypatch) -> Any:
    pytest.importorskip("nnunetv2")
    from nnunetv2.utilities.find_objects import (  # type: ignore[import-not-found]  # an extra that dev lacks
        recursive_find_trainer_class_by_name,
    )

    monkeypatch.setenv("nnUNet_extTrainer", str(TRAINERS))
    with contextlib.redirect_stdout(io.StringIO()):
        return recursive_find_trainer_class_by_name("nnUNetTrainerBCN")


def build(trainer, *, deep_supervision: bool) -> nn.Module:
    torch.manual_seed(0)
    return trainer.build_network_architecture(None, CONFIGURATION, 1, 3, enable_deep_supervision=deep_supervision)


@with_nnunet
def test_training_and_prediction_build_the_same_converted_network(trainer):
    trained, predicting = (build(trainer, deep_supervision=flag) for flag in (True, False))
    kinds = {type(module) for module in trained.modules()}
    assert {mn.nn.BatchChannelNorm, mn.nn.WSConv3d} <= kinds
    assert nn.InstanceNorm3d not in kinds
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    x = torch.randn(1, 1, 8, 8, 8)
    sum(y.square().mean() for y in trained(x)).backward()
    optimizer.step()
    predicting.load_state_dict(dict(trained.state_dict()))  # nnU-Net loads the tensors alone
    assert torch.equal(predicting.eval()(x), trained.eval()(x)[0])
    assert any(norm.running_mean.any() for norm in predicting.modules() if isinstance(norm, mn.nn.BatchChannelNorm))


@with_nnunet
def test_a_step_of_the_network_does_not_depend_on_its_split(trainer):
    batch = (torch.randn(3, 1, 8, 8, 8, dtype=torch.float64), torch.randint(0, 3, (3, 8, 8, 8)))

    def loss(model, part):
        volumes, labels = part
        return nn.functional.cross_entropy(model(volumes)[0], labels, reduction="sum"), labels.numel()

    report = mn.check_cuts(build(trainer, deep_supervision=True).double(), batch, loss)
    assert report.ok, report
    assert report.worst <= 1e-10


@with_nnunet
def test_a_derived_trainer_may_have_another_norm(trainer):
    derived = type("nnUNetTrainerGN", (trainer,), {"norm": mn.GN(), "weight": None})
    kinds = {type(module) for module in build(derived, deep_supervision=False).modules()}
    assert mn.nn.GroupNorm in kinds
    assert mn.nn.WSConv3d not in kinds


class NewTrainer:
    """Calls `build_network_architecture` as nnU-Net 2.8 does, by what its signature says."""

    @staticmethod
    def build_network_architecture(plans_manager, configuration, inputs, outputs, enable_deep_supervision=True):
        return nn.Sequential(nn.Conv3d(inputs, 8, 3), nn.InstanceNorm3d(8, affine=True), nn.Conv3d(8, outputs, 1))

    def initialize(self):
        if "plans_manager" in inspect.signature(self.build_network_architecture).parameters:
            return self.build_network_architecture("plans", "configuration", 1, 3, False)
        return self.build_network_architecture("class name", {}, [], 1, 3, False)


class OldTrainer:
    """Calls it as older versions do."""

    @staticmethod
    def build_network_architecture(name, options, imports, inputs, outputs, enable_deep_supervision=True):
        return NewTrainer.build_network_architecture(name, options, inputs, outputs, enable_deep_supervision)

    def initialize(self):
        return self.build_network_architecture("class name", {}, [], 1, 3, enable_deep_supervision=False)


@pytest.mark.parametrize("trainer_class", [NewTrainer, OldTrainer])
def test_both_forms_of_nnunet_s_call_build_a_converted_network(monkeypatch, trainer_class):
    place = "nnunetv2.training.nnUNetTrainer.nnUNetTrainer"
    for name in (place.rsplit(".", k)[0] for k in range(4)):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, place, SimpleNamespace(nnUNetTrainer=trainer_class))
    spec: Any = importlib.util.spec_from_file_location("trainers_on_trial", TRAINERS / "micronorm_trainers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kinds = {type(part) for part in module.nnUNetTrainerBCN().initialize().modules()}
    assert {mn.nn.BatchChannelNorm, mn.nn.WSConv3d} <= kinds
