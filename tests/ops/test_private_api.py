"""Every private interface of torch and Triton that the package uses still does what the package needs."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from micronorm.ops import private_api
from tests.devices import require_kernels

SRC = Path(private_api.__file__).parents[1]


def private_uses(path: Path) -> set[str]:
    """Return the private attributes and modules of torch and Triton that a file names in its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name for name in names if re.match(r"(torch|nn|triton|forward_ad)\.(\w+\.)*_(?!_)", name)}
    return found


def test_no_other_file_uses_a_private_interface():
    uses = {str(path.relative_to(SRC)): private_uses(path) for path in SRC.glob("**/*.py")}
    assert uses.pop("ops/private_api.py")
    assert {path: names for path, names in uses.items() if names} == {}


def operators_with_inferred_lists(path: Path) -> set[str]:
    """Return the functions of a file that are operators, take or return lists, and name no schema."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    found = set()
    for function in functions:
        signature = ast.unparse(function).split(":\n")[0]  # with the decorators
        if "custom_op(" in signature and "schema=" not in signature and re.search(r"\b(list|Sequence)\[", signature):
            found.add(function.name)
    return found


def test_operators_that_take_lists_name_their_schemas():
    # torch 2.6 does not infer a schema from `list[…]`, so that importing this package would fail there.
    assert {str(path): found for path in SRC.glob("**/*.py") if (found := operators_with_inferred_lists(path))} == {}


def test_a_missing_interface_is_named_with_the_version():
    with pytest.raises(ImportError, match=r"micronorm uses torch\._gone, which torch \S+ does not have; tested was"):
        private_api._required(torch, "_gone")


@pytest.mark.parametrize("found", [private_api.has_global_hooks, private_api._any_global_hook], ids=["torch", "own"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_for_all_modules_are_found(found, kind):
    assert not found()
    handle = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")(lambda *args: None)
    assert found()
    handle.remove()
    assert not found()


def test_transforms_are_seen_inside_and_not_outside():
    assert not private_api.functorch_transforms_active()
    seen = []
    torch.func.vmap(lambda x: seen.append(private_api.functorch_transforms_active()) or x)(torch.ones(2))
    assert seen == [True]


def test_forward_mode_differentiation_has_a_level():
    assert private_api.forward_ad_level() == -1
    with forward_ad.dual_level():
        assert private_api.forward_ad_level() == 0


def test_batched_gradients_are_recognized():
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, *grads):
            seen.append(private_api.is_legacy_batched(grads[0]))
            return 2 * grads[0]

    x = torch.ones(2, requires_grad=True)
    y = Double.apply(x)
    torch.autograd.grad(y, x, torch.ones(2), retain_graph=True)
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert seen == [False, True]


def test_a_backward_pass_has_an_id():
    assert private_api.graph_task_id() == -1
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(private_api.graph_task_id()))
    x.sum().backward()
    assert seen[0] != -1


def test_saved_tensor_hooks_in_force_are_found():
    if private_api.top_saved_tensors_hooks is None:
        pytest.skip("torch 2.6 and 2.7 do not have the function")
    assert private_api.top_saved_tensors_hooks(True) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert private_api.top_saved_tensors_hooks(True) is not None


def test_a_preserved_version_is_that_of_the_beginning():
    x = torch.ones(2)
    with private_api.preserve_version(x):
        x.add_(1)
    assert x._version == 0


def test_disabled_functions_and_constants_still_compute():
    assert private_api.disable_dynamo(lambda x: x + 1)(1) == 2
    constant = private_api.mark_constant(lambda: 3)
    assert constant() == 3
    assert constant._dynamo_marked_constant


def test_torch_marks_constants_by_the_same_attribute():
    def function():
        return 1

    assert torch.compiler.assume_constant_result(function)._dynamo_marked_constant


def test_base_classes_and_helpers_are_those_of_the_public_classes():
    assert issubclass(nn.Dropout2d, private_api.DropoutNd)
    assert issubclass(nn.BatchNorm2d, private_api.BatchNormBase)
    assert issubclass(nn.InstanceNorm2d, private_api.InstanceNormBase)
    assert private_api.tree_leaves({"a": (1, [2])}) == [1, 2]
    assert private_api.tree_map(lambda v: v + 1, {"a": (1, [2])}) == {"a": (2, [3])}


def test_a_dispatch_mode_sees_every_operation():
    seen = []

    class Mode(private_api.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.add(torch.ones(2), 1)
    assert torch.ops.aten.add.Tensor in seen


def test_a_fast_apply_is_an_apply():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, *grads):
            return 2 * grads[0]

    x = torch.ones(2, requires_grad=True)
    y = private_api.fast_apply(Double)(x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def test_operations_on_lists():
    xs, ys = [torch.ones(2), torch.ones(3)], [torch.full((2,), 4.0), torch.full((3,), 4.0)]
    private_api.foreach_copy_(xs, ys)
    private_api.foreach_add_(xs, [1, 2])
    private_api.foreach_div_(xs, torch.tensor(2.0))
    private_api.foreach_mul_(xs, torch.tensor(4.0))
    assert [x[0].item() for x in xs] == [10.0, 12.0]
    assert [norm.item() for norm in private_api.foreach_norm([torch.tensor([3.0, 4.0])])] == [5.0]
    private_api.foreach_zero_(xs)
    assert not any(x.any() for x in xs)


def test_the_interpreters_result_is_not_launched_directly():
    require_kernels("cpu")
    assert private_api.compiled_launcher(None) is None
    assert private_api.launch_hook_check()() is False


@pytest.mark.parametrize("newer", [False, True])
def test_a_compiled_kernel_is_started_directly_up_to_the_last_triton_that_was_tried(monkeypatch, newer):
    triton = pytest.importorskip("triton")
    from triton.compiler import CompiledKernel

    launcher = type("Launcher", (), {"global_scratch_size": 0, "profile_scratch_size": 0})()
    launcher.launch_cooperative_grid, launcher.launch_pdl, launcher.launch = False, True, "start"
    compiled = object.__new__(CompiledKernel)
    compiled.module, compiled._module_pid = "loaded", None  # Triton 3.9 unloads it in the process of this number
    compiled.packed_metadata, compiled.function, compiled._run = "metadata", 7, launcher
    vars(compiled)["run"] = launcher  # Triton 3.4 has no `_run`; newer ones have a property in place of this
    last = private_api.LAST_TRITON
    monkeypatch.setattr(triton, "__version__", f"{last[0]}.{last[1] + newer}.0")
    found = private_api.compiled_launcher(compiled)
    expected = ("start", (7, False, True, None, None, "metadata", None, None, None))
    assert found == (None if newer else expected)


@pytest.mark.gpu
def test_the_current_device_and_stream_are_those_of_torch():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert private_api.current_stream(stream.device.index) == stream.cuda_stream
    assert private_api.current_device() == torch.cuda.current_device()
