"""`zeroviz compare`: traces from files, or implementations and strategies by arithmetic, side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroviz.cli_files import check_outputs
from zeroviz.cli_spec import spec_from_args, spec_options
from zeroviz.errors import SpecError
from zeroviz.intake import read_trace
from zeroviz.predict import predict
from zeroviz.settings import SETTINGS
from zeroviz.side_by_side import MAX_TRACES, MIN_TRACES, names_of
from zeroviz.spec import Implementation, RunSpec, Strategy, parse_enum
from zeroviz.trace import Origin, Trace

_LISTS = ("impls", "strategies")


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    """Add what is asked beside the training step. Values stay text, as in `add_spec_options`."""
    parser.add_argument("files", metavar="FILE", nargs="*", help="traces that --trace has written, two to five")
    group = parser.add_argument_group("the comparison, where no files are given")
    group.add_argument("--impls", metavar="I,I", help="implementations of one strategy, such as own,fsdp1,fsdp2")
    group.add_argument("--strategies", metavar="S,S", help="strategies of one implementation, such as ddp,zero1,zero3")
    group.add_argument("--run", action="store_true", help="run each for real as well, one after the other")
    parser.add_argument("--figure", metavar="FILE", help="write the picture as .svg, .png or .pdf")


def answer_compare(args: argparse.Namespace) -> int:
    """Print the comparison."""
    check_outputs(args.figure, None, args.model)
    if args.files:
        given = next((name for name in (*_LISTS, "run", *spec_options()) if getattr(args, name)), "")
        if given:
            flag = "--" + given.replace("_", "-")
            raise SpecError(f"Files and {flag} were given; files say themselves what they are of, so leave {flag} out.")
        traces = [read_trace(Path(name)) for name in args.files]
        pair = _pair(traces)
        if pair is not None:
            return _print_pair(args, *pair)
        return _print_all(args, *_with_runs(traces))
    specs = _specs(args)
    names_of(specs)
    predicted = [predict(spec) for spec in specs]
    runs: dict[RunSpec, Trace] = {}
    if args.run:
        from zeroviz.cli_run import run_live

        runs = {spec: run_live(spec) for spec in specs}
    return _print_all(args, predicted, runs)


def _specs(args: argparse.Namespace) -> list[RunSpec]:
    """One spec for each name in --impls, or in --strategies."""
    if args.impls is None and args.strategies is None:
        raise SpecError("Nothing to compare: give two to five files, or --impls own,fsdp2, or --strategies ddp,zero3.")
    if args.impls is not None and args.strategies is not None:
        raise SpecError(
            f"--impls is {args.impls!r} and --strategies is {args.strategies!r}; give one of the two lists, and of the "
            "other kind a single name, with --impl or --strategy."
        )
    words, kind, option = (
        (args.impls, Implementation, "impl") if args.impls is not None else (args.strategies, Strategy, "strategy")
    )
    if getattr(args, option) is not None:
        raise SpecError(f"--{option} and the list of them were given; the list says all, so leave --{option} out.")
    names = [word.strip() for word in words.split(",") if word.strip()]
    if not MIN_TRACES <= len(names) <= MAX_TRACES:
        raise SpecError(f"{words!r} names {len(names)}; a comparison takes {MIN_TRACES} to {MAX_TRACES}.")
    for name in names:
        parse_enum(kind, name, f"--{option}")
    return [spec_from_args(argparse.Namespace(**_options_of(args, option, name, names))) for name in names]


def _options_of(args: argparse.Namespace, option: str, name: str, names: Sequence[str]) -> dict[str, Any]:
    """The options of one of the names. Shard groups are only some strategies', and a setting only some
    implementations': the others are asked without it, as long as one of the names takes it."""
    options = {**vars(args), option: name}
    if option == "strategy" and any(Strategy(each).replicates for each in names) and not Strategy(name).replicates:
        options["shard_ranks"] = None
    if option == "impl":
        for setting, of in SETTINGS.items():
            if Implementation(name) not in of.library and any(Implementation(each) in of.library for each in names):
                options[setting] = None
    return options


def _pair(traces: Sequence[Trace]) -> tuple[Trace, Trace] | None:
    """Two traces of one spec: what was expected, and what was found."""
    if len(traces) != 2 or traces[0].spec != traces[1].spec:
        return None
    order = (Origin.PREDICTED, Origin.REHEARSED, Origin.RECORDED, Origin.LIVE)
    first, second = sorted(traces, key=lambda trace: order.index(trace.origin))
    return first, second


def _with_runs(traces: Sequence[Trace]) -> tuple[list[Trace], dict[RunSpec, Trace]]:
    """One trace for each spec; a measured one beside the prediction of the same spec is its run."""
    first = {trace.spec: trace for trace in reversed(traces)}
    runs = {trace.spec: trace for trace in traces if first[trace.spec] is not trace}
    return list(reversed(first.values())), runs


def _print_pair(args: argparse.Namespace, expected: Trace, found: Trace) -> int:
    from zeroviz.tables_live import render_live

    if args.figure is not None:
        from zeroviz.draw import save_figure
        from zeroviz.scene import build_scene

        save_figure(build_scene(expected, found), Path(args.figure))
    print(json.dumps(found.report(), indent=1) if args.json else render_live(expected, found).rstrip())
    return 0


def _print_all(args: argparse.Namespace, traces: Sequence[Trace], runs: dict[RunSpec, Trace]) -> int:
    from zeroviz.tables_side_by_side import render_side_by_side, side_by_side_report

    if args.figure is not None:
        from zeroviz.draw import save_figure
        from zeroviz.side_by_side import side_by_side

        save_figure(side_by_side(traces, runs), Path(args.figure))
    shown = json.dumps(side_by_side_report(traces, runs), indent=1) if args.json else render_side_by_side(traces, runs)
    print(shown.rstrip())
    return 0
