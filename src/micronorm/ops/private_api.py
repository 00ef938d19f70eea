"""Every private interface of torch and Triton that this package uses.

Private interfaces may change in any release. They are collected here so that a change breaks one file;
`tests/ops/test_private_api.py` has a test for each, and finds private names in other files. Attributes of torch's
objects (`Tensor._version`, `Node._saved_…`, `Module._buffers`) are used where they are needed. docs/laws.md
lists the versions of torch and Triton that the tests passed with.

If a release removes an interface, importing this file raises an ImportError that names it. Those that are read by
`getattr` with a default have a fallback instead, and so has the launch of compiled kernels.

`compiled_launcher` calls a C function by position. A new order of its arguments could go unnoticed, so it is used up
to `LAST_TRITON` only; newer versions take Triton's own, slower launch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

LAST_TRITON = (3, 6)
"""The newest Triton whose compiled kernels are launched directly."""


def _required(owner: Any, name: str) -> Any:
    """Return a private attribute, or raise an ImportError that names it and the torch version."""
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__name__", type(owner).__name__)
        raise ImportError(
            f"micronorm uses {where}.{name}, which torch {torch.__version__} does not have; tested was torch 2.11"
        ) from None


# --- autograd, torch.func and compilers -------------------------------------------------------------------------------

functorch_transforms_active = _required(torch._C, "_are_functorch_transforms_active")
"""Return whether a transform of torch.func (grad, vmap, jvp, …) is active."""

is_legacy_batched = _required(torch._C._functorch, "is_legacy_batchedtensor")  # type: ignore[attr-defined]
"""Return whether a tensor is one of many that `torch.autograd.grad(is_grads_batched=True)` computes at once."""

graph_task_id = _required(torch._C, "_current_graph_task_id")
"""Return the id of the backward pass that runs in this thread, or -1 if none does."""


def _any_global_hook() -> bool:
    module: Any = torch.nn.modules.module
    return bool(
        module._global_forward_hooks
        or module._global_forward_pre_hooks
        or module._global_backward_hooks
        or module._global_backward_pre_hooks
    )


# torch 2.6 does not have the function.
has_global_hooks: Any = getattr(torch.nn.modules.module, "_has_any_global_hook", _any_global_hook)
"""Return whether hooks are registered for all modules, as by `register_module_forward_hook`."""

preserve_version = _required(torch.autograd, "_unsafe_preserve_version_counter")
"""Return a context that resets a tensor's version counter at its end."""

top_saved_tensors_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # type: ignore
"""Return the saved-tensor hooks in force; None in torch 2.6 and 2.7, which do not have the function."""

disable_dynamo: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)
"""Exclude a function from torch.compile without importing the compiler."""

_required(forward_ad, "_current_level")


def forward_ad_level() -> int:
    """Return the nesting level of forward-mode differentiation, or -1 outside of it."""
    return forward_ad._current_level


def fast_apply(function: type[torch.autograd.Function]) -> Any:
    """Return `function.apply` without its search for torch.func wrappers in every argument.

    Only for functions that are never called under a transform of torch.func.
    """
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def mark_constant(function: Any) -> Any:
    """Let torch.compile call `function` while it traces and keep the result as a constant.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler.
    """
    function._dynamo_marked_constant = True
    return function


# --- base classes and helpers without a public name -------------------------------------------------------------------

DropoutNd = _required(torch.nn.modules.dropout, "_DropoutNd")
BatchNormBase = _required(torch.nn.modules.batchnorm, "_BatchNorm")
InstanceNormBase = _required(torch.nn.modules.instancenorm, "_InstanceNorm")

# --- operations on lists of tensors -----------------------------------------------------------------------------------

foreach_add_ = _required(torch, "_foreach_add_")
foreach_copy_ = _required(torch, "_foreach_copy_")
foreach_div_ = _required(torch, "_foreach_div_")
foreach_mul_ = _required(torch, "_foreach_mul_")
foreach_norm = _required(torch, "_foreach_norm")
foreach_zero_ = _required(torch, "_foreach_zero_")


# --- launching kernels ------------------------------------------------------------------------------------------------


def _stream_of(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# The fallbacks also check that CUDA was initialized, which costs more than a microsecond per call.
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)
"""Return the address of the current CUDA stream of a device, given by its index."""

current_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Return the index of the current CUDA device."""


def launch_hook_check() -> Callable[[], bool]:
    """Return a function that returns whether a profiler has registered a hook on Triton's launches."""
    from triton import knobs

    settings = knobs.runtime

    def active() -> bool:
        hook: Any = settings.launch_enter_hook
        return hook is not None and bool(getattr(hook, "calls", True))

    return active


def compiled_launcher(compiled: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the function that starts a compiled kernel and its leading arguments; None if it must not be used.

    The function takes the grid (three numbers), the stream, the leading arguments returned here, then the kernel's own
    arguments with pointers as integers.
    """
    import triton
    from triton.compiler import CompiledKernel

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not isinstance(compiled, CompiledKernel) or version > LAST_TRITON:
        return None
    try:
        # No launch metadata and no enter and exit hooks: with hooks the public launch is used instead.
        head = (compiled.packed_metadata, None, None, None)
        launcher: Any = compiled.run
        if getattr(launcher, "global_scratch_size", 1) == 0 == getattr(launcher, "profile_scratch_size", 1):
            # The C function inside the launcher. The Python part around it only allocates scratch memory.
            modes = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
            return launcher.launch, (compiled.function, *modes, *head)
        return launcher, (compiled.function, *head)
    except AttributeError:
        return None
