"""A finished run in a cell: what each rank held, as the explorer draws it, and the losses of runs that go on from one
another beside those of one that was never interrupted."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets  # type: ignore[import-untyped]

from zeroviz.draw import svg_text
from zeroviz.panel.cells import table
from zeroviz.panel.look import CSS
from zeroviz.predict import predict
from zeroviz.scene import build_scene
from zeroviz.trace import Trace
from zeroviz.wording import title


def held(trace: Trace) -> widgets.VBox:
    """The measured run beside its prediction: a bar for each rank, at rest and at the peak."""
    picture = widgets.HTML(svg_text(build_scene(predict(trace.spec), trace)))
    picture.add_class("zeroviz-picture-card")
    return _shown(picture)


def losses(whole: Trace, *parts: Trace) -> widgets.VBox:
    """A table, one row a step: the mean of the ranks' losses in `whole`, and in `parts`, of which each went on from the
    one before. ValueError unless these make as many steps together."""
    pieces = [(title(part.spec), loss) for part in parts for loss in mean_losses(part)]
    rows = [
        f'<tr><th scope="row">{number}</th><td>{alone:.6f}</td><td class="zeroviz-words">{words}</td>'
        f"<td>{loss:.6f}</td><td>{loss - alone:+.1e}</td></tr>"
        for number, (alone, (words, loss)) in enumerate(zip(mean_losses(whole), pieces, strict=True), start=1)
    ]
    once = f"{title(whole.spec)}, never interrupted"
    head = f"<tr><th>step</th><th>{once}</th><th>in parts</th><th>loss</th><th>difference</th></tr>"
    return _shown(widgets.HTML(table("Loss, mean of the ranks", "losses", head, rows)))


def mean_losses(trace: Trace) -> Sequence[float]:
    """The loss of each step, the mean of the ranks."""
    return [sum(step) / len(step) for step in zip(*(rank.losses for rank in trace.ranks), strict=True)]


def _shown(child: widgets.Widget) -> widgets.VBox:
    box = widgets.VBox([widgets.HTML(CSS), child])
    box.add_class("zeroviz-explorer")
    return box
