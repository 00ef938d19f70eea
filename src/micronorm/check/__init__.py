"""`check_cuts`: does an optimizer step depend on how its samples were cut? `check_start`: does the loss jump at first?

The checks run private copies of any model. The room contains no layers and no training loop.
"""

from micronorm.check.cuts import check_cuts
from micronorm.check.report import CutsReport, Difference, Finding
from micronorm.check.start import check_start

__all__ = ["CutsReport", "Difference", "Finding", "check_cuts", "check_start"]
