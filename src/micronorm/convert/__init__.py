"""Convert a model to BCN + WS: the plan, its application, data flow, fused blocks, calibration, foreign checkpoints.

The layers that conversion builds are in `micronorm.nn`; folding a converted model for inference in `micronorm.export`.
"""

from micronorm.convert.calibrate import calibrate, calibration_callback
from micronorm.convert.foreign import ForeignReport, load_foreign
from micronorm.convert.fusion import pool_by_kernel, register_block
from micronorm.convert.plan import Plan, convert, plan
from micronorm.convert.planner import Decision
from micronorm.nn.norm_act import norm_act

__all__ = [
    "Decision",
    "ForeignReport",
    "Plan",
    "calibrate",
    "calibration_callback",
    "convert",
    "load_foreign",
    "norm_act",
    "plan",
    "pool_by_kernel",
    "register_block",
]
