"""Turn run directories into one self-contained HTML page. `plots` sets the style of all pictures of the library.

This room reads run directories only. It trains and measures nothing.
"""

from micronorm.report.page import Lead, write_page, write_plots

__all__ = ["Lead", "write_page", "write_plots"]
