"""The laws on a CUDA device: same numbers as the CPU, no synchronization, and a commit that replays in a CUDA graph."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import micronorm as mn
from tests.contract.layers import ALL, run
from tests.networks import SAMPLES, SmallResNet, assert_same_state, pieces, samples
from tests.tolerances import assert_close_to_max, tolerance

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", ALL, ids=str)
def test_cuda_gives_what_the_cpu_gives(case):
    layer = case.layer()
    x = case.input()
    g = torch.randn_like(copy.deepcopy(layer)(x))
    expected = run(copy.deepcopy(layer), x, g)
    result = run(layer.cuda(), x.cuda(), g.cuda())
    for name, value in expected.items():
        tol = tolerance("gradient", torch.float64)
        assert_close_to_max(result[name], value, tol=tol, scale=1 + value.abs().max().item())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_step_does_not_depend_on_its_cut_on_cuda(dtype, memory_format):
    model = SmallResNet(weight=mn.WS()).to("cuda", dtype).to(memory_format=memory_format)
    x, labels = (t.cuda() for t in samples(dtype))
    states = []
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for cut in ([SAMPLES], [7, 17], [1] * SAMPLES):
            net = copy.deepcopy(model)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for part in pieces(cut):
                loss = F.cross_entropy(net(x[part]), labels[part], reduction="sum") / SAMPLES
                loss.backward()
            optimizer.step()
            states.append(net.state_dict())
    for state in states[1:]:
        assert_same_state(state, states[0], tol=tolerance("one_step", dtype))


@pytest.mark.parametrize("fused", [False, True], ids=["ordinary", "fused"])
def test_a_skipped_step_commits_nothing_on_cuda(fused):
    norm = mn.nn.BatchChannelNorm(4, 2, rate=1.0).cuda()
    optimizer = torch.optim.AdamW(norm.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0)
    parts = [torch.randn(2, 4, 3, 3, device="cuda") + k for k in range(2)]
    for k, part in enumerate(parts):
        optimizer.zero_grad()
        scaler.scale(norm(part).sum() * (torch.inf if k == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if k == 0:
            assert not norm.running_mean.any()
    assert torch.allclose(norm.running_mean, torch.cat(parts).mean((0, 2, 3)), atol=1e-6)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("statistics", ["step", "batch", "sequential"])
def test_a_training_step_does_not_synchronize(statistics):
    net = SmallResNet(mn.BCN(groups=4, statistics=statistics, rate=0.1), mn.WS()).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, labels = (t.cuda() for t in samples(torch.float32))
    for _ in range(2):
        F.cross_entropy(net(x), labels).backward()
        optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            F.cross_entropy(net(x), labels).backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(v).all() for v in net.state_dict().values())


@pytest.mark.parametrize(
    "options",
    [
        {"statistics": "step"},
        {"statistics": "step", "bias_correction": True},
        {"statistics": "sequential"},
        {"statistics": "batch"},
    ],
    ids=str,
)
def test_a_captured_step_replays_its_commit_with_the_rate_of_the_moment(options):
    net = SmallResNet(mn.BCN(groups=4, **options), mn.WS()).double().cuda()
    twin = copy.deepcopy(net)
    lr = torch.tensor(0.1, device="cuda")
    batches = [tuple(t.cuda() for t in samples(seed=k)) for k in range(4)]
    x, labels = (t.clone() for t in batches[0])

    def step(model, optimizer, x, labels):
        optimizer.zero_grad(set_to_none=False)
        for part in pieces([10, 14]):
            (F.cross_entropy(model(x[part]), labels[part], reduction="sum") / SAMPLES).backward()
        optimizer.step()

    optimizer = torch.optim.SGD(net.parameters(), lr=lr, fused=True)
    handle = mn.attach(net, optimizer)
    state = copy.deepcopy(net.state_dict())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), handle.paused():  # a warm-up that leaves no trace
        for _ in range(3):
            step(net, optimizer, x, labels)
    torch.cuda.current_stream().wait_stream(stream)
    net.load_state_dict(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(net, optimizer, x, labels)

    other: Any = torch.optim.SGD(twin.parameters(), lr=0.1, fused=True)
    mn.attach(twin, other)
    for k, (xs, ys) in enumerate(batches):
        lr.fill_(0.1 / (k + 1))
        other.param_groups[0]["lr"] = lr.item()
        x.copy_(xs)
        labels.copy_(ys)
        handle.refresh()
        graph.replay()
        step(twin, other, xs, ys)
    assert_same_state(net.state_dict(), twin.state_dict(), tol=tolerance("fifty_steps", torch.float64))
    assert net.norm.running_mean.any()


def test_autocast_and_channels_last_train_on_cuda():
    net = SmallResNet(weight=mn.WS()).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    x, labels = (t.cuda() for t in samples(torch.float32))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x.contiguous(memory_format=torch.channels_last)), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_compiled_training_by_inductor_on_cuda_gives_the_same():
    net = SmallResNet(weight=mn.WS()).double().cuda()
    twin = copy.deepcopy(net)
    compiled = torch.compile(twin, fullgraph=True)
    x, labels = (t.cuda() for t in samples())
    for model, owner in ((net, net), (compiled, twin)):
        optimizer = torch.optim.SGD(owner.parameters(), lr=0.01)
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
    assert_same_state(twin.state_dict(), net.state_dict(), tol=tolerance("one_step", torch.float64))
