"""Answer what people ask of a memory tool, each question with its commands, and write docs/questions.md.

    python docs/questions.py

Every figure of the page is read from the report of a command that stands on it; nothing is run live. The questions are
those collected under PyTorch's pull request 125323.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any

from zeroviz.cli import main as zeroviz
from zeroviz.quantity import format_decimal_nbytes

STEP = "--model llama3-8b --ranks 8 --strategy zero3 --precision bf16-mixed --seq 4096"
GPU = "--gpu h100-80gb"
PAGE = Path(__file__).with_name("questions.md")
WIDTH = 120


class Asker:
    """Runs commands and remembers them, so that each answer shows where its figures come from."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def predict(self, options: str = "") -> dict[str, Any]:
        """Rank 0 of the report; all ranks are alike, for no unit is padded on a power of two of ranks."""
        return dict(self._report(f"predict $STEP {options}".rstrip())["ranks"][0])

    def budget(self, options: str = "") -> dict[str, Any]:
        """The row of the step's strategy and recipe, and `budget_nbytes`."""
        report = self._report(f"budget {GPU} $STEP {options}".rstrip())
        (row,) = report["rows"]
        return {**row, "budget_nbytes": report["budget_nbytes"]}

    def lines(self, options: str, first: str) -> list[str]:
        """The part of the printed table from the line that begins with `first` to the next empty line."""
        words = self._remember(f"predict $STEP {options}".rstrip())
        lines = _output(words).splitlines()
        start = next(number for number, line in enumerate(lines) if line.startswith(first))
        return lines[start : lines.index("", start)]

    def _report(self, command: str) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(_output([*self._remember(command), "--json"]))
        return report

    def _remember(self, command: str) -> list[str]:
        if command not in self.commands:
            self.commands.append(command)
        return command.replace("$STEP", STEP).split()


def _output(words: list[str]) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = zeroviz(words)
    if code:
        raise RuntimeError(f"zeroviz {' '.join(words)} ended with {code}")
    return text.getvalue()


def gb(nbytes: int) -> str:
    return format_decimal_nbytes(nbytes)


def peak(rank: dict[str, Any]) -> str:
    return gb(rank["peak"]["total"])


def sent(rank: dict[str, Any]) -> str:
    return gb(rank["wire"]["sent_nbytes"])


def the_peak(ask: Asker) -> str:
    rank = ask.predict()
    held, rest = rank["peak"]["by_category"], rank["at_rest"]["by_category"]
    states = sum(held.get(category, 0) for category in rest)
    return f"""
        {peak(rank)} on each rank, in {rank["peak"]["phase"]} of {rank["peak"]["unit"]}: {gb(states)} of the
        {gb(rank["at_rest"]["total"])} of states at rest, for the gradients are not there yet,
        {gb(held["UNSHARDED_PARAM"])} of this unit's whole parameters, {gb(held["ACTIVATION"])} of activations, and
        {gb(held["TEMPORARY"])} of temporaries, which are tensors of tokens times vocabulary in fp32.
        The printed table has every byte and the most held in each phase.
        """


def wrapping(ask: Asker) -> str:
    base, model = ask.predict(), ask.predict("--unit model")
    layer, four = ask.predict("--unit layer"), ask.predict("--unit block:4")
    (always,) = {sent(rank) for rank in (base, model, layer, four)}
    return f"""
        A unit a block: {peak(base)}. One unit for all, which is also what a wrap policy that matches nothing gives:
        {peak(model)}, for the whole model and its whole gradient are there at once. Between these little changes here,
        because the peak is in {base["peak"]["unit"]}, which no policy cuts: {peak(four)} with four blocks a unit,
        {peak(layer)} with attention and MLP apart, whose border keeps one more activation a block. On the wire it is
        {always} in all four.
        """


