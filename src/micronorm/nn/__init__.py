"""Layers and their specs: modules that own parameters, buffers and windows.

The mathematics is in `micronorm.ops`, the commit of windows in `micronorm.commit`. `nn.per_step` has what concerns a
whole optimizer step.
"""

from micronorm.nn.batch import BN, GhostBatchNorm
from micronorm.nn.batch_renorm import BRN, BatchRenorm
from micronorm.nn.bcn import BCN, BatchChannelNorm
from micronorm.nn.frn_evonorm import FRN, EvoNorm, EvoNormS0, FilterResponseNorm
from micronorm.nn.group import GN, IN, LN, GroupNorm
from micronorm.nn.norm_act import BatchChannelNormAct, ChannelsLast, NormAct, norm_act_layer
from micronorm.nn.spec import SPECS, NormSpec, WeightSpec, register
from micronorm.nn.switchable import SN, SwitchableNorm
from micronorm.nn.weight import (
    CWN,
    WN,
    WS,
    WSConv1d,
    WSConv2d,
    WSConv2dSame,
    WSConv3d,
    WSConvTranspose1d,
    WSConvTranspose2d,
    WSConvTranspose3d,
    WSLinear,
)

for spec in (BN, GN, LN, IN, BCN, SN, BRN, FRN, EvoNormS0, WS, WN, CWN):
    register(spec)
del spec

__all__ = [
    "SPECS",
    "BatchChannelNorm",
    "BatchChannelNormAct",
    "BatchRenorm",
    "ChannelsLast",
    "EvoNorm",
    "FilterResponseNorm",
    "GhostBatchNorm",
    "GroupNorm",
    "NormAct",
    "NormSpec",
    "SwitchableNorm",
    "WSConv1d",
    "WSConv2d",
    "WSConv2dSame",
    "WSConv3d",
    "WSConvTranspose1d",
    "WSConvTranspose2d",
    "WSConvTranspose3d",
    "WSLinear",
    "WeightSpec",
    "norm_act_layer",
    "register",
]
