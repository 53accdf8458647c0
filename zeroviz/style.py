"""How a category is called and painted: one place for every picture, table and legend.

Colours are Okabe and Ito's (Color Universal Design, 2008), told apart with any of the common colour deficiencies.
Colour is never alone: solid means held at rest, a hatch of its own marks every category that lives only within the
step, the order of stacking is fixed, and wide segments carry their name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp
from zeroviz.spec import RunSpec

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, GREY, PALE = "#0072B2", "#D55E00", "#CC79A7", "#999999", "#CCCCCC"

INK = "#1a1a1a"
"""Text, separators, outlines."""
MUTED = "#555555"
"""Second-rank text; 7:1 against the paper."""
RULE = "#d0d0d0"
"""Grid lines."""
PAPER = "#ffffff"
TRACK = "#ececec"
"""Where something could be held and is not."""
ON_PAINT = "#1a1a1b"
"""Ink on paint, which is as bright on a dark page as on a light one; INK is the page's own there."""
FITS = ("#eaf5fc", "#c5e4f6", "#97ceee")
EXCEEDS = ("#fbe0cc", "#f6c49f", "#f0a873")
"""Tints of BLUE and of VERMILLION for what fits and what does not, from much room to none and from a little too much to
far too much. They are paper with a meaning, so they are dark where the page is: a quarter, a half and three quarters of
the way from dark paper to the palette's colour, on which light ink stands 5:1 or more."""
TINTS = frozenset((*FITS, *EXCEEDS))
PAGE_INKS = {
    INK: "currentColor",
    PAPER: f"var(--zv-paper, {PAPER})",
    MUTED: f"var(--zv-muted, {MUTED})",
    RULE: f"var(--zv-rule, {RULE})",
    TRACK: f"var(--zv-track, {TRACK})",
    **{tint: f"var(--zv-fits-{number}, {tint})" for number, tint in enumerate(FITS, 1)},
    **{tint: f"var(--zv-exceeds-{number}, {tint})" for number, tint in enumerate(EXCEEDS, 1)},
}
"""What follows the page's theme, as `zeroviz.panel.look` sets it."""

FONT_POINTS = 14.0
"""The smallest text in a picture as wide as FIGURE_INCHES, which is a notebook cell on a projector."""
FIGURE_INCHES = 11.0


@dataclass(frozen=True, slots=True)
class Paint:
    """A category's name for a person, its short form inside a bar, its colour and its hatch while transient."""

    label: str
    short: str
    color: str
    hatch: str


PAINT: dict[Category, Paint] = {
    Category.SHARDED_PARAM: Paint("parameters, own shard", "params", BLUE, "//"),
    Category.UNSHARDED_PARAM: Paint("parameters, whole", "params", SKY, "\\\\"),
    Category.SHARDED_GRAD: Paint("gradients, own shard", "grads", VERMILLION, "//"),
    Category.UNSHARDED_GRAD: Paint("gradients, whole", "grads", ORANGE, "xx"),
    Category.MASTER_PARAM: Paint("fp32 master", "master", PURPLE, "//"),
    Category.OPTIMIZER_STATE: Paint("Adam m and v", "Adam", GREEN, "//"),
    Category.ACTIVATION: Paint("activations", "activations", YELLOW, "//"),
    Category.ALL_GATHER_BUFFER: Paint("gather buffer", "gather", GREY, "||"),
    Category.REDUCE_SCATTER_BUFFER: Paint("reduce buffer", "reduce", GREY, "--"),
    Category.BUCKET: Paint("buckets", "buckets", GREY, "++"),
    Category.TEMPORARY: Paint("temporaries", "temp", PALE, "\\\\"),
    Category.INPUT: Paint("input", "input", PALE, "||"),
    Category.KERNEL_SCRATCH: Paint("kernels' scratch", "scratch", PALE, "++"),
    Category.BACKEND_COPY: Paint("backend's copies", "copies", PALE, "--"),
    Category.UNATTRIBUTED: Paint("unattributed", "unattributed", PALE, "xx"),
    Category.HOST_PARAM: Paint("parameters on the host", "params", BLUE, ".."),
    Category.HOST_GRAD: Paint("gradients on the host", "grads", VERMILLION, ".."),
    Category.HOST_MASTER_PARAM: Paint("fp32 master on the host", "master", PURPLE, ".."),
    Category.HOST_OPTIMIZER_STATE: Paint("Adam m and v on the host", "Adam", GREEN, ".."),
    Category.HOST_TEMPORARY: Paint("temporaries on the host", "temp", PALE, ".."),
}


_MOMENTS = (Category.OPTIMIZER_STATE, Category.HOST_OPTIMIZER_STATE)
_OF_OPTIMIZER = (Category.MASTER_PARAM, Category.OPTIMIZER_STATE)


def label_of(category: Category, spec: RunSpec) -> str:
    """A category's name in a picture of `spec`: the optimizer's moments by their name, its states as 1/N if sharded."""
    label = PAINT[category].label
    if category in _MOMENTS and spec.recipe.num_moments == 1:
        label = label.replace("Adam m and v", "momentum")
    return label + (", own shard" if category in _OF_OPTIMIZER and spec.strategy.shards_optimizer else "")


def short_of(category: Category, spec: RunSpec) -> str:
    """The short form of it, for inside a bar."""
    return "momentum" if category in _MOMENTS and spec.recipe.num_moments == 1 else PAINT[category].short


WIRE_PAINT: dict[CollectiveOp, Paint] = {
    CollectiveOp.ALL_GATHER: Paint("all-gather", "gather", SKY, "\\\\"),
    CollectiveOp.REDUCE_SCATTER: Paint("reduce-scatter", "scatter", ORANGE, "//"),
    CollectiveOp.ALL_REDUCE: Paint("all-reduce", "reduce", YELLOW, "xx"),
    CollectiveOp.BROADCAST: Paint("broadcast", "broadcast", PURPLE, "||"),
}
"""Collectives are hatched everywhere: what crosses the wire is never held at rest. An all-reduce, a reduce-scatter and
then an all-gather, has the hatches of both."""

PADDING = Paint("padding", "padding", "#444444", "xxxx")

FONTS = ("DejaVu Sans", "Verdana", "Arial")
"""matplotlib brings the first; a browser without it takes the second, which is as wide."""

RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": FONTS,
    "font.size": FONT_POINTS,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "zeroviz",
    "pdf.fonttype": 42,
    "text.parse_math": False,
}
"""matplotlib's settings while a picture is drawn: text stays text in SVG and PDF, and ids are the same each time."""
