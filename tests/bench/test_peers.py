"""The contestants."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from micronorm.bench import peers
from micronorm.bench.peers import BN, BN_EVAL_GN, BN_GN, FORMS, FUSED, GN, METHODS, ON_CPU, ON_GPU, SYNC_BN
from micronorm.nn.backends import BACKENDS
from micronorm.nn.bcn import STATISTICS


def test_keys_and_labels_name_one_method_each():
    assert len({method.key for method in METHODS}) == len(METHODS)
    assert len({method.label for method in METHODS}) == len(METHODS)


def test_ours_is_there_in_every_mode_and_form():
    assert {method.mode for method in FUSED} == {*STATISTICS, "eval"}
    assert {method.backend for method in FORMS} == set(BACKENDS) - {"auto"}
    assert set(FUSED) <= set(ON_CPU) & set(ON_GPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", [m for m in METHODS if not m.is_compiled and not m.is_synced], ids=lambda m: m.key)
def test_every_method_rectifies_and_gives_gradients_in_the_dtype(method, dtype):
    layer = method.build(8, dtype)
    x = torch.randn(3, 8, 4, 4).to(dtype).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.dtype == x.dtype
    assert y.min() == 0 < y.max()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_what_is_called_batch_norm_is_torch_s():
    x = torch.randn(3, 8, 4, 4)
    theirs = nn.BatchNorm2d(8)
    ours = BN.build(8, torch.float32)
    assert torch.equal(ours(x), theirs(x).relu())
    assert torch.equal(ours[0].running_var, theirs.running_var)
    composed = BN_GN.build(8, torch.float32)
    assert torch.equal(composed(x), composed[1](nn.BatchNorm2d(8)(x)).relu())
    still = BN_EVAL_GN.build(8, torch.float32)
    still(x)
    assert torch.equal(still[0].running_mean, torch.zeros(8))


def test_what_computed_it_is_named():
    x = torch.randn(2, 8, 3, 3)
    by = {method.key: peers.computed_by(method, x) for method in METHODS}
    assert by["bn"] == by["bn-eval-gn"] == by["gn"] == "native"
    assert by["bn-compiled"] == "inductor"
    assert by["bcn-step"] == "one-pass"
    assert by["bcn-step-reference"] == "reference"


@pytest.mark.parametrize("index, name", [(0, "native"), (1, "cudnn"), (2, "miopen"), (7, "implementation 7")])
def test_batch_norm_s_backend_is_that_of_torch_s_own_choice(monkeypatch, index, name):
    monkeypatch.setattr(torch, "_batch_norm_impl_index", lambda *args: (None, None, None, None, index))
    assert peers.batch_norm_backend(torch.randn(2, 3)) == name


def test_methods_are_chosen_by_key_or_by_device():
    assert peers.choose_methods([], on_gpu=True) == list(ON_GPU)
    assert peers.choose_methods([], on_gpu=False) == list(ON_CPU)
    assert not any(m.is_compiled for m in peers.choose_methods([], on_gpu=True, compiled=False))
    assert peers.choose_methods(["gn", "bn", "gn"], on_gpu=False) == [GN, BN]
    with pytest.raises(ValueError, match="no method 'bnn'; there are bcn-step"):
        peers.choose_methods(["bnn"], on_gpu=False)
    with pytest.raises(ValueError, match="sync-bn needs a GPU"):
        peers.choose_methods(["sync-bn"], on_gpu=False)


def test_a_group_of_one_rank_is_opened_where_one_is_needed_and_closed_again(monkeypatch):
    opened = []

    def init(backend, **options):
        opened.append((backend, options["world_size"]))

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: opened.append("closed"))
    with peers.one_rank([BN, GN]):
        assert opened == []
    with pytest.raises(ZeroDivisionError), peers.one_rank([BN, SYNC_BN]):
        raise ZeroDivisionError
    assert opened == [("nccl", 1), "closed"]


def test_the_synchronized_path_is_called_in_the_group_of_one(monkeypatch):
    from torch.nn.modules import _functions

    called = {}

    def apply(x, *rest):
        called["rest"] = rest
        return x

    monkeypatch.setattr(_functions.SyncBatchNorm, "apply", apply)
    layer = SYNC_BN.build(4, torch.float32)
    layer(torch.randn(2, 4))
    *_, eps, momentum, group, world = called["rest"]
    assert (eps, momentum, group, world) == (1e-5, 0.1, dist.group.WORLD, 1)


@pytest.mark.gpu
def test_the_synchronized_path_of_one_rank_gives_batch_norm_s_numbers():
    x = torch.randn(4, 8, 6, 6, device="cuda")
    with peers.one_rank([SYNC_BN]):
        y = SYNC_BN.build(8, torch.float32).cuda()(x)
    assert (y - BN.build(8, torch.float32).cuda()(x)).abs().max() < 1e-5
