"""`check_cuts`: does an optimizer step of a model depend on how its samples were cut, and which module is the cause?

The check runs private copies of any model. It contains no layers and no training loop.
"""

from micronorm.check.cuts import check_cuts
from micronorm.check.report import CutsReport, Difference, Finding

__all__ = ["CutsReport", "Difference", "Finding", "check_cuts"]
