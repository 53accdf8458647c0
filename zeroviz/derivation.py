"""The state shown, as formulas on three levels: at rest, at the peak, on the wire. See [Note: three levels] in
`zeroviz.derivation_terms`.

Of our own code every line is a closed form that equals the walk's figure to the byte; how often a unit is sent is
counted among the predicted calls. Of other people's implementations the rest is a closed form, by their own rules;
their peaks are read off the walk, and say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from zeroviz import derivation_witness as witness
from zeroviz.category import Category
from zeroviz.compare import place_text
from zeroviz.derivation_own import SEQ, SUBS, TOKENS, UNIT, Own, unit_words
from zeroviz.derivation_terms import Formula, Item, K, Levels, Line, Meaning, completed, levels_of
from zeroviz.derivation_wire import TIMES, link_levels, short_of, wire_levels
from zeroviz.errors import TraceError
from zeroviz.memory import rest_places
from zeroviz.models import Family
from zeroviz.notation import Node, Sym, symbols
from zeroviz.rank_trace import Peak, RankTrace
from zeroviz.schedule import Phase
from zeroviz.spec import DType, Implementation, RunSpec
from zeroviz.strategy import Strategy
from zeroviz.trace import Trace
from zeroviz.wording import counters_text, parameters_text, title

REST, HOST, PEAK, WIRE, LINK = "At rest", "At rest, on the host", "At the peak", "On the wire", "Over the link"
ByCategory = Mapping[Category, list[Item]]


class _State(NamedTuple):
    """What is held, by category: at rest, the host's included, and at the peak."""

    rest: ByCategory
    peak: ByCategory
    own: Own | None
    notes: tuple[str, ...]


def build_formula(predicted: Trace, rank: int = 0) -> Formula:
    """The formulas of one rank of a predicted trace. Raises TraceError for a rank that is not there."""
    if not 0 <= rank < len(predicted.ranks):
        raise TraceError(f"Rank {rank} was asked for; the trace has ranks 0 to {len(predicted.ranks) - 1}.")
    spec, seen = predicted.spec, predicted.ranks[rank]
    peak = seen.peak()
    state = _own_state(spec, rank) if spec.impl is Implementation.OWN else _witness_state(spec, seen, peak)
    shown = frozenset((*seen.rest, *peak.by_category))
    lines = tuple(chain(_held_lines(spec, seen, peak, state), _sent_lines(spec, seen, state, shown)))
    meanings = tuple(_meanings(spec, seen, state, peak, lines))
    return Formula(f"{title(spec)}: the formulas", rank, lines, meanings, frozenset(seen.rest))


def _own_state(spec: RunSpec, rank: int) -> _State:
    own = Own(spec)
    return _State(own.rest(), own.peak(), own, tuple(own.rest_notes(rank)))


def _witness_state(spec: RunSpec, seen: RankTrace, peak: Peak) -> _State:
    rest, sentence = witness.rest_of(spec, seen)
    padding = f"Padding: {seen.padding_nbytes:,} B of what rank {seen.rank:,} holds." if seen.padding_nbytes else ""
    return _State(rest, witness.peak_of(spec, peak, rest), None, tuple(filter(None, (sentence, padding))))


# ---- lines ----


def _held_lines(spec: RunSpec, seen: RankTrace, peak: Peak, state: _State) -> Iterator[Line]:
    """At rest, on the host where something is there, and at the peak."""
    counters = counters_text(spec, seen.step_counter_nbytes)
    notes = (*state.notes, f"Not counted: {counters}.") if seen.step_counter_nbytes else state.notes
    name = f"{REST}, on the device" if seen.at_rest_on_host else REST
    if not seen.at_rest:
        notes = ("Nothing: every state lies on the host.", *notes)
    on_device = [item for category, items in state.rest.items() if category.on_device for item in items]
    is_closed = state.own is not None or spec.recipe.moments is not DType.INT8
    if not is_closed:
        notes = (*notes, "Quantized moments and their scales are as the walk has them.")
    yield _line(name, "", Sym("M", "rest"), on_device, seen.rest_nbytes, notes, is_closed=is_closed)
    if on_host := [item for category, items in state.rest.items() if category.on_host for item in items]:
        nbytes = sum(seen.at_rest_on_host.values())
        yield _line(HOST, "", Sym("M", "host"), on_host, nbytes, ("No part of the device's figures.",))
    at_peak = [item for items in _rest_first(state) for item in items]
    is_closed = state.own is not None and not state.own.has_read_off
    place = place_text(peak)
    notes = tuple(_peak_notes(spec, peak, state, is_closed=is_closed))
    yield _line(PEAK, place, Sym("M", "peak"), at_peak, peak.total, notes, is_closed=is_closed)


