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
    held = rank["peak"]["by_category"]
    whole = held["UNSHARDED_PARAM"] + held["UNSHARDED_GRAD"]
    return (
        f"{peak(rank)} on each rank, in {rank['peak']['phase']} of {rank['peak']['unit']}: {gb(rank['at_rest']['total'])} "
        f"of states at rest, {gb(whole)} of the unit's whole parameters and gradients, {gb(held['ACTIVATION'])} of "
        f"activations and {gb(held['TEMPORARY'])} of temporaries, most of them logits and their gradients. The table that "
        "is printed has every byte, and the most held in each phase."
    )


def wrapping(ask: Asker) -> str:
    base, model = ask.predict(), ask.predict("--unit model")
    layer, four = ask.predict("--unit layer"), ask.predict("--unit block:4")
    return (
        f"Blocks: {peak(base)}. One unit for all, which is also what a wrap policy that matches nothing gives: "
        f"{peak(model)}, for the whole model and its whole gradient are there at once. Below a block little changes here, "
        f"for the peak is in {base['peak']['unit']}, which no policy cuts: {peak(layer)} with attention and MLP apart, "
        f"whose extra borders keep one more activation each, and {peak(four)} with four blocks a unit. The bytes on the "
        "wire are the same in all of these."
    )


def best_batch(ask: Asker) -> str:
    plain, again = ask.budget(), ask.budget("--checkpointing block")
    return (
        f"{plain['largest_batch']['value']} sequence of 4,096 tokens on each of 8 GPUs of 80 GiB, and "
        f"{again['largest_batch']['value']} where each block is recomputed. The search is exact; "
        f"{gb(plain['budget_nbytes'])} are what is left of the card after a reserve that `--reserve` sets. Whether the "
        "largest batch is the best one for training is not a question of memory."
    )


def longest_sequence(ask: Asker) -> str:
    plain, again = ask.budget(), ask.budget("--checkpointing block")
    return (
        f"{plain['longest_seq']['value']:,} tokens with one sequence a rank, {again['longest_seq']['value']:,} where each "
        "block is recomputed. (Attention is the flash kernel, which keeps nothing of sequence times sequence.)"
    )


def more_ranks(ask: Asker) -> str:
    few, more, many = ask.predict(), ask.predict("--ranks 16"), ask.predict("--ranks 64")
    row = ask.budget()
    return (
        f"At rest {gb(few['at_rest']['total'])} on 8, {gb(more['at_rest']['total'])} on 16 and "
        f"{gb(many['at_rest']['total'])} on 64. The peak falls by the same bytes and not by the same factor, "
        f"{peak(few)}, {peak(more)}, {peak(many)}: activations and the unit in use do not depend on N (the line `falls "
        f"with N` says how much does). The least that fits is N = {row['smallest_ranks']['value']}. Each rank sends "
        f"{sent(few)}, {sent(more)}, {sent(many)} a step."
    )


def on_cpu(ask: Asker) -> str:
    base = ask.predict()
    optimizer, params = ask.predict("--offload optimizer"), ask.predict("--offload params")
    return (
        f"The peak falls from {peak(base)} to {peak(optimizer)}; {gb(_host(optimizer))} a rank lie on the host instead, "
        f"and each step {gb(optimizer['link']['to host'])} of gradients go down and "
        f"{gb(optimizer['link']['to device'])} of parameters come up. With parameters and gradients offloaded too: "
        f"{peak(params)}, {gb(_host(params))} on the host, {gb(params['link']['to device'])} up (a shard for each gather). "
        "Of activations nothing is moved, and they are most of this peak: see the next question first."
    )


def _host(rank: dict[str, Any]) -> int:
    return sum(rank["at_rest"]["on_host"].values())


def checkpointing(ask: Asker) -> str:
    base, block = ask.predict(), ask.predict("--checkpointing block")
    two, eight = ask.predict("--checkpointing block:2"), ask.predict("--checkpointing block:8")
    return (
        f"Each block: {peak(base)} becomes {peak(block)}, for one more forward of every block. Regions of two or eight "
        f"blocks, {peak(two)} and {peak(eight)}, hardly help, for the peak is now in {block['peak']['unit']}, the logits; "
        f"and a region is gathered once more to be recomputed: {sent(two)} and {sent(eight)} are sent instead of "
        f"{sent(block)}."
    )


