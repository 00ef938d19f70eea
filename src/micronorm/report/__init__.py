"""Run directories in, one self-contained HTML page out, and its plots as files."""

from micronorm.report.files import write_plots
from micronorm.report.page import write_page
from micronorm.report.sections.extras import Cuts, Lead
from micronorm.report.text import Table

__all__ = ["Cuts", "Lead", "Table", "write_page", "write_plots"]
