"""Which form computes a layer, and what is said where kernels cannot."""

import importlib.metadata
import importlib.util

import pytest
import torch

from micronorm.nn import BatchChannelNorm, bcn
from micronorm.nn.backends import explain_backend, kernel_problem, resolve_backend
from micronorm.nn.group import GroupNorm
from micronorm.ops import runtime
from tests.devices import require_kernels
from tests.tolerances import assert_close_to_max, tolerance

TOL = tolerance("one_step", torch.float64)

X = torch.zeros(2, 4, 3, 3)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Questions are asked anew, and their answers forgotten with the test."""
    monkeypatch.setattr(runtime, "_problems", {})


@pytest.fixture
def triton_new_enough(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.4.0")


def test_a_cpu_computes_in_operations_and_a_form_that_was_asked_for_is_taken():
    assert resolve_backend("auto", X) == "one-pass"
    for backend in ("one-pass", "reference"):
        assert resolve_backend(backend, X) == backend


@pytest.mark.parametrize("layer", [BatchChannelNorm(4, 2), GroupNorm(2, 4)], ids=repr)
def test_a_mistyped_backend_is_refused_where_it_is_used_too(layer):
    layer.backend = "tritn"
    with pytest.raises(ValueError, match=r"backend must be one of \('auto', .*, got 'tritn'"):
        layer(X)


def test_the_kernels_run_on_a_cpu_by_the_interpreter_only(monkeypatch):
    require_kernels("cpu")
    assert runtime.interpreted()
    assert kernel_problem("cpu") is None
    assert resolve_backend("triton", X) == "triton"
    assert explain_backend("cpu").reason.endswith("the interpreter of kernels is for tests")
    runtime._problems.clear()
    monkeypatch.setattr(runtime, "interpreted", lambda: False)
    assert kernel_problem("cpu") == "kernels need a CUDA device"
    assert explain_backend("cpu").reason.endswith("; kernels need a CUDA device")
    layer = BatchChannelNorm(4, 2, backend="triton")
    with pytest.raises(ValueError, match=r'cannot compute this: kernels need a CUDA device; use backend="auto"'):
        layer(X)
    assert BatchChannelNorm(4, 2)(X).shape == X.shape


def test_a_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernel_problem("cuda", 0) == "triton is not installed"
    assert explain_backend("cuda").backend == "one-pass"
    with pytest.raises(ValueError, match="triton is not installed"):
        resolve_backend("triton", X)


def test_a_triton_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.2.0")
    assert kernel_problem("cuda", 0) == "kernels need triton 3.4 or newer, this is 3.2.0"
    assert explain_backend("cuda").backend == "one-pass"


@pytest.mark.usefixtures("triton_new_enough")
def test_other_devices_are_named():
    assert kernel_problem("mps") == "kernels need a CUDA device, not mps"
    with pytest.raises(ValueError, match="not meta"):
        resolve_backend("triton", X.to("meta"))


@pytest.mark.parametrize("capability, problem", [((6, 1), "compute capability 7.0 or newer"), ((7, 0), None)])
@pytest.mark.usefixtures("triton_new_enough")
def test_a_gpu_must_be_new_enough(monkeypatch, capability, problem):
    asked = []
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: asked.append(index) or capability)
    for _ in range(2):
        found = kernel_problem("cuda", 1)
        assert found is None if problem is None else problem in (found or "")
    assert asked == [1]  # once for a device
    assert explain_backend("cuda:1").backend == ("triton" if problem is None else "one-pass")


@pytest.mark.usefixtures("triton_new_enough")
def test_amd_devices_are_not_tried(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "AMD" in (kernel_problem("cuda", 0) or "")


def test_a_sample_beyond_32_bits_is_refused_with_its_size():
    require_kernels("cpu")
    large = torch.empty(1).expand(1, 2, 2**30)
    with pytest.raises(ValueError, match="a sample of 2147483648 elements is too large for kernels"):
        resolve_backend("triton", large)
    assert resolve_backend("triton", torch.empty(1).expand(4, 2, 2**29)) == "triton"


@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
def test_the_layer_computes_in_the_form_that_is_told(monkeypatch, backend):
    require_kernels("cpu")
    called = []
    forms = {
        "one-pass": "batch_channel_norm",
        "reference": "batch_channel_norm_reference",
        "triton": "batch_channel_norm_fused",
    }
    for form, name in forms.items():
        right = getattr(bcn, name)
        monkeypatch.setattr(bcn, name, lambda *a, form=form, right=right, **o: called.append(form) or right(*a, **o))
    BatchChannelNorm(4, 2, backend=backend)(X)
    assert called == [resolve_backend(backend, X)]


@pytest.mark.gpu
def test_a_gpu_computes_by_the_kernels():
    assert resolve_backend("auto", X.cuda()) == "triton"
    assert explain_backend("cuda") == ("triton", "fused Triton kernels")


def test_more_samples_and_channels_than_32_bits_count_are_refused_with_their_number():
    require_kernels("cpu")
    many = torch.empty(1).expand(2**20, 2**8)
    with pytest.raises(ValueError, match="1048576 samples of 256 channels have too many statistics"):
        resolve_backend("triton", many)
    assert resolve_backend("triton", many[: 2**10]) == "triton"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own derivatives call it
def test_transforms_of_torch_func_take_the_form_that_autograd_can_follow():
    layer, x = BatchChannelNorm(4, 2).double().eval(), torch.randn(3, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).pow(3).sum(), x)
    x = x.detach()
    assert_close_to_max(torch.func.grad(lambda x: layer(x).pow(3).sum())(x), expected, tol=TOL)
    assert_close_to_max(torch.func.vmap(lambda one: layer(one[None])[0])(x), layer(x).detach(), tol=TOL)
    along = torch.randn_like(x)
    slope = torch.func.jvp(lambda x: layer(x).pow(3).sum(), (x,), (along,))[1]
    assert_close_to_max(slope, (expected * along).sum(), tol=TOL)


@pytest.mark.parametrize("statistics", ["step", "sequential", "batch"])
def test_transforms_of_torch_func_are_refused_where_a_layer_gathers(statistics):
    layer, x = BatchChannelNorm(4, 2, statistics=statistics, rate=0.1), torch.randn(3, 4, 5, 5)
    with pytest.raises(RuntimeError, match=r"Call model\.eval\(\)"):
        torch.func.grad(lambda x: layer(x).pow(3).sum())(x)
