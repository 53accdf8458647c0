"""`zeroviz budget`: the options of what fits, and one answer for every strategy and recipe that was not ruled out."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product

from zeroviz.capacities import DEFAULT_GPU, DEFAULT_RESERVE_NBYTES, parse_capacity, parse_reserve
from zeroviz.cli_spec import spec_from_args
from zeroviz.errors import SpecError
from zeroviz.facts import GPU_CAPACITY_NBYTES
from zeroviz.precision import OWN_PRECISIONS, WHOLE_BUFFER_PRECISIONS
from zeroviz.quantity import GIB, format_nbytes
from zeroviz.spec import Implementation, Offload, Precision, RunSpec, Strategy, Zero1Form, parse_enum


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    """Add what is asked beside the training step. Values stay text, as in `add_spec_options`."""
    group = parser.add_argument_group("the budget")
    names = ", ".join(GPU_CAPACITY_NBYTES)
    group.add_argument("--gpu", metavar="NAME|BYTES", help=f"{names}, or 80GB, 80GiB, bytes (default {DEFAULT_GPU})")
    reserve = f"left free for what is no tensor (default {DEFAULT_RESERVE_NBYTES // GIB}GiB, an assumption)"
    group.add_argument("--reserve", metavar="BYTES", help=reserve)


def answer_budget(args: argparse.Namespace) -> int:
    """Print the answers."""
    from zeroviz.budget import budget_row
    from zeroviz.tables_budget import budget_report, render_budget

    capacity = parse_capacity(args.gpu if args.gpu is not None else DEFAULT_GPU)
    reserve = DEFAULT_RESERVE_NBYTES if args.reserve is None else parse_reserve(args.reserve)
    if reserve >= capacity.nbytes:
        raise SpecError(
            f"The reserve of {format_nbytes(reserve)} leaves nothing of --gpu {capacity.name}; "
            "give a smaller --reserve, or 0."
        )
    rows = [budget_row(spec, capacity.nbytes - reserve) for spec in _specs(args)]
    if args.json:
        print(json.dumps(budget_report(rows, capacity, reserve), indent=1))
    else:
        print(render_budget(rows, capacity, reserve, is_seq_default=args.seq is None).rstrip())
    return 0


def _specs(args: argparse.Namespace) -> list[RunSpec]:
    """Every strategy and recipe, or the one asked for. A setting that only one strategy knows goes to that one."""
    strategies, form = tuple(Strategy), Zero1Form.REDUCE_SCATTER
    given = vars(args)
    if args.strategy is None and args.zero1_form is not None:
        # RunSpec would refuse it beside the default strategy.
        form = parse_enum(Zero1Form, args.zero1_form, "--zero1-form")
        given = {**given, "zero1_form": None}
    shard_ranks = None
    if args.strategy is None and args.shard_ranks is not None:
        hybrid = spec_from_args(argparse.Namespace(**{**given, "strategy": Strategy.HYBRID_SHARD.value}))
        shard_ranks, given = hybrid.shard_ranks, {**given, "shard_ranks": None}
    base = spec_from_args(argparse.Namespace(**given))
    if base.impl is not Implementation.OWN:
        raise SpecError(
            f"impl is {base.impl.value!r}, but what fits is searched for among our own strategies only; use impl own, "
            f"or `zeroviz predict --impl {base.impl.value}` for one spec at a time."
        )
    if args.strategy is not None:
        strategies, form, shard_ranks = (base.strategy,), base.zero1_form, base.shard_ranks
    precisions = OWN_PRECISIONS if args.precision is None else (base.precision,)
    if args.strategy is None:
        # Where a state cannot lie on the host, or be reduced so, there is no such row; the header says what was asked.
        strategies = tuple(strategy for strategy in strategies if _can(strategy, base, shard_ranks))
    return [
        replace(
            base,
            strategy=strategy,
            precision=precision,
            shard_ranks=shard_ranks if strategy.replicates else None,
            prefetch=base.prefetch if strategy.shards_param else 0,
            zero1_form=form if strategy is Strategy.ZERO1 else Zero1Form.REDUCE_SCATTER,
        )
        for strategy, precision in product(strategies, precisions)
        if args.strategy is not None or _has(strategy, precision)
    ]


def _can(strategy: Strategy, base: RunSpec, shard_ranks: int | None) -> bool:
    """Whether the strategy can do what was asked of all; a shard group goes to the one that has groups."""
    if base.offload.moves_params and not strategy.shards_param:
        return False
    if strategy.replicates and shard_ranks is None:
        return False
    if strategy.has_whole_buffer and (base.offload is not Offload.NONE or base.async_reduce or base.grad_dtype):
        return False
    return not (base.no_sync is False and strategy in (Strategy.ZERO1, Strategy.MEGATRON_OPTIM))


def _has(strategy: Strategy, precision: Precision) -> bool:
    """Whether there is such a pair: one buffer for all gradients is of fp32."""
    return not strategy.has_whole_buffer or precision in WHOLE_BUFFER_PRECISIONS
