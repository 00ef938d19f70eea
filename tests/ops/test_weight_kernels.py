"""The kernels of Weight Standardization against the reference: by Triton's interpreter here, on a GPU under `gpu`."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

from micronorm.functional import weight_standardize, weight_standardize_many
from micronorm.ops import runtime
from micronorm.ops.weight import choose_backend, launch, tables
from tests.devices import KERNEL_DEVICES, require_kernels
from tests.poison import Poisoned
from tests.tolerances import assert_close_to_max, tolerance

# Tiles of several rows and one, fan-ins that are multiples of 16 and not, rows that fill no tile, one beyond all tiles.
SHAPES = [(5, 2), (33, 3), (1, 3, 3, 3), (5, 128, 3, 3), (33, 64), (3, 147), (2, 4096), (1, 8208)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SWITCHES = [(True, True), (True, False), (False, True)]
OPTIONS = {"backend": "triton"}

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
switches = pytest.mark.parametrize("center, scale", SWITCHES)


@pytest.fixture(params=KERNEL_DEVICES)
def device(request):
    return require_kernels(request.param)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setattr(launch, "torch", Poisoned())


def weight(shape, dtype=torch.float64, device="cpu", *, mean=0.1, std=0.3):
    return (torch.randn(shape, dtype=torch.float64) * std + mean).to(device, dtype)


def exact(w, g, **options):
    """Ŵ and dW in float64 on the CPU, from what the kernel got."""
    w = w.detach().to("cpu", torch.float64).requires_grad_()
    what = weight_standardize(w, backend="reference", **options)
    (dw,) = torch.autograd.grad(what, w, g.to("cpu", torch.float64))
    return what.detach(), dw


def assert_right(weights, whats, grads, dws, **options):
    for w, what, g, dw in zip(weights, whats, grads, dws, strict=True):
        expected, expected_dw = exact(w, g, **options)
        assert what.shape == dw.shape == w.shape
        assert dw.dtype == w.dtype
        assert_close_to_max(what, expected, tol=tolerance("output", what.dtype))
        # what cancels in the difference g − mean(g) − … is of the size of g/σ
        rounded = tolerance("gradient", w.dtype)
        assert_close_to_max(dw, expected_dw, tol=rounded, scale=max(expected_dw.abs().max(), expected.abs().max()))


@switches
@dtypes
def test_a_list_of_weights_and_its_gradients_are_those_of_the_reference(device, dtype, center, scale):
    weights = [weight(shape, dtype, device).requires_grad_() for shape in SHAPES]
    whats = weight_standardize_many(weights, center=center, scale=scale, **OPTIONS)
    grads = [torch.randn(w.shape, dtype=torch.float64).to(device, dtype) for w in weights]
    dws = torch.autograd.grad(whats, weights, grads)
    assert_right(weights, whats, grads, dws, center=center, scale=scale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@switches
def test_one_weight_is_what_it_is_in_a_list(device, shape, center, scale):
    w = weight(shape, torch.float32, device).requires_grad_()
    what = weight_standardize(w, center=center, scale=scale, dtype=torch.bfloat16, **OPTIONS)
    assert what.dtype == torch.bfloat16
    g = torch.randn(shape).to(device, torch.bfloat16)
    (dw,) = torch.autograd.grad(what, w, g)
    assert_right([w], [what], [g], [dw], center=center, scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_compute_dtype_comes_out_directly_and_float32_gradients_go_in(device, dtype):
    weights = [weight(shape, torch.float32, device).requires_grad_() for shape in SHAPES]
    whats = weight_standardize_many(weights, dtype=dtype, **OPTIONS)
    grads = [torch.randn(w.shape).to(device, dtype) for w in weights]
    assert_right(weights, whats, grads, torch.autograd.grad(whats, weights, grads))
    if device == "cuda":  # the interpreter cuts bfloat16 off instead of rounding it
        wide = weight_standardize_many(weights, **OPTIONS)
        info = torch.finfo(dtype)
        for a, b in zip(whats, wide, strict=True):  # rounded once, but for the last bit of a sum in another order
            slack = 8 * torch.finfo(torch.float32).eps * b.abs().max()
            assert ((a - b).abs() <= 0.5 * info.eps * b.abs().clamp(min=info.tiny) + slack).all()


def test_the_algebra_holds_in_float64(device):
    weights = [weight(shape, device=device).requires_grad_() for shape in SHAPES]
    whats = weight_standardize_many(weights, eps=0.3, **OPTIONS)
    grads = [torch.randn_like(w) for w in weights]
    for w, what, g, dw in zip(weights, whats, grads, torch.autograd.grad(whats, weights, grads), strict=True):
        expected, expected_dw = exact(w, g, eps=0.3)
        assert_close_to_max(what, expected, tol=1e-12)
        assert_close_to_max(dw, expected_dw, tol=1e-12)


@pytest.mark.parametrize("mean", [1.0, 100.0, 1e4])
def test_rows_far_from_zero_keep_their_digits(device, mean):
    weights = [weight(shape, torch.float32, device, mean=mean, std=0.1) for shape in SHAPES]
    for one in ([w] for w in weights):
        alone = weight_standardize_many(one, **OPTIONS)[0]
        # the subtraction of a mean that float32 cannot hold is exact: only the products round
        assert_close_to_max(alone, exact(one[0], one[0])[0], tol=8 * torch.finfo(torch.float32).eps)
    for w, what in zip(weights, weight_standardize_many(weights, **OPTIONS), strict=True):
        assert_close_to_max(what, exact(w, w)[0], tol=8 * torch.finfo(torch.float32).eps)


def layouts(device):
    """Contiguous, channels_last, and of five axes, in one list."""
    plain, last = weight((4, 16, 3, 3), device=device), weight((6, 5, 3, 3), device=device)
    volume = weight((3, 4, 2, 2, 2), device=device)
    return [
        plain,
        last.to(memory_format=torch.channels_last),
        volume.to(memory_format=torch.channels_last_3d),
        weight((4, 16, 1, 1), device=device).to(memory_format=torch.channels_last),
    ]


def test_channels_last_weights_keep_their_strides_and_take_any_gradient(device):
    weights = [w.requires_grad_() for w in layouts(device)]
    whats = weight_standardize_many(weights, **OPTIONS)
    contiguous = [torch.randn(w.shape, dtype=torch.float64, device=device) for w in weights]
    same = [torch.empty_like(w).copy_(g) for w, g in zip(weights, contiguous, strict=True)]
    shifted = [torch.cat([g.flatten()[:1], g.flatten()])[1:].view(g.shape) for g in contiguous]
    for grads in (contiguous, same, shifted):
        dws = torch.autograd.grad(whats, weights, grads, retain_graph=True)
        assert_right(weights, whats, grads, dws)
    for w, what, dw in zip(weights, whats, dws, strict=True):
        assert what.stride() == dw.stride() == w.stride()


def test_expanded_gradients_are_right(device):
    weights = [w.requires_grad_() for w in layouts(device)]
    whats = weight_standardize_many(weights, center=False, **OPTIONS)
    dws = torch.autograd.grad(sum(what.sum() for what in whats), weights)
    assert_right(weights, whats, [torch.ones_like(w) for w in weights], dws, center=False)


@pytest.mark.parametrize("used", [[0], [1], [0, 2], [1, 2]])
def test_a_weight_without_a_gradient_gets_none_and_spoils_no_other(device, used):
    weights = [weight(shape, device=device).requires_grad_() for shape in [(33, 3), (5, 32), (7, 2, 3)]]
    whats = weight_standardize_many(weights, **OPTIONS)
    grads = [torch.randn_like(whats[i]) for i in used]
    dws = torch.autograd.grad([whats[i] for i in used], weights, grads, allow_unused=True)
    assert [i for i, dw in enumerate(dws) if dw is not None] == used
    chosen = [[x[i] for i in used] for x in (weights, whats, dws)]
    assert_right(chosen[0], chosen[1], grads, chosen[2])


def test_frozen_weights_get_no_gradient(device):
    weights = [weight((4, 6), device=device).requires_grad_(trained) for trained in (True, False, True)]
    whats = weight_standardize_many(weights, **OPTIONS)
    grads = [torch.randn_like(w) for w in weights]
    torch.autograd.backward(whats, grads)
    assert weights[1].grad is None
    for i in (0, 2):
        assert_close_to_max(weights[i].grad, exact(weights[i], grads[i])[1], tol=1e-12)


def test_zero_gradients_give_zeros_and_gradients_share_no_memory(device):
    weights = [weight(shape, device=device).requires_grad_() for shape in SHAPES[:4]]
    whats = weight_standardize_many(weights, **OPTIONS)
    dws = torch.autograd.grad(whats, weights, [torch.zeros_like(w) for w in weights])
    assert all(dw.count_nonzero() == 0 for dw in dws)
    assert len({t.untyped_storage().data_ptr() for t in (*whats, *dws, *weights)}) == 12


def test_the_same_weights_give_the_same_bits_again(device):
    weights = [weight(shape, torch.float32, device).requires_grad_() for shape in SHAPES]
    grads = [torch.randn_like(w) for w in weights]
    runs = []
    for _ in range(2):
        whats = weight_standardize_many(weights, **OPTIONS)
        runs.append([*whats, *torch.autograd.grad(whats, weights, grads)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_row_of_equal_weights_becomes_zeros_and_stays_finite(device):
    weights = [torch.full((3, n), 0.7, device=device, requires_grad=True) for n in (5, 64, 9000)]
    whats = weight_standardize_many(weights, **OPTIONS)
    dws = torch.autograd.grad(whats, weights, [torch.randn_like(w) for w in weights])
    for what, dw in zip(whats, dws, strict=True):
        assert what.abs().max() < 1e-4
        assert dw.isfinite().all()


@switches
def test_first_and_second_derivatives_agree_with_finite_differences(device, center, scale):
    weights = [weight(shape, device=device).requires_grad_() for shape in [(2, 3), (1, 2, 2)]]

    def function(*ws):
        return tuple(weight_standardize_many(ws, center=center, scale=scale, eps=0.1, **OPTIONS))

    assert gradcheck(function, weights, fast_mode=True)
    assert gradgradcheck(function, weights, fast_mode=True)


def test_lists_of_several_dtypes_are_sorted_out_and_put_back_in_order(device):
    weights = [weight((3, 4), dtype, device) for dtype in (torch.float64, torch.float32, torch.float64)]
    whats = weight_standardize_many(weights, **OPTIONS)
    assert [w.dtype for w in whats] == [torch.float64, torch.float32, torch.float64]
    for w, what in zip(weights, whats, strict=True):
        assert_close_to_max(what, exact(w, w)[0], tol=tolerance("output", w.dtype))
    assert weight_standardize_many([], **OPTIONS) == []


def test_neither_center_nor_scale_returns_the_weight(device):
    w = weight((3, 4), device=device)
    assert weight_standardize(w, center=False, scale=False, **OPTIONS) is w
    assert weight_standardize(w, center=False, scale=False, dtype=torch.float32, **OPTIONS).dtype == torch.float32


# --- operators -------------------------------------------------------------------------------------------------------


def test_the_operators_pass_opcheck(device):
    weights = [weight(shape, torch.float32, device).requires_grad_() for shape in [(5, 2), (3, 16, 3, 3)]]
    operators = torch.ops.micronorm
    torch.library.opcheck(operators.weight_standardize_many.default, (weights, True, True, 1e-5, torch.bfloat16))
    weights = [w.detach() for w in weights]
    *whats, stats = operators.weight_standardize_many(weights, True, True, 1e-5, torch.float32)
    grads = [torch.randn_like(w) for w in whats]
    torch.library.opcheck(operators.weight_standardize_many_backward.default, (grads, weights, stats, True, True))


def test_compiled_code_has_no_break_and_the_same_results(device):
    weights = [weight(shape, torch.float32, device).requires_grad_() for shape in [(5, 27), (4, 16, 3, 3)]]

    def loss(*ws):
        many = weight_standardize_many([2 * w for w in ws], dtype=torch.bfloat16, **OPTIONS)
        return sum(w.float().sin().sum() for w in many) + weight_standardize(ws[0], **OPTIONS).cos().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    expected, actual = (torch.autograd.grad(f(*weights), weights) for f in (loss, compiled))
    for a, b in zip(actual, expected, strict=True):
        assert_close_to_max(a, b, tol=tolerance("gradient", torch.float32))


@pytest.mark.parametrize("shape", [(32, 1, 3, 3, 3), (1, 1, 3, 3), (8, 1, 1, 3, 3)], ids=str)
def test_compilers_expect_the_strides_that_the_operators_return(shape, device):
    operators, options = torch.ops.micronorm, (True, True)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    w = weight(shape, torch.float32, device).to(memory_format=last)

    def strides(w):
        what, stats = operators.weight_standardize_many([w], *options, 1e-5, torch.bfloat16)
        (dw,) = operators.weight_standardize_many_backward([what.float()], [w], stats, *options)
        return what.stride(), dw.stride()

    with FakeTensorMode() as mode:
        expected = strides(mode.from_tensor(w))
    assert strides(w) == expected == (w.stride(), w.stride())


# --- the choice ------------------------------------------------------------------------------------------------------


def test_the_choice_is_the_reference_on_a_cpu_and_says_why_not():
    w = weight((4, 6, 3, 3))
    assert choose_backend(w) == choose_backend(w, "reference") == "reference"
    with pytest.raises(ValueError, match=r"backend must be one of auto, reference, triton, got 'cuda'"):
        choose_backend(w, "cuda")
    with pytest.raises(ValueError, match="kernels need a CUDA device, not meta"):
        choose_backend(w.to("meta"), "triton")
    with pytest.raises(TypeError, match=r"at least 16 bits, got torch\.int64"):
        weight_standardize(w, dtype=torch.int64)


def test_a_transform_of_torch_func_is_refused_by_its_name_and_taken_by_the_automatic_choice(device):
    w = weight((4, 6), device=device)

    def total(w, backend):
        return weight_standardize(w, backend=backend).pow(3).sum()

    with pytest.raises(ValueError, match=r"cannot compute this: kernels do not support torch\.func transforms"):
        torch.func.grad(total)(w, "triton")
    (expected,) = torch.autograd.grad(total(w.requires_grad_(), "triton"), w)
    found = torch.func.grad(total)(w.detach(), "auto")
    assert_close_to_max(found, expected, tol=tolerance("gradient", torch.float64))


def test_rows_that_are_not_dense_are_refused_with_their_strides(device):
    assert choose_backend(weight((4, 6, 3, 3), device=device), "triton") == "triton"
    with pytest.raises(ValueError, match=r"rows that are dense in memory, got strides \(9, 36, 3, 1\)"):
        choose_backend(weight((6, 4, 3, 3), device=device).transpose(0, 1), "triton")


@pytest.mark.gpu
def test_the_choice_is_the_kernel_on_cuda_where_rows_are_dense():
    w = weight((4, 6, 3, 3), device="cuda")
    assert choose_backend(w) == "triton"
    assert choose_backend(w.transpose(0, 1)) == "reference"


def test_a_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr(runtime, "_problems", {("cpu", None): "triton is not installed"})
    with pytest.raises(ValueError, match=r"triton is not installed; use backend=\"auto\""):
        weight_standardize(weight((4, 6)), **OPTIONS)
    assert weight_standardize(weight((4, 6))).shape == (4, 6)


def test_the_automatic_choice_does_not_ask_triton_on_a_cpu(monkeypatch):
    monkeypatch.setattr(runtime, "_problems", {})
    monkeypatch.setattr(runtime, "interpreted", lambda: pytest.fail("imports triton"))
    assert weight_standardize(weight((4, 6))).shape == (4, 6)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(runtime, "_problems", {})
    monkeypatch.setattr(runtime, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="kernels need a CUDA device"):
        weight_standardize(weight((4, 6)), **OPTIONS)


# --- tables ----------------------------------------------------------------------------------------------------------


def test_every_row_of_every_weight_is_in_exactly_one_block(device):
    weights = [weight(shape, torch.float32, device) for shape in SHAPES]
    columns, channels = launch._columns(weights)
    seen = []
    for address, fan_in, rows, column, at, kind, index, _ in tables.block_records(weights, columns).tolist():
        w = weights[index]
        held = tables.tile_of(fan_in, aligned=address % 16 == 0)
        assert kind == held[0]
        assert address == w.data_ptr() + 4 * at
        assert (fan_in, rows) == (w[0].numel(), w.shape[0] - at // fan_in)
        seen += range(column, column + min(rows, held[1]))
    assert sorted(seen) == list(range(channels))


def test_tables_are_made_once_and_the_oldest_forgotten():
    kept, made = tables._Kept(limit=2), []

    def make(value):
        return lambda: made.append(value) or torch.tensor([value])

    for key in (1, 2, 1, 3, 1, 2):  # 3 drives out 2, which was asked for longer ago than 1
        assert kept(key, make(key)).tolist() == [key]
    assert made == [1, 2, 3, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_a_captured_graph_standardizes_what_the_weights_are_at_its_replay(warm):
    tables.kept.tables.clear()
    weights = [weight(shape, torch.float32, "cuda").requires_grad_() for shape in SHAPES]
    grads = [torch.randn_like(w, dtype=torch.bfloat16) for w in weights]

    def step():
        whats = weight_standardize_many(weights, dtype=torch.bfloat16)
        return whats, torch.autograd.grad(whats, weights, grads)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if warm:
            step()
        else:  # the kernels are compiled, but the tables are those of other weights
            others = [w.detach().clone().requires_grad_() for w in weights]
            torch.autograd.grad(weight_standardize_many(others, dtype=torch.bfloat16), others, grads)
            tables.kept.tables.clear()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whats, dws = step()
    for _ in range(2):
        with torch.no_grad():
            for w, g in zip(weights, grads, strict=True):
                w.add_(torch.randn_like(w))
                g.copy_(torch.randn_like(w))
        tables.kept.tables.clear()  # what the graph needs it keeps
        torch.cuda.empty_cache()
        graph.replay()
        torch.cuda.synchronize()
        assert_right(weights, whats, grads, dws)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_for_the_device():
    weights = [weight(shape, torch.float32, "cuda").requires_grad_() for shape in SHAPES]
    whats = weight_standardize_many(weights)  # compiles, and makes the tables
    grads = [torch.randn_like(w) for w in weights]
    torch.autograd.grad(whats, weights, grads)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            whats[0].sum().item()  # what would wait is told
        whats = weight_standardize_many(weights)
        found = torch.autograd.grad(whats, weights, grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_right(weights, whats, grads, found)
