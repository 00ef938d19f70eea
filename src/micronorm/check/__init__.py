"""The law on the user's own model: does a step depend on how its samples were cut, and what makes it so."""

from micronorm.check.cuts import check_cuts
from micronorm.check.report import CutsReport, Difference, Finding

__all__ = ["CutsReport", "Difference", "Finding", "check_cuts"]
