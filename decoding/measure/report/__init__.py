"""Views of a report (see `decoding.measure.evaluate`): a table for the terminal, one for Markdown, and an HTML page."""

from decoding.measure.report.page import write_html as write_html
from decoding.measure.report.plot import crossover_figure as crossover_figure
from decoding.measure.report.plot import speedup_figure as speedup_figure
from decoding.measure.report.tables import COLUMNS as COLUMNS
from decoding.measure.report.tables import markdown_table as markdown_table
from decoding.measure.report.tables import table_rows as table_rows
from decoding.measure.report.terminal import terminal_table as terminal_table
from decoding.measure.report.words import caption as caption
