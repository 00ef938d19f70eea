"""Run directories in, one self-contained HTML page out."""

from micronorm.report.page import Cuts, Table, write_page

__all__ = ["Cuts", "Table", "write_page"]
