"""Turn run directories into one self-contained HTML page; `plots` holds how every picture of the library is drawn.

Nothing here trains, measures or reads anything but run directories.
"""

from micronorm.report.page import Lead, write_page, write_plots

__all__ = ["Lead", "write_page", "write_plots"]