def _rest_first(state: _State) -> Iterator[Sequence[Item]]:
    """What is held throughout, then what comes on top."""
    throughout = [category for category, items in state.peak.items() if list(items) == state.rest.get(category)]
    yield from (state.peak[category] for category in throughout)
    yield from (items for category, items in state.peak.items() if category not in throughout)


def _line(
    name: str,
    place: str,
    left: Sym,
    items: Iterable[Item],
    nbytes: int,
    notes: tuple[str, ...],
    *,
    is_closed: bool = True,
) -> Line:
    every, exact = completed(items, nbytes)
    return Line(name, place, left, levels_of(every), nbytes, is_closed, exact, notes)


def _peak_notes(spec: RunSpec, peak: Peak, state: _State, *, is_closed: bool) -> Iterator[str]:
    if not is_closed:
        yield (
            f"Read off the walk through the step of {spec.impl.label}, at {place_text(peak)}, where the sum of what is "
            "held is largest: this line is no closed form."
        )
        return
    if spec.drops_grad and peak.phase != "at rest" and rest_places(spec).grad.on_device:
        yield (
            f"The rest without {_dropped(spec, state)}, for a step begins by dropping the gradient of the step before; "
            "and what comes on top at this moment."
        )
    if spec.model.family is Family.BARE:
        yield "A bare count has no layers, and so no activations."
    elif peak.phase != Phase.OPTIMIZER.value and spec.ranks > 1:
        yield "Activations, temporaries and input do not fall with N: each rank has a batch of its own."


def _dropped(spec: RunSpec, state: _State) -> str:
    """The gradient at rest, in symbols: `g P/N`."""
    return levels_of(state.rest[rest_places(spec).grad])[0].text


def _sent_lines(spec: RunSpec, seen: RankTrace, state: _State, shown: frozenset[Category]) -> Iterator[Line]:
    """On the wire and, with offload, over the link."""
    levels, is_closed = wire_levels(seen, shown, state.own, witness.Payloads(spec, state.rest))
    yield _sum_line(WIRE, Sym("S"), levels, seen.sent_nbytes, tuple(_wire_notes(spec, seen)), is_closed=is_closed)
    if seen.transfers and state.own:
        nbytes = sum(transfer.nbytes for transfer in seen.transfers)
        notes = ("Copies between device and host, both ways.",)
        yield _sum_line(LINK, Sym("L"), link_levels(seen, state.own, shown), nbytes, notes)


def _sum_line(
    name: str, left: Sym, levels: Levels, nbytes: int, notes: tuple[str, ...], *, is_closed: bool = True
) -> Line:
    exact = sum(term.nbytes for term in levels[0].terms) == nbytes
    return Line(name, "in a step", left, levels, nbytes, is_closed, exact, notes)


def _wire_notes(spec: RunSpec, seen: RankTrace) -> Iterator[str]:
    if not seen.collectives:
        yield "Nothing: one rank has nobody to send to." if spec.ranks == 1 else "Nothing is sent."
        return
    for total in seen.wire():
        calls = f"{total.count:,} call{'s' * (total.count > 1)}"
        yield f"{total.label}: {calls}, a payload of {total.payload_nbytes:,} B."
    if spec.impl is not Implementation.OWN:
        yield f"The calls are those of the walk through the step of {spec.impl.label}."


# ---- what the symbols stand for ----


def _meanings(spec: RunSpec, seen: RankTrace, state: _State, peak: Peak, lines: Iterable[Line]) -> Iterator[Meaning]:
    """Of the symbols in the lines' first two levels, in a fixed order."""
    used: set[Sym] = set()
    for line in lines:
        for expression in line.levels[:2]:
            for part in expression.parts:
                for node in (part.prefix, part.factor, *(term.node for term in part.terms)):
                    used.update(_of(node))
    # The letters that stand inside others, and those that are explained together.
    used |= {Sym("w"), Sym("m")} & set(_widths(spec)) if K in used else set()
    used |= {Sym(symbol.name) for symbol in used if symbol.name in "abc" and symbol.sub in SUBS.values()}
    yield from (Meaning(symbol, words) for symbol, words in _known(spec, seen, state, peak) if symbol in used)


def _of(node: Node | None) -> Iterator[Sym]:
    return iter(()) if node is None else symbols(node)


