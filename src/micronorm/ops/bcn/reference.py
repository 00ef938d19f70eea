"""Batch-Channel Normalization as the paper writes it: slow, plain, and differentiated by autograd.

`onepass.py` and the kernels are tested against this file. Shapes: x is N×C×…, estimates hold C numbers each (or N×C),
weight and bias (γ^b, β^b) hold C, group_weight and group_bias (γ^c, β^c) hold G.
"""

import torch
from torch import Tensor

from micronorm.ops.moments import Moments, as_ncs, compute_dtype


def batch_channel_norm_reference(
    x: Tensor,
    estimates: Moments | None,
    weight: Tensor,
    bias: Tensor,
    group_weight: Tensor,
    group_bias: Tensor,
    *,
    groups: int,
    eps: float = 1e-5,
    blend: Tensor | float = 1.0,
) -> Tensor:
    """Return equations `bcnbn` and `bcngn`: normalize channels by given statistics, then normalize groups.

    `estimates=None` uses the batch's own moments, through which the gradient flows: CN(BN(x)).
    """
    x_ncs = as_ncs(x.to(compute_dtype(x.dtype)))
    if estimates is None:
        mean_c = x_ncs.mean((0, 2))
        var_c = (x_ncs - mean_c[:, None]).square().mean((0, 2))  # biased, as BN normalizes
    else:
        mean_c, var_c = (e.to(x_ncs.dtype) for e in estimates)
    dot_ncs = weight[:, None] * (x_ncs - mean_c.unsqueeze(-1)) / (var_c + eps).sqrt().unsqueeze(-1) + bias[:, None]

    dot_ngks = dot_ncs.unflatten(1, (groups, -1))
    mean_ng = dot_ngks.mean((2, 3), keepdim=True)
    var_ng = (dot_ngks - mean_ng).square().mean((2, 3), keepdim=True)
    y_ngks = (1 - blend) * dot_ngks + blend * (dot_ngks - mean_ng) / (var_ng + eps).sqrt()
    y_ngks = group_weight[:, None, None] * y_ngks + group_bias[:, None, None]
    return y_ngks.flatten(1, 2).reshape(x.shape).to(x.dtype)


def algorithm1(
    x: Tensor,
    estimates: Moments,
    rate: float,
    weight: Tensor,
    bias: Tensor,
    group_weight: Tensor,
    group_bias: Tensor,
    *,
    groups: int,
    micro_batch: int = 1,
    eps: float = 1e-5,
) -> tuple[Tensor, Moments]:
    """Run Algorithm 1 (`alg:1`) on each micro-batch of m samples in turn, in a plain loop.

    Returns:
        The outputs of all micro-batches, and the estimates after the last one.
    """
    mean_c, var_c = estimates
    outputs = []
    for part in x.split(micro_batch):
        part_ncs = as_ncs(part.detach())
        batch_mean_c = part_ncs.mean((0, 2))  # line 1
        batch_var_c = (part_ncs - mean_c[:, None]).square().mean((0, 2))  # line 2: around the *old* estimate
        mean_c = mean_c + rate * (batch_mean_c - mean_c)  # line 3
        var_c = var_c + rate * (batch_var_c - var_c)  # line 4
        outputs.append(  # lines 5 to 8
            batch_channel_norm_reference(
                part, Moments(mean_c, var_c), weight, bias, group_weight, group_bias, groups=groups, eps=eps
            )
        )
    return torch.cat(outputs), Moments(mean_c, var_c)
