import pytest
import torch
from torch import nn

from micronorm.nn.batch import GhostBatchNorm
from micronorm.nn.batch_renorm import BatchRenorm
from micronorm.nn.running import RunningNorm
from micronorm.nn.switchable import SwitchableNorm

LAYERS = [GhostBatchNorm(3, micro_batch=2), BatchRenorm(3), SwitchableNorm(3)]
each_layer = pytest.mark.parametrize("norm", LAYERS, ids=lambda norm: type(norm).__name__)


def rebuilt(norm: RunningNorm, **arguments) -> RunningNorm:
    if isinstance(norm, GhostBatchNorm):
        arguments["micro_batch"] = norm.micro_batch
    return type(norm)(norm.num_channels, **arguments)


@each_layer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_leaves_the_statistics_as_they_are(norm, dtype):
    norm = rebuilt(norm)
    norm.running_mean.fill_(1 / 3)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    norm.to(dtype)
    assert norm.weight.dtype == dtype
    for name, buffer in norm.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer, before[name])
    assert rebuilt(norm, dtype=dtype).running_var.dtype == torch.float32


@each_layer
def test_statistics_follow_to_float64_and_to_another_device(norm):
    norm = rebuilt(norm).double()
    assert norm.running_mean.dtype == torch.float64
    norm.to("meta", torch.float16)
    assert norm.running_mean.device.type == "meta"
    assert norm.running_mean.dtype == torch.float64


@each_layer
def test_a_state_dict_of_half_types_assigned_is_widened(norm):
    norm = rebuilt(norm)
    state = {k: v.half() if v.is_floating_point() else v for k, v in norm.state_dict().items()}
    norm.load_state_dict(state, assign=True)
    assert norm.running_mean.dtype == torch.float32


@pytest.mark.parametrize("make", [lambda: GhostBatchNorm(3, micro_batch=2), lambda: BatchRenorm(3)])
def test_state_dicts_of_torchs_batch_norm_load_even_those_without_a_count(make):
    plain = nn.BatchNorm2d(3)
    plain(torch.randn(2, 3, 4, 4))
    norm = make()
    norm.load_state_dict(plain.state_dict())
    assert norm.num_batches_tracked == 1
    old = dict(plain.state_dict())  # a plain dict has no version, as checkpoints from before num_batches_tracked
    del old["num_batches_tracked"]
    norm = make()
    norm.load_state_dict(old)
    assert norm.num_batches_tracked == 0
    assert torch.equal(norm.running_var, old["running_var"])
    with torch.device("meta"):
        norm = make()
    norm.load_state_dict(old, assign=True)
    assert norm.num_batches_tracked == 0


@each_layer
def test_a_reset_gives_the_initial_state(norm):
    norm = rebuilt(norm)
    initial = {name: value.clone() for name, value in norm.state_dict().items()}
    with torch.no_grad():
        for value in norm.state_dict().values():
            value.add_(1)
    norm.reset_parameters()
    assert all(torch.equal(value, initial[name]) for name, value in norm.state_dict().items())


@each_layer
def test_the_statistics_of_a_layer_built_on_meta_come_with_its_reset(norm):
    norm = rebuilt(norm, device="meta").to_empty(device="cpu")
    norm.reset_parameters()
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert torch.equal(norm.running_var, torch.ones(3))
    assert norm.num_batches_tracked == 0
