"""The files a command writes: refused before anything runs, written after it ran."""

from __future__ import annotations

from pathlib import Path

from zeroviz.errors import SpecError
from zeroviz.trace import Trace

FIGURE_SUFFIXES = (".svg", ".png", ".pdf")


def check_outputs(figure: str | None, trace: str | None, model: str | None = None, timeline: str | None = None) -> None:
    """Raise SpecError for a file that could not be written at the end of the run, or would overwrite another.

    model: what --model was given; a config.json is read and must not be written over.
    """
    given = [("--model", model), ("--figure", figure), ("--timeline", timeline), ("--trace", trace)]
    paths = [(option, name, Path(name).resolve()) for option, name in given if name is not None]
    for position, (option, name, path) in enumerate(paths):
        for other, _, before in paths[:position]:
            if path == before:
                raise SpecError(f"{other} and {option} are both {name!r}; give each a file of its own.")
    for option, picture in (("--figure", figure), ("--timeline", timeline)):
        if picture is not None:
            if Path(picture).suffix.lower() not in FIGURE_SUFFIXES:
                raise SpecError(f"{option} is {picture!r}; its name must end in {', '.join(FIGURE_SUFFIXES)}.")
            check_writable(picture, option)
    if trace is not None:
        check_writable(trace, "--trace")


def save_outputs(
    figure: str | None, trace: str | None, predicted: Trace, measured: Trace | None, timeline: str | None = None
) -> None:
    """Write what was asked for. The trace is the measured one where there is one."""
    if trace is not None:
        try:
            Path(trace).write_text((measured or predicted).to_json(), encoding="utf-8")
        except OSError as error:
            raise _unwritable("--trace", trace, error) from None
    if figure is not None:
        # matplotlib takes most of a second to import; only a picture needs it.
        from zeroviz.draw import save_figure
        from zeroviz.scene import build_scene

        try:
            save_figure(build_scene(predicted, measured), Path(figure))
        except OSError as error:
            raise _unwritable("--figure", figure, error) from None
    if timeline is not None:
        from zeroviz.draw_timeline import save_timeline
        from zeroviz.timeline import build_timeline

        try:
            save_timeline(build_timeline(predicted, measured), Path(timeline))
        except OSError as error:
            raise _unwritable("--timeline", timeline, error) from None


def check_writable(name: str, option: str) -> None:
    """Open for appending: the only test that also sees full permissions, read-only disks and directories."""
    path = Path(name)
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise _unwritable(option, name, error) from None


def _unwritable(option: str, name: str, error: OSError) -> SpecError:
    return SpecError(
        f"{option} is {name!r}, which cannot be written ({error.strerror}); name a file in a writable folder."
    )
