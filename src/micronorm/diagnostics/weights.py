"""The measure of elimination singularities by weights: does a layer use all of its input channels?

The paper finds it unfit for networks as they are trained: in a well-trained ResNet-50 the mean over layers is 0.55, so
no input is close to being left out, and channels are eliminated by ReLU instead.
"""

import torch
from torch import Tensor, nn

from micronorm.nn.reparameterized import Reparameterized
from micronorm.ops.moments import wide_dtype

PAPER_RESNET50 = 0.55
"""The mean over layers that the paper gives for a ResNet-50 trained on ImageNet."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def input_use(weight: Tensor, groups: int = 1) -> float:
    """min |ω_c|₁ / mean |ω_c|₁ over the input channels c of a layer, ω_c being the weights that take c as input.

    0 where some input channel is not used at all (an elimination singularity as defined by weights), 1 where all are
    used alike. A weight of zeros gives 0. A layer with one input channel gives 1.

    Args:
        weight: O×(I/groups)×…, as torch's convolutions and linear layers have it.
        groups: of the convolution; each input channel meets the outputs of its own group only.

    Example:
        >>> input_use(torch.tensor([[1.0, -3.0], [1.0, 3.0]]))  # columns of 2 and 6
        0.5
    """
    if weight.ndim < 2:
        raise ValueError(f"a weight is O×I×…, got shape {tuple(weight.shape)}")
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise TypeError(f"groups must be an int, got {groups!r}")
    if groups < 1 or weight.shape[0] % groups:
        raise ValueError(f"groups must divide the {weight.shape[0]} output channels, got {groups}")
    if weight.numel() == 0:
        raise ValueError(f"a weight without elements uses nothing, got shape {tuple(weight.shape)}")
    wide = weight.detach().to(wide_dtype(weight.device)).abs()
    # groups × outputs of a group × inputs of a group × taps
    use = wide.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1).sum((1, 3)).flatten()
    mean = use.mean()
    return float(use.min() / mean) if mean > 0 else 0.0


@torch.no_grad()
def input_uses(model: nn.Module) -> dict[str, float]:
    """`input_use` of every convolution and linear layer, by name, of the weights the layers compute with.

    For layers with reparameterized weights (Weight Standardization and its like) those are the standardized ones. Lazy
    layers that have not seen an input are left out. The paper's figure is the mean over layers.

    Example:
        >>> from statistics import mean
        >>> uses = input_uses(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)))
        >>> list(uses), uses["0"], 0 < mean(uses.values()) <= 1
        (['0', '2'], 1.0, True)
    """
    return {name: use for name, module in model.named_modules() if (use := _use_of(module)) is not None}


def _use_of(module: nn.Module) -> float | None:
    if not isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear)):
        return None
    weight = module.effective_weight() if isinstance(module, Reparameterized) else module.weight
    if not isinstance(weight, Tensor) or torch.nn.parameter.is_lazy(weight):
        return None
    if isinstance(module, _TRANSPOSED):  # (groups·I)×(O/groups)×…: every row is one input channel already
        return input_use(weight.transpose(0, 1))
    return input_use(weight, 1 if isinstance(module, nn.Linear) else module.groups)