def _known(spec: RunSpec, seen: RankTrace, state: _State, peak: Peak) -> Iterator[tuple[Sym, str]]:
    model = spec.model
    name = "" if model.family is Family.BARE else f" of {model.name}"
    yield Sym("P"), f"{parameters_text(model)}{name}"
    yield Sym("N"), f"{spec.ranks:,} rank{'s' * (spec.ranks > 1)}"
    if spec.strategy.replicates:
        yield Sym("G"), f"{spec.num_shards:,} ranks of a shard group"
        yield Sym("R"), f"N/G = {spec.ranks:,}/{spec.num_shards:,} = {spec.num_replicas:,} groups, which hold the same"
    yield from _widths(spec).items()
    if state.own:
        yield from _own_symbols(spec, state.own, peak)
    else:
        yield from witness.symbols_of(spec)
        yield from _wire_symbols(seen)
    tokens = f"{spec.batch:,} x {spec.seq:,} = {spec.num_tokens_per_rank:,} tokens of a rank"
    yield TOKENS, tokens + (", a micro-batch" if spec.accumulation > 1 else "")
    yield SEQ, f"{spec.seq:,} tokens of a sequence"


def _widths(spec: RunSpec) -> dict[Sym, str]:
    """Of the recipe's widths, in bytes a parameter."""
    recipe = spec.recipe
    master = "fp32 master" if recipe.update.value == "fp32" else f"the optimizer's own copy, {recipe.update.value}"
    found = {
        Sym("p"): f"{recipe.param.itemsize} B, a parameter in {recipe.param.value}",
        Sym("g"): f"{recipe.grad.itemsize} B, a gradient in {recipe.grad.value}",
    }
    has_master = _has_master(spec)
    moments = recipe.num_moments * recipe.moments.itemsize
    sums = [("w", recipe.update.itemsize)] if has_master else []
    if recipe.num_moments:
        sums.append((f"{recipe.num_moments} m" if recipe.num_moments > 1 else "m", moments))
    if sums:
        letters, figure = " + ".join(letter for letter, _ in sums), sum(nbytes for _, nbytes in sums)
        found[K] = f"{letters} = {figure} B, what the optimizer keeps of a parameter"
    if has_master or recipe.casts_grad:
        found[Sym("w")] = f"{recipe.update.itemsize} B, {master}"
    if recipe.num_moments:
        found[Sym("m")] = f"{recipe.moments.itemsize} B, a moment in {recipe.moments.value}"
    return found


def _has_master(spec: RunSpec) -> bool:
    if spec.impl is Implementation.DEEPSPEED and spec.strategy is not Strategy.DDP:
        return True
    return spec.recipe.master is not None or (spec.impl is Implementation.OWN and rest_places(spec).master is not None)


def _own_symbols(spec: RunSpec, own: Own, peak: Peak) -> Iterator[tuple[Sym, str]]:
    units = own.units
    largest = max(units, key=lambda unit: unit.numel)
    count = f"{len(units):,} units, the largest {largest.name}, {largest.numel:,}"
    at_peak = f"; at the peak u is {peak.unit}" if peak.unit else ""
    yield Sym("P", UNIT), f"parameters of unit u: {count if len(units) > 1 else f'{largest.numel:,}'}{at_peak}"
    yield Sym("s", UNIT), f"the part of unit u that this rank owns, P_u/{own.num_shards.name} rounded up"
    yield Sym("l", UNIT), "elements that are updated at a time: a slice of what the rank owns"
    kinds = {"W": "units that are whole", "V": "units with a whole gradient", "D": "units whose gradient is reduced"}
    for letter, chosen in own.sets.items():
        for symbol, what in (("P", "parameters"), ("s", "owned parts")):
            yield Sym(symbol, letter), f"{what} of the {kinds[letter]} at the peak: {unit_words(chosen, units)}"
    yield TIMES, f"how often unit u is gathered: {own.turns}"
    yield Sym("a"), "B a token: of activations, temporaries, input; counted operator by operator"
    yield Sym("b"), "B a place of the sequence, likewise"
    yield Sym("c"), "B whatever the tokens, likewise"


def _wire_symbols(seen: RankTrace) -> Iterator[tuple[Sym, str]]:
    shorts = Counter(total.op for total in seen.wire())
    for total in seen.wire():
        calls = f"{total.count:,} call{'s' * (total.count > 1)}"
        yield Sym("S", short_of(total, is_one=shorts[total.op] == 1)), f"payload of {total.label}, {calls}"
