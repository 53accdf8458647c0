"""What is taken away from a trace: its ledger as CSV or Markdown, its step for a trace viewer, itself, and the Python
that makes it again.
"""

from __future__ import annotations

from enum import Enum

from zeroviz.errors import SpecError
from zeroviz.export_chrome import chrome_trace
from zeroviz.export_ledger import ledger_csv
from zeroviz.export_markdown import ledger_markdown
from zeroviz.export_python import as_python
from zeroviz.trace import Trace

__all__ = ["Format", "as_python", "chrome_trace", "export", "ledger_csv", "ledger_markdown"]


class Format(Enum):
    """What a trace is written as."""

    CSV = "csv"
    """The ledger, a line for each category at each moment and each collective. Of one trace, or of two of one spec."""
    MARKDOWN = "markdown"
    """The ledger as tables for a page. Of one trace, or of two of one spec."""
    CHROME = "chrome"
    """The step for chrome://tracing and ui.perfetto.dev."""
    JSON = "json"
    """The whole trace, as `--trace` writes it; every command that takes files reads it."""
    PYTHON = "python"
    """The spec as a script that predicts it."""

    @property
    def compares(self) -> bool:
        """Whether a measured trace stands beside the prediction, instead of alone."""
        return self in (Format.CSV, Format.MARKDOWN)


def export(form: Format, trace: Trace, measured: Trace | None = None) -> str:
    """`trace` as text, which ends with a line's end.

    Raises SpecError for two traces where the format is of one, TraceError for two that are not of one spec.
    """
    if measured is not None and not form.compares:
        both = " and ".join(each.value for each in Format if each.compares)
        raise SpecError(f"Two traces were given, but {form.value} is of one; give one of them, or use {both}.")
    if form is Format.CSV:
        return ledger_csv(trace, measured)
    if form is Format.MARKDOWN:
        return ledger_markdown(trace, measured)
    if form is Format.CHROME:
        return chrome_trace(trace) + "\n"
    return as_python(trace.spec) if form is Format.PYTHON else trace.to_json() + "\n"
