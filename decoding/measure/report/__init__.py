"""Views of a report (see `decoding.measure.evaluate`): a table for the terminal, one for Markdown, and an HTML page."""

from decoding.measure.report.plot import COLUMNS as COLUMNS
from decoding.measure.report.plot import caption as caption
from decoding.measure.report.plot import markdown_table as markdown_table
from decoding.measure.report.plot import speedup_figure as speedup_figure
from decoding.measure.report.plot import table_rows as table_rows
from decoding.measure.report.plot import terminal_table as terminal_table
from decoding.measure.report.plot import write_html as write_html
