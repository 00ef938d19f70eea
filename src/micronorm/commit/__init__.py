"""The commit: when an optimizer steps, the layers it holds move their estimates by what their windows gathered."""

from micronorm.commit.handle import Handle, LayerReport, Report, attach

__all__ = ["Handle", "LayerReport", "Report", "attach"]
