"""`mn.recompute` on a GPU: the same bits, and a lower peak at the allocator."""

import pytest
import torch
import torchvision
from torch import Tensor, nn

import micronorm as mn
from tests.nn.per_step.storages import equal

pytestmark = pytest.mark.gpu


def network(norm: str) -> nn.Module:
    torch.manual_seed(1)
    model = torchvision.models.resnet50()
    model = mn.convert(model) if norm == "bcn" else model
    return model.cuda().to(memory_format=torch.channels_last)


def step(model: nn.Module) -> tuple[list[Tensor], int]:
    """The gradients of a step in bf16, and the memory it took at its peak."""
    generator = torch.Generator("cuda").manual_seed(2)
    x = torch.randn(16, 3, 224, 224, device="cuda", generator=generator).to(memory_format=torch.channels_last)
    before = 0
    for _ in range(2):  # the first finds workspaces
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()  # what other steps left, and the model
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).float().square().sum()
        loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], torch.cuda.max_memory_allocated() - before


def test_gradients_are_the_same_to_the_bit_and_the_peak_falls_below_that_of_batchnorm(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    _, batchnorm = step(network("bn"))
    expected, plain = step(network("bcn"))
    model = network("bcn")
    handle = mn.recompute(model)
    gradients, peak = step(model)
    assert equal(gradients, expected)
    assert peak < plain - 0.7 * handle.report().bytes
    assert peak < 0.8 * batchnorm


def test_a_captured_step_replays_with_what_was_recomputed(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    model = network("bcn").eval()  # nothing is gathered, and the gradients are those of training
    x = torch.randn(4, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)

    def run() -> list[Tensor]:
        return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))

    expected = run()
    mn.recompute(model)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = run()
    graph.replay()
    assert equal(gradients, expected)