def best_batch(ask: Asker) -> str:
    plain, again = ask.budget(), ask.budget("--checkpointing block")
    return f"""
        The largest is {plain["largest_batch"]["value"]} sequence of 4,096 tokens on each of 8 GPUs of 80 GiB, and
        {again["largest_batch"]["value"]} where each block is recomputed. The search is exact, for a peak of
        {gb(plain["budget_nbytes"])}: the card less a reserve that `--reserve` sets. Which batch trains best is not a
        question of memory.
        """


def longest_sequence(ask: Asker) -> str:
    plain, again = ask.budget(), ask.budget("--checkpointing block")
    return f"""
        {plain["longest_seq"]["value"]:,} tokens with one sequence a rank, {again["longest_seq"]["value"]:,} where each
        block is recomputed. Attention is a flash kernel here, which keeps nothing of sequence times sequence.
        """


def more_ranks(ask: Asker) -> str:
    few, more, many = ask.predict(), ask.predict("--ranks 16"), ask.predict("--ranks 64")
    row = ask.budget()
    rest = [gb(rank["at_rest"]["total"]) for rank in (few, more, many)]
    return f"""
        At rest {rest[0]} on 8 ranks, {rest[1]} on 16 and {rest[2]} on 64. The peak falls by the same bytes and not by
        the same factor, {peak(few)}, {peak(more)}, {peak(many)}: activations and the unit in use do not depend on N.
        The printed line `falls with N` says how much does. The least N that fits 80 GiB is
        {row["smallest_ranks"]["value"]}. A rank sends {sent(few)}, {sent(more)} and {sent(many)} a step.
        """


def on_cpu(ask: Asker) -> str:
    base = ask.predict()
    optimizer, params = ask.predict("--offload optimizer"), ask.predict("--offload params")
    return f"""
        Master and moments on the host: the peak is {peak(optimizer)} instead of {peak(base)}. {_host(optimizer)} a rank
        rest on the host, and in each step {_down(optimizer)} of gradients go down to it and {_up(optimizer)} of
        parameters come up. With parameters and gradients there too: {peak(params)}, {_host(params)} on the host,
        {_down(params)} down and {_up(params)} up, a shard for each gather. Activations stay, and are most of this peak;
        so first the next question.
        """


def _host(rank: dict[str, Any]) -> str:
    return gb(sum(rank["at_rest"]["on_host"].values()))


def _down(rank: dict[str, Any]) -> str:
    return gb(rank["link"]["to host"])


def _up(rank: dict[str, Any]) -> str:
    return gb(rank["link"]["to device"])


def checkpointing(ask: Asker) -> str:
    base, block = ask.predict(), ask.predict("--checkpointing block")
    two, eight = ask.predict("--checkpointing block:2"), ask.predict("--checkpointing block:8")
    return f"""
        Each block: {peak(base)} becomes {peak(block)}, at the price of one more forward of every block. Regions of two
        blocks, {peak(two)}, hardly help, because the peak is in {block["peak"]["unit"]} with its logits, and regions of
        eight, {peak(eight)}, move it into {eight["peak"]["unit"]}: what a region recomputes is there at once. The units
        of a region are gathered once more to be recomputed, so that {sent(two)} and {sent(eight)} are sent instead of
        {sent(block)}.
        """


def fp32_reduction(ask: Asker) -> str:
    base, wide = ask.predict(), ask.predict("--grad-dtype fp32")
    rest = [gb(rank["at_rest"]["total"]) for rank in (base, wide)]
    stays = f"stays at {peak(base)}, in {base['peak']['unit']}, before the first gradient is there"
    moves = f"is {peak(wide)} instead of {peak(base)}"
    return f"""
        Gradients that are added up, reduced and kept in fp32: {rest[1]} rest instead of {rest[0]} (18 bytes a parameter
        instead of 16), and the whole gradient of the unit in use is twice as wide. The peak
        {stays if base["peak"]["total"] == wide["peak"]["total"] else moves}. A rank sends {sent(wide)} instead of
        {sent(base)}.
        """


