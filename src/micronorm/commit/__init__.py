"""Commits: when an optimizer steps, move the estimates of the layers it holds by the sums in their windows.

This room has the optimizer hooks, the merging of windows across ranks, `mn.attach` with its handle, and snapshots of a
model. The windows themselves, and how a forward fills them, are in `micronorm.nn`.
"""

from micronorm.commit.handle import Handle, LayerReport, Report, attach

__all__ = ["Handle", "LayerReport", "Report", "attach"]
