"""What every test gets: one torch thread, reproducible examples, a seed."""

import gc
import os
import signal

import pytest
import torch

# Kernels run on the CPU where there is no device for them. Triton reads this when it is imported, and torch._dynamo may
# import it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Inductor would start processes to compile in, which all import torch, and `make test` runs one per core already.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch._dynamo
from hypothesis import register_random, settings

# Small tensors gain nothing from threads, and `make test` runs one process per core already.
torch.set_num_threads(1)

# On a GPU what is compared to the bit must not depend on the order of cudnn's sums, nor on ten bits of mantissa.
torch.backends.cudnn.deterministic = True
torch.backends.cudnn.allow_tf32 = False

# A runner that a shell started in the background ignores Ctrl-C, and so would every process started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a first call pays for imports and allocation, and a shared machine stalls. The blob in a failure's output
# reproduces it on any machine. In CI the examples are the same each time, so that a red run is red again.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


class TorchRandom:
    """torch's generator as hypothesis wants it: seeded for each example, put back afterwards."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # hypothesis keeps a weak reference only
register_random(TORCH_RANDOM)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed torch before each test, so that no test depends on which ran before it; returns the seed."""
    seed = 0
    torch.manual_seed(seed)
    return seed


@pytest.fixture(autouse=True)
def fresh_compiler(request: pytest.FixtureRequest) -> None:
    """Forget compiled code before a test that compiles: torch counts recompilations across all tests of a process."""
    if "compil" in request.node.name:
        torch._dynamo.reset()


def pytest_collection_finish() -> None:
    """Leave what the imports made out of garbage collections: a rollback, for one, collects, and would take 0.4 s."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if torch.__version__ < "2.7" and ("onnx" in item.nodeid or "export.md" in item.nodeid):
            # Its exporter takes group normalization apart, and `export.onnx` refuses the file.
            item.add_marker(pytest.mark.skip(reason="torch 2.6 writes no GroupNormalization"))
        if torch.__version__ < "2.7" and any(word in item.nodeid for word in ("fsdp", "test_sharded", "test_parallel")):
            # These launch replicated and sharded ranks together.
            item.add_marker(pytest.mark.skip(reason="FSDP2 of torch 2.6 needs a GPU's streams"))