def hybrid(ask: Asker) -> str:
    group, everyone = ask.predict("--ranks 64 --strategy hybrid_shard --shard-ranks 8"), ask.predict("--ranks 64")
    return f"""
        With N ranks in shard groups of G, states are divided inside a group and every group has a copy of them: a rank
        rests at 16 P/G bytes and not at 16 P/N. On 64 ranks in groups of 8 it is {gb(group["at_rest"]["total"])}, peak
        {peak(group)}, against {gb(everyone["at_rest"]["total"])}, peak {peak(everyone)}, where all 64 divide. What it
        buys: gathers and reductions stay inside a group, and between groups only the gradient's shard is all-reduced,
        P/G elements; the printed table has both apart. So it is for links between groups (nodes) that are the
        bottleneck, where 16 P/G still fits.
        """


def not_resharding(ask: Asker) -> str:
    base, kept = ask.predict(), ask.predict("--strategy shard_grad_op")
    row = ask.budget("--strategy shard_grad_op")
    spare = row["budget_nbytes"] - kept["peak"]["total"]
    verdict = f"fits 80 GiB with {gb(spare)} to spare" if spare >= 0 else f"is {gb(-spare)} too much for 80 GiB"
    return f"""
        Safe is what fits at the peak: parameters stay gathered from forward to backward, so it is {peak(kept)} instead
        of {peak(base)}, which {verdict}; the longest sequence is then {row["longest_seq"]["value"]:,}. At rest nothing
        changes: {gb(kept["at_rest"]["total"])}. It saves the second gather: a rank sends {sent(kept)} instead of
        {sent(base)}. (FSDP's name for it, `--reshard-after-forward false`, means the same.)
        """


def which_unit(ask: Asker) -> str:
    rank = ask.predict()
    table = "\n".join(ask.lines("", "units ("))
    opening = f"The one that is named at the peak: {rank['peak']['unit']}. All units are listed with their sizes:"
    closing = """
        A tied embedding and its head are one unit, `root`, as in FSDP. If they are not tied they are two units here; in
        FSDP they are the root's, and gathered together, unless both are wrapped as blocks are.
        """
    return f"{opening}\n\n```\n{table}\n```\n\n{_filled(closing)}"


def _filled(text: str) -> str:
    return fill(" ".join(text.split()), WIDTH)


QUESTIONS: dict[str, Callable[[Asker], str]] = {
    "The peak with this config?": the_peak,
    "What does other wrapping change?": wrapping,
    "The best batch?": best_batch,
    "The longest sequence?": longest_sequence,
    "More ranks?": more_ranks,
    "Optimizer on CPU?": on_cpu,
    "Which checkpointing?": checkpointing,
    "fp32 reduction?": fp32_reduction,
    "When hybrid?": hybrid,
    "Is it safe not to reshard after forward?": not_resharding,
    "Which unit holds the memory?": which_unit,
}


def page() -> str:
    """The whole page."""
    opening = """
        What people ask of a memory tool, answered for one step: Llama-3-8B on 8 ranks, ZeRO-3 (FULL_SHARD), bf16 with
        fp32 master and moments, one sequence of 4,096 tokens a rank, a unit a block, nothing recomputed or offloaded.
        `docs/questions.py` writes this page from the reports of the commands on it, which start nothing. GB is 1e9
        bytes. Activations and temporaries are those of this implementation on torch's CPU kernels. A GPU's kernels keep
        and borrow others, so near an edge, measure.
        """
    lines = ["# Questions", "", _filled(opening), "", "```", f'STEP="{STEP}"', "```"]
    for question, answer in QUESTIONS.items():
        ask = Asker()
        text = answer(ask)
        commands = [f"zeroviz {command}" for command in ask.commands]
        lines += ["", f"## {question}", "", "```", *commands, "```", ""]
        lines.append(text if "```" in text else _filled(text))
    closing = """
        `zeroviz run --model tiny --ranks 4` runs a step for real, with any of these options, and shows what each rank
        measured beside the prediction, in bytes; what differs is named. [fidelity.md](fidelity.md) has the whole grid.
        """
    return "\n".join([*lines, "", "## And is that true?", "", _filled(closing), ""])


def main() -> int:
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}: {len(QUESTIONS)} questions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
