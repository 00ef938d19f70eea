"""Conversion of a model to BCN + WS: the plan with a reason for every layer, its application, the data flow it reads,
fused forwards of known blocks, calibration, and checkpoints of other libraries.

The layers that conversion builds live in `micronorm.nn`; folding a converted model for inference in `micronorm.export`.
"""

from micronorm.convert.calibrate import calibrate
from micronorm.convert.decide import convert, plan
from micronorm.convert.foreign import ForeignReport, load_foreign
from micronorm.convert.fusion import register_block
from micronorm.convert.plan import Decision, Plan
from micronorm.convert.pooling import pool_by_kernel
from micronorm.nn.norm_act import norm_act

__all__ = [
    "Decision",
    "ForeignReport",
    "Plan",
    "calibrate",
    "convert",
    "load_foreign",
    "norm_act",
    "plan",
    "pool_by_kernel",
    "register_block",
]
