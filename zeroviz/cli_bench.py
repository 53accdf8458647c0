"""`zeroviz bench`: our own step beside other implementations', in turn on the same processes, as ratios."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from zeroviz.bench import pairs_of, report
from zeroviz.cli_files import check_writable
from zeroviz.cli_spec import spec_from_args
from zeroviz.errors import SpecError
from zeroviz.implementations import PAIRS
from zeroviz.models import Family
from zeroviz.settings import LIBRARY_DEFAULTS, SETTINGS, Settings
from zeroviz.spec import Implementation, RunSpec, Strategy, parse_enum

DEFAULT_MODEL = "small"
DEFAULT_SEQ = "128"
DEFAULT_ROUNDS = 15
MAX_ROUNDS = 10_000


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add what is asked beside the training step. Values stay text, as in `add_spec_options`."""
    group = parser.add_argument_group("the bench")
    group.add_argument("--rounds", metavar="K", help=f"steps of each, in turn, at least 2 (default {DEFAULT_ROUNDS})")
    group.add_argument("--out", metavar="FILE", help="write the report as JSON, and the table beside it as .md")
    parser.epilog = (
        f"Here --model is {DEFAULT_MODEL} and --seq {DEFAULT_SEQ} unless given. --impl and --strategy choose pairs; "
        "without them every implementation is set beside our own under every strategy it has."
    )


def answer_bench(args: argparse.Namespace) -> int:
    """Run the pairs and print the table or the report; 1 if a pair failed."""
    from zeroviz.cli_run import run_bench
    from zeroviz.tables_bench import render_bench

    base, impl, strategy, settings = _asked(args)
    num_rounds = _rounds(args.rounds)
    _check_out(args.out)
    wanted = pairs_of(base, impl, strategy, settings)
    pairs, environment = run_bench(wanted, num_rounds)
    table = render_bench(base, num_rounds, pairs, environment).rstrip()
    plain = json.dumps(report(base, num_rounds, pairs, environment), indent=1)
    if args.out is not None:
        _write(args.out, plain, table)
    print(plain if args.json else table)
    return int(any(pair.failed for pair in pairs))


def _asked(args: argparse.Namespace) -> tuple[RunSpec, Implementation | None, Strategy | None, Settings]:
    """The step as our own code makes it, and which pairs are wanted of it. SpecError for what has no meaning here."""
    given = vars(args)
    if args.steps is not None:
        raise SpecError(f"--steps is {args.steps}, but a bench makes --rounds of each; leave --steps out.")
    impl = None if args.impl is None else parse_enum(Implementation, args.impl, "--impl")
    changes = {"impl": None, **dict.fromkeys(SETTINGS)}
    if args.model is None and args.params is None:
        changes |= {"model": DEFAULT_MODEL}
    if args.seq is None:
        changes |= {"seq": DEFAULT_SEQ}
    if args.strategy is None and args.shard_ranks is not None:
        changes |= {"strategy": Strategy.HYBRID_SHARD.value}
    base = spec_from_args(argparse.Namespace(**{**given, **changes}))
    if base.model.family is Family.BARE:
        raise SpecError(f"--params {args.params} is a bare count, which has no layers to run; name a model.")
    return base, impl, None if args.strategy is None else base.strategy, _settings(args, impl)


def _settings(args: argparse.Namespace, impl: Implementation | None) -> Settings:
    """The other side's settings, which make sense when it is one."""
    names = [name for name in SETTINGS if getattr(args, name) is not None]
    if not names:
        return LIBRARY_DEFAULTS
    if impl is None or impl is Implementation.OWN:
        flags = " and ".join("--" + name.replace("_", "-") for name in names)
        raise SpecError(f"{flags} is a setting of other implementations; name one with --impl.")
    plain = dict.fromkeys(key for key in vars(args) if key not in SETTINGS)
    alone = {**plain, "strategy": PAIRS[impl][0].value, "impl": impl.value, **{k: getattr(args, k) for k in SETTINGS}}
    return spec_from_args(argparse.Namespace(**alone)).settings


def _rounds(text: str | None) -> int:
    if text is None:
        return DEFAULT_ROUNDS
    if not text.isdecimal() or not 2 <= int(text) <= MAX_ROUNDS:
        raise SpecError(f"--rounds is {text!r}; it must be a whole number from 2 to {MAX_ROUNDS:,}.")
    return int(text)


def _check_out(out: str | None) -> None:
    if out is None:
        return
    if Path(out).suffix.lower() != ".json":
        raise SpecError(f"--out is {out!r}; its name must end in .json, and the table goes beside it as .md.")
    for name in (out, str(_table_of(out))):
        check_writable(name, "--out")


def _table_of(out: str) -> Path:
    return Path(out).with_suffix(".md")


def _write(out: str, plain: str, table: str) -> None:
    for path, text in ((Path(out), plain + "\n"), (_table_of(out), f"```\n{table}\n```\n")):
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise SpecError(f"--out is {out!r}, and {path} cannot be written ({error.strerror}).") from None
