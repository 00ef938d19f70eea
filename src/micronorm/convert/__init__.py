"""Conversion of a model: a plan with a reason for every layer, its application, and the statistics afterwards."""

from micronorm.convert.calibrate import calibrate
from micronorm.convert.decide import convert, plan
from micronorm.convert.foreign import ForeignReport, load_foreign
from micronorm.convert.plan import Decision, Plan

__all__ = ["Decision", "ForeignReport", "Plan", "calibrate", "convert", "load_foreign", "plan"]
