"""What a person gives the explorer, whatever it is: a config.json, a number of parameters, a recorded trace, a path.

Text alone decides. Nothing in it is executed, and no more of a file is read than such a file may hold.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from zeroviz.errors import SpecError, TraceError
from zeroviz.hf_config import config_from_text, read_config_notes
from zeroviz.models import ModelShape, bare
from zeroviz.quantity import parse_count
from zeroviz.trace import Origin, Trace

MAX_TRACE_NBYTES = 200 * 2**20
_COUNT = re.compile(r"[\d_.,]+(e\+?\d+)?\s*[kmbt]?", re.IGNORECASE)
_SCHEMA_WITHIN = 200
"""Letters. A trace begins with its schema; no config has such a field there."""
_SHOWN = 40


@dataclass(frozen=True)
class Taken:
    """The model that was given, or the trace of a step of one. notes: a sentence for what was filled in or left out."""

    model: ModelShape
    trace: Trace | None = None
    notes: tuple[str, ...] = ()


def take_in(text: str, name: str = "") -> Taken:
    """What `text` is. name: what the file was called that it was read from, if it was.

    Raises SpecError or TraceError with one sentence: what was given, what is wrong with it, what to do.
    """
    stripped = text.strip()
    if not stripped:
        raise SpecError(
            "Nothing was given; give a config.json, a number of parameters such as 7.5B, or a trace's file."
        )
    if stripped[0] in "{[":
        if '"schema"' in stripped[:_SCHEMA_WITHIN]:
            return _trace(Trace.from_json(stripped))
        found = config_from_text(stripped, Path(name).stem or "pasted")
        return Taken(found.model, notes=found.notes)
    if _COUNT.fullmatch(stripped):
        return Taken(bare(parse_count(stripped.replace(" ", ""), "The number of parameters")))
    if "\n" not in stripped and ("/" in stripped or stripped.endswith(".json")):
        return _file(Path(stripped).expanduser())
    shown = stripped if len(stripped) <= _SHOWN else f"{stripped[:_SHOWN]}…"
    raise SpecError(
        f"{shown!r} is no config.json, no number of parameters such as 7.5B, and no path of a .json file; give one of "
        "these."
    )


def read_trace(path: Path) -> Trace:
    """A trace that `--trace` wrote, checked. TraceError with one sentence for anything else."""
    try:
        if path.stat().st_size > MAX_TRACE_NBYTES:
            raise TraceError(f"{path} is larger than {MAX_TRACE_NBYTES:,} bytes, which no trace is.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path} is no text, so it is no trace; give a file that --trace has written.") from None
    try:
        trace = Trace.from_json(text)
        trace.check()
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    return trace


def _file(path: Path) -> Taken:
    """A trace by how it begins; else it is read as a config.json, which says what is wrong with it."""
    try:
        status = path.stat()
        is_file = stat.S_ISREG(status.st_mode)
        begins = ""
        if is_file:
            with path.open("rb") as file:
                begins = file.read(_SCHEMA_WITHIN).decode("utf-8", "replace")
    except (OSError, ValueError):
        is_file, begins = False, ""
    if is_file and '"schema"' in begins:
        return _trace(read_trace(path))
    found = read_config_notes(path)
    return Taken(found.model, notes=found.notes)


def _trace(trace: Trace) -> Taken:
    """A measured trace becomes a recorded one. A predicted one has nothing to show beside the prediction."""
    if trace.origin is Origin.PREDICTED:
        note = "The file's trace is a prediction, and not a measurement; its state is shown."
        return Taken(trace.spec.model, trace, (note,))
    trace.check()
    origin = Origin.RECORDED if trace.origin is Origin.LIVE else trace.origin
    return Taken(trace.spec.model, replace(trace, origin=origin))
