"""Switchable normalization (Luo et al. 2019): instance, layer and batch moments, mixed by learned weights.

Shapes: x is N×C×…; _nc per sample and channel, _n1 per sample, _tc per micro-batch and channel.
"""

from torch import Tensor

from micronorm.ops.batch import Running, absorb, batch_moments, normalize
from micronorm.ops.moments import Moments, moments, pool


def mix(instance_nc: Moments, batch: Moments, mean_weight: Tensor, var_weight: Tensor) -> Moments:
    """Return Σ_k softmax(mean_weight)_k μ_k and Σ_k softmax(var_weight)_k σ²_k over k in (instance, layer, batch): N×C.

    `batch` is N×C or C. The layer moments are those of the union of a sample's channels.
    """
    layer_n1 = Moments(*(p.unsqueeze(-1) for p in pool(instance_nc, dim=1)))
    wide = instance_nc.mean.dtype
    p_mean, p_var = mean_weight.to(wide).softmax(0), var_weight.to(wide).softmax(0)
    mean_nc = p_mean[0] * instance_nc.mean + p_mean[1] * layer_n1.mean + p_mean[2] * batch.mean.to(wide)
    var_nc = p_var[0] * instance_nc.var + p_var[1] * layer_n1.var + p_var[2] * batch.var.to(wide)
    return Moments(mean_nc, var_nc)


def switchable_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean_weight: Tensor,
    var_weight: Tensor,
    running: Running,
    *,
    training: bool = True,
    micro_batch: int | None = None,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
) -> tuple[Tensor, Running]:
    """Normalize: y = weight·(x − μ)/sqrt(σ² + eps) + bias, with the μ and σ² of `mix`.

    In training the batch part of μ and σ² is that of micro-batches of m samples. The running statistics average it with
    the biased variance, as the authors' code does. Otherwise, and for an empty batch, the batch part is the running
    statistics, which stay as they are.
    """
    instance_nc = moments(x)
    if training and x.shape[0]:
        batch_tc, batch = batch_moments(instance_nc, micro_batch=micro_batch)
        after = absorb(running, batch_tc, momentum=momentum)
    else:
        batch, after = Moments(running.mean, running.var), running
    return normalize(x, mix(instance_nc, batch, mean_weight, var_weight), weight, bias, eps=eps), after
