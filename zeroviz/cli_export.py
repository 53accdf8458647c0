"""`zeroviz export`: a prediction, or a trace from a file, written as something to take away."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from zeroviz.cli_files import check_writable
from zeroviz.cli_spec import spec_from_args, spec_options
from zeroviz.errors import SpecError
from zeroviz.export import Format, export
from zeroviz.intake import read_trace
from zeroviz.predict import predict
from zeroviz.spec import parse_enum
from zeroviz.trace import Origin, Trace

MAX_FILES = 2
_EXPECTED_FIRST = (Origin.PREDICTED, Origin.REHEARSED, Origin.RECORDED, Origin.LIVE)


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Add what is asked beside the training step. Values stay text, as in `add_spec_options`."""
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="a trace that --trace has written, instead of a training step; of two, one stands beside the other",
    )
    group = parser.add_argument_group("what is written")
    group.add_argument("--format", metavar="F", help=", ".join(form.value for form in Format))
    group.add_argument("--out", metavar="FILE", help="where to (default: print it)")


def answer_export(args: argparse.Namespace) -> int:
    """Write or print what was asked for."""
    if args.format is None:
        raise SpecError(f"No --format was given; allowed are {', '.join(form.value for form in Format)}.")
    form = parse_enum(Format, args.format, "--format")
    if args.files:
        _check_alone(args)
    spec = None if args.files else spec_from_args(args)
    if args.out is not None:
        _check_out(args.out, args.files, args.model)
    text = export(form, *_traces(form, args.files)) if spec is None else export(form, predict(spec))
    if args.out is None:
        print(text, end="")
        return 0
    try:
        Path(args.out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"--out is {args.out!r}, which cannot be written ({error.strerror}).") from None
    return 0


def _check_alone(args: argparse.Namespace) -> None:
    """Files say themselves what they are of."""
    given = next((name for name in spec_options() if getattr(args, name) is not None), None)
    if given is not None:
        flag = "--" + given.replace("_", "-")
        raise SpecError(f"A file and {flag} were given; a file says itself what it is of, so leave {flag} out.")
    if len(args.files) > MAX_FILES:
        raise SpecError(f"{len(args.files)} files were given; give one trace, or two of one training step.")


def _check_out(name: str, files: Sequence[str], model: str | None) -> None:
    """Refused before anything is worked out: what cannot be written, and what would be written over what is read."""
    for what, other in (*(("FILE", file) for file in files), ("--model", model)):
        if other is not None and Path(other).resolve() == Path(name).resolve():
            raise SpecError(f"{what} and --out are both {name!r}; give each a file of its own.")
    check_writable(name, "--out")


def _traces(form: Format, files: Sequence[str]) -> Sequence[Trace]:
    """One trace, or two: what was expected and what was found. A measured one alone has its prediction beside it, where
    the format has room for two."""
    traces = [read_trace(Path(name)) for name in files]
    if len(traces) == MAX_FILES:
        return sorted(traces, key=lambda trace: _EXPECTED_FIRST.index(trace.origin))
    (trace,) = traces
    if trace.origin is Origin.PREDICTED or not form.compares:
        return traces
    return predict(trace.spec), trace
