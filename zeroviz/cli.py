"""The `zeroviz` command: what is typed becomes a RunSpec, what comes back becomes a table, JSON, a picture or a file.

Exit codes: 0 for success; 1 for a run that failed or a published figure that does not hold; 2 for a request that is
wrong; 130 for Ctrl-C. Every error meant for a person is one sentence on stderr.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from textwrap import wrap
from typing import NoReturn

from zeroviz.cli_bench import add_bench_options, answer_bench
from zeroviz.cli_budget import add_budget_options
from zeroviz.cli_compare import add_compare_options, answer_compare
from zeroviz.cli_explore import answer_explore
from zeroviz.cli_export import add_export_options, answer_export
from zeroviz.cli_files import check_outputs, save_outputs
from zeroviz.cli_spec import add_spec_options, spec_from_args
from zeroviz.columns import WIDTH
from zeroviz.errors import RunError, SpecError, ZerovizError
from zeroviz.models import Family
from zeroviz.spec import RunSpec

EXIT_FAILED = 1
EXIT_WRONG = 2
EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose refusals are SpecErrors with the allowed words in them."""

    def error(self, message: str) -> NoReturn:
        raise SpecError(f"{message[:1].upper()}{message[1:]}; see `{self.prog} --help`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        with _terminated_as_interrupted():
            code = _dispatch(sys.argv[1:] if argv is None else list(argv))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except ZerovizError as error:
        print(f"zeroviz: {error}", file=sys.stderr)
        return EXIT_FAILED if isinstance(error, RunError) else EXIT_WRONG
    except KeyboardInterrupt:
        print("zeroviz: interrupted; nothing was left running.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader, `| head`, has what it wanted
            return 0
        print(f"zeroviz: the output could not be written ({error.strerror}).", file=sys.stderr)
        return EXIT_FAILED


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Inside, SIGTERM is a KeyboardInterrupt, as SIGINT is. Only the main thread may set signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is interrupt:  # and not ignored, on the way out
            signal.signal(signal.SIGTERM, before)


def _dispatch(argv: list[str]) -> int:
    parser, commands = _build_parser()
    args, unknown = parser.parse_known_args(argv)
    if args.version and args.command is None:
        print(f"zeroviz {version('zeroviz')}")
        return 0
    if args.command is None:
        raise SpecError(f"No command was given; allowed are {', '.join(commands)}. Try `zeroviz predict --ranks 4`.")
    if args.command == "explore":
        return answer_explore(unknown, as_app=args.app)
    if unknown:
        known = re.findall(r"--[\w-]+", commands[args.command].format_usage())
        raise SpecError(
            f"{' '.join(unknown)!r} is not known to `zeroviz {args.command}`; allowed are {', '.join(known)}."
        )
    run: Callable[[argparse.Namespace], int] = args.function
    code = run(args)
    for note in getattr(args, "notes", ()):  # after the answer: a refusal stays one sentence
        print("\n".join(wrap(f"Note: {note}", WIDTH)), file=sys.stderr)
    return code


def _build_parser() -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(
        prog="zeroviz",
        description="DDP and ZeRO, stage by stage: what each rank holds, when it peaks, and what crosses the wire.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="say which version this is")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    def command(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(function=function)
        return sub

    predict = command("predict", _predict, "work a training step out by arithmetic; starts nothing")
    run = command("run", _run, "run the step for real and show measured beside predicted")
    rehearse = command("rehearse", _rehearse, "run the real step on tensors without memory: any model, any N")
    validate = command("validate", _validate, "work out every published figure again; exit code 1 if one does not hold")
    budget = command("budget", _budget, "what fits a GPU: the smallest N, the largest batch, the longest sequence")
    compare = command("compare", answer_compare, "two to five side by side: implementations, strategies, or files")
    bench = command("bench", answer_bench, "our own step beside other implementations', in turn, as ratios")
    doctor = command("doctor", _doctor, "check devices, collectives and leftovers on this machine")
    explore = command("explore", lambda args: 0, "open the explorer in JupyterLab; further words go to the server")
    explore.add_argument("--app", action="store_true", help="as a page of its own, through Voila, without a notebook")
    export = command("export", answer_export, "a prediction or a trace file as CSV, Markdown, Chrome trace or Python")
    for sub in (predict, run, rehearse):
        add_spec_options(sub)
        sub.add_argument("--figure", metavar="FILE", help="write the picture as .svg, .png or .pdf")
        sub.add_argument("--timeline", metavar="FILE", help="write the step of rank 0 as stacked areas, the same kinds")
        sub.add_argument("--trace", metavar="FILE", help="write the whole trace, events included, as JSON")
    add_spec_options(compare)
    add_compare_options(compare)
    add_spec_options(export)
    add_export_options(export)
    run.add_argument("--save", metavar="DIR", help="save the run's state to a new directory after its last step")
    run.add_argument("--load", metavar="DIR", help="go on from a saved run, of any strategy, units and number of ranks")
    add_spec_options(bench)
    add_bench_options(bench)
    add_spec_options(budget)
    add_budget_options(budget)
    validate.add_argument("--only", metavar="GROUP", help="one group of rows, such as zero_paper_table1")
    for sub in (predict, run, rehearse, validate, budget, compare, bench, doctor):
        sub.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    return parser, dict(commands.choices)


def _predict(args: argparse.Namespace) -> int:
    from zeroviz.predict import predict
    from zeroviz.tables import render

    spec = spec_from_args(args)
    check_outputs(args.figure, args.trace, args.model, args.timeline)
    trace = predict(spec)
    save_outputs(args.figure, args.trace, trace, None, args.timeline)
    print(json.dumps(trace.report(), indent=1) if args.json else render(trace).rstrip())
    return 0


def _run(args: argparse.Namespace) -> int:
    from zeroviz.cli_run import run_live
    from zeroviz.predict import predict
    from zeroviz.tables_live import render_live

    spec = _spec_with_layers(args)
    check_outputs(args.figure, args.trace, args.model, args.timeline)
    predicted = predict(spec)
    measured = run_live(spec, save_to=args.save or "", resume_from=args.load or "")
    save_outputs(args.figure, args.trace, predicted, measured, args.timeline)
    print(json.dumps(measured.report(), indent=1) if args.json else render_live(predicted, measured).rstrip())
    return 0


def _rehearse(args: argparse.Namespace) -> int:
    from zeroviz.cli_run import rehearse_spec
    from zeroviz.predict import predict
    from zeroviz.tables_rehearsed import render_rehearsed

    spec = _spec_with_layers(args)
    check_outputs(args.figure, args.trace, args.model, args.timeline)
    rehearsed = rehearse_spec(spec)
    predicted = predict(spec)
    save_outputs(args.figure, args.trace, predicted, rehearsed, args.timeline)
    print(json.dumps(rehearsed.report(), indent=1) if args.json else render_rehearsed(rehearsed, predicted).rstrip())
    return 0


def _spec_with_layers(args: argparse.Namespace) -> RunSpec:
    spec = spec_from_args(args)
    if spec.model.family is Family.BARE:
        raise SpecError(
            f"--params {args.params} is a bare count, and a count has no layers to run; "
            "use `zeroviz predict`, or name a model, for example --model tiny."
        )
    return spec


def _validate(args: argparse.Namespace) -> int:
    from zeroviz.tables_validate import render_validation
    from zeroviz.validate import mismatches, report, validate

    groups = validate(args.only)
    print(json.dumps(report(groups), indent=1) if args.json else render_validation(groups).rstrip())
    return EXIT_FAILED if mismatches(groups) else 0


def _budget(args: argparse.Namespace) -> int:
    from zeroviz.cli_budget import answer_budget

    return answer_budget(args)


def _doctor(args: argparse.Namespace) -> int:
    from zeroviz.cli_run import examine

    return examine(as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