def fp32_reduction(ask: Asker) -> str:
    base, wide = ask.predict(), ask.predict("--grad-dtype fp32")
    return (
        f"Gradients that are added up, reduced and kept in fp32 make the peak {peak(wide)} instead of {peak(base)}, and "
        f"each rank sends {sent(wide)} instead of {sent(base)}: {gb(wide['at_rest']['total'])} instead of "
        f"{gb(base['at_rest']['total'])} rest, 18 bytes a parameter and not 16, and the whole gradient of the unit in use "
        "is twice as wide."
    )


def hybrid(ask: Asker) -> str:
    group, everyone = ask.predict(), ask.predict("--ranks 64")
    return (
        "`hybrid_shard` is not in this version: it can be neither run nor predicted. What is known in closed form: with "
        "shard groups of G ranks, G dividing N, a rank holds 16 P/G bytes at rest (and not 16 P/N), because states are "
        "cut inside a group and every group has a copy. That is ZeRO-3 on G ranks: "
        f"{gb(group['at_rest']['total'])} for 64 ranks in groups of 8, against {gb(everyone['at_rest']['total'])} if all "
        "64 shard. What it buys is that gathers and reductions stay inside a group, and only the gradient's shard, g P/G "
        "bytes, is all-reduced between groups. So: where links between groups (nodes) are the bottleneck, and 16 P/G still "
        "fits."
    )


def not_resharding(ask: Asker) -> str:
    base, kept = ask.predict(), ask.predict("--reshard-after-forward false")
    row = ask.budget("--reshard-after-forward false")
    spare = row["budget_nbytes"] - kept["peak"]["total"]
    verdict = f"that fits, with {gb(spare)} to spare" if spare >= 0 else f"that is {gb(-spare)} too much"
    return (
        f"It is a question of the peak alone: parameters stay gathered from forward to backward, {peak(kept)} instead of "
        f"{peak(base)}; on 80 GiB {verdict} (longest sequence {row['longest_seq']['value']:,}). At rest nothing changes, "
        f"{gb(kept['at_rest']['total'])}. It saves the second gather: {sent(kept)} are sent instead of {sent(base)}. The "
        "report calls it `shard_grad_op`."
    )


def which_unit(ask: Asker) -> str:
    rank = ask.predict()
    table = "\n".join(ask.lines("", "units ("))
    return (
        fill(
            f"The one that is named at the peak: {rank['peak']['unit']}. All units with their sizes are listed:", WIDTH
        )
        + f"\n\n```\n{table}\n```\n\n"
        + fill(
            "A tied embedding and its head are one unit (`root`), as in FSDP. An untied pair is two units here; in FSDP "
            "it is the root's, and so gathered together, unless both are wrapped as well.",
            WIDTH,
        )
    )


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
    opening = (
        "What people ask of a memory tool, answered for one step: Llama-3-8B on 8 ranks, ZeRO-3 (FULL_SHARD), bf16 with "
        "fp32 master and moments, one sequence of 4,096 tokens a rank, a unit a block, nothing recomputed or offloaded. "
        "Written by `docs/questions.py` from the reports of the commands shown, which start nothing. GB is 1e9 bytes. "
        "Activations and temporaries are those of this implementation on torch's CPU kernels; a GPU's kernels keep and "
        "borrow others, so near an edge measure."
    )
    lines = ["# Questions", "", fill(opening, WIDTH), "", "```", f'STEP="{STEP}"', "```"]
    for question, answer in QUESTIONS.items():
        ask = Asker()
        text = answer(ask)
        commands = [f"zeroviz {command}" for command in ask.commands]
        lines += ["", f"## {question}", "", "```", *commands, "```", ""]
        lines.append(text if "```" in text else fill(text, WIDTH))
    closing = (
        "Any of these steps can be run for real with a model that fits the machine, and is then measured beside the "
        "prediction, byte by byte: `zeroviz run --model tiny --ranks 4` with the same options. What differs is named."
    )
    return "\n".join([*lines, "", "## And is that true?", "", fill(closing, WIDTH), ""])


def main() -> int:
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}: {len(QUESTIONS)} questions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
