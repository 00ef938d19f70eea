"""Models for the tests of `export`: with statistics and affines that a mistake would show in."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import micronorm as mn
from tests.tolerances import assert_close_to_max, tolerance


def randomized(model: Any, seed: int = 0) -> Any:
    """The model with estimates, affines and lengths that are nothing special; in place."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)

    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.copy_(noise(module.running_mean))
                module.running_var.copy_(0.5 + noise(module.running_var).abs())
                for parameter in module.parameters(recurse=False):
                    parameter.add_(0.3 * noise(parameter))
            if hasattr(module, "length"):
                module.length.mul_(1 + 0.3 * noise(module.length).abs())
    return model


def trained(model: Any, *inputs: Tensor) -> Any:
    """The model after one step of training, with which the estimates have moved; in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    estimates = [module.running_mean for module in model.modules() if isinstance(module, mn.nn.BatchChannelNorm)]
    before = [mean.clone() for mean in estimates]
    model.train()
    first_tensor(model(*inputs)).square().mean().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    optimizer.step()
    assert not any(map(torch.equal, estimates, before))
    return model


def first_tensor(output: Any) -> Tensor:
    """The output, or the first tensor in it."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return next(leaf for leaf in leaves if isinstance(leaf, Tensor))


def assert_folds(model: nn.Module, *inputs: Tensor, example_inputs: Any = None) -> Any:
    """Folding does not change the function, in float32 and in float64; the folded float32 model."""
    results = []
    for dtype in (torch.float64, torch.float32):
        whole = copy.deepcopy(model).to(dtype)
        arguments = [x.to(dtype) for x in inputs]
        example = None if example_inputs is None else tuple(arguments)
        folded = mn.fold(whole, example_inputs=example)
        with torch.no_grad():
            expected, actual = whole.eval()(*arguments), folded(*arguments)
        leaves = zip(*map(torch.utils._pytree.tree_leaves, (actual, expected)), strict=True)
        for a, e in leaves:
            assert_close_to_max(a, e, tol=tolerance("folded", dtype))
        results.append(folded)
    assert_only_foreign(results[-1])
    return results[-1]


def assert_only_foreign(model: nn.Module) -> None:
    """Every layer is torch's, timm's or torchvision's; containers may be anybody's but ours."""
    for name, module in model.named_modules():
        bases = {base.__module__.split(".")[0] for base in type(module).__mro__}
        assert "micronorm" not in bases, (name, type(module))
        if not list(module.children()):
            assert type(module).__module__.split(".")[0] in ("torch", "timm", "torchvision"), (name, type(module))


def kinds(model: nn.Module, *names: str) -> list[int]:
    """How many modules of each type the model has."""
    return [sum(type(module).__name__ == name for module in model.modules()) for name in names]
