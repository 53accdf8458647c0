"""The norms' kernels, as in `zeroviz.kernels`: LayerNorm in GPT-2, RMSNorm in all others."""

from __future__ import annotations

from collections.abc import Callable

from zeroviz.kernels import add_input_grad, cast_grad, make_grad
from zeroviz.models import Family
from zeroviz.tape import FP32_NBYTES, Place, Ready, Sizes, Tape, add_grads


def norm(tape: Tape, s: Sizes) -> None:
    """h of x. LayerNorm keeps x and, of the compute dtype, a mean and a deviation a token."""
    if s.model.family.is_rotary:
        rms_norm(tape, s)
        return
    tape.save("h", s.rows(s.model.hidden))
    tape.save("mean", s.rows(1))
    tape.save("rstd", s.rows(1))
    tape.let_go("mean", "rstd")


def norm_backward(tape: Tape, s: Sizes, place: Place) -> None:
    """From dh to `grad in`."""
    if s.model.family.is_rotary:
        rms_norm_backward(tape, s, lambda part: add_input_grad(tape, s, place, part), x_stays=place.input_held)
        return
    hidden = s.model.hidden
    tape.make("dx", s.rows(hidden))
    make_grad(tape, s, "dweight", hidden)
    make_grad(tape, s, "dbias", hidden)
    with tape.scratch(2 * hidden * s.itemsize):  # a thread's partial sums of both
        pass
    cast_grad(tape, s, "dweight", hidden)
    cast_grad(tape, s, "dbias", hidden)
    tape.free("dh", *(() if place.input_held else ("x",)), "mean", "rstd")
    add_input_grad(tape, s, place, "dx")
    tape.give_grad(s, "dweight", Ready(0))
    tape.give_grad(s, "dbias", Ready(0, is_bias=True))


def rms_norm(tape: Tape, s: Sizes, h: str = "h", at: str = "") -> None:
    """weight * (x * rstd), rstd = (mean(x^2) + epsilon)^(-1/2), in fp32, operator by operator; keeps x * rstd too.

    h: the result, kept unless it is named otherwise: what ends a branch is only added. at: before the names of what
    this norm keeps, where the sublayer has another one. Gemma-2 multiplies by 1 + weight, a vector that is kept.
    """
    wide = s.rows(s.model.hidden, FP32_NBYTES)
    keep = tape.save if h == "h" else tape.make
    if s.is_narrow:
        tape.save(f"{at}wide x", wide)
    tape.make("x^2", wide)
    tape.make("mean", s.rows(1, FP32_NBYTES))
    for _ in ("divided by hidden", "plus epsilon"):
        with tape.number(FP32_NBYTES):
            pass
    tape.save(f"{at}rstd", s.rows(1, FP32_NBYTES))
    tape.free("mean", "x^2")
    tape.save(f"{at}x rstd", wide)
    if s.model.family is Family.GEMMA2:
        _times_one_plus_weight(tape, s, h, at)
        return
    if s.is_narrow:
        with tape.scratch(s.model.hidden * FP32_NBYTES):  # the weight in fp32
            tape.make("wide h", wide)
        tape.let_go(f"{at}x rstd", f"{at}wide x")
        keep(h, s.rows(s.model.hidden))
        tape.free("wide h")
    else:
        keep(h, wide)
        tape.let_go(f"{at}x rstd")
    tape.let_go(f"{at}rstd")


def _times_one_plus_weight(tape: Tape, s: Sizes, h: str, at: str) -> None:
    """Gemma-2's h = (1 + weight) x rstd, in fp32 and not in one operator with what came before."""
    keep = tape.save if h == "h" else tape.make
    width = s.model.hidden * FP32_NBYTES
    tape.let_go(f"{at}rstd")
    if s.is_narrow:
        tape.let_go(f"{at}wide x")
        tape.make("wide weight", width)
    tape.save(f"{at}1 + weight", width)
    if s.is_narrow:
        tape.free("wide weight")
        tape.make("wide h", s.rows(s.model.hidden, FP32_NBYTES))
        tape.let_go(f"{at}x rstd", f"{at}1 + weight")
        keep(h, s.rows(s.model.hidden))
        tape.free("wide h")
    else:
        keep(h, s.rows(s.model.hidden))
        tape.let_go(f"{at}x rstd", f"{at}1 + weight")


def rms_norm_backward(
    tape: Tape,
    s: Sizes,
    give: Callable[[str], None],
    *,
    layer: int = 0,
    at: str = "",
    x: str = "x",
    dh: str = "dh",
    dh_stays: bool = False,
    x_stays: bool = False,
) -> None:
    """From dh to the gradient of x, which enters twice, through x * rstd and through x^2: `give` gets a part of it, in
    fp32 each. layer: the norm's number. x_stays, dh_stays: somebody else holds these still. at: as in `rms_norm`."""
    hidden = s.model.hidden
    wide, column = s.rows(hidden, FP32_NBYTES), s.rows(1, FP32_NBYTES)
    if s.is_narrow:
        tape.make("wide dh", wide)
        if not dh_stays:
            tape.free(dh)
        dh, dh_stays = "wide dh", False
    tape.make("dh x rstd", wide)
    with tape.scratch(*((hidden * FP32_NBYTES,) if s.is_narrow else ())):  # the weight in fp32
        tape.make("d(x rstd)", wide)
    make_grad(tape, s, "dweight", hidden, FP32_NBYTES)
    tape.free("dh x rstd")
    kept = (*(() if dh_stays else (dh,)), f"{at}x rstd")
    if s.model.family is Family.GEMMA2:
        tape.free(*kept, f"{at}1 + weight")
        _narrow_grad(tape, s, hidden)
    else:
        cast_grad(tape, s, "dweight", hidden, FP32_NBYTES)
        tape.free(*kept)
    if s.in_place:  # of a norm that ends a branch, the sublayer's first gradient
        tape.begin_grads()
    tape.give_grad(s, "dweight", Ready(layer))

    tape.make("d(x rstd) x", wide)
    tape.make("dx", wide)
    tape.make("drstd", column)
    tape.free("d(x rstd) x", "d(x rstd)")
    if s.is_narrow:
        tape.rename("dx", "wide dx")
    else:
        give("dx")

    tape.make("rstd^3", column)
    with tape.number(FP32_NBYTES):
        tape.make("-drstd/2", column)
    tape.make("dmean", column)
    tape.free("rstd^3", "-drstd/2", "drstd", f"{at}rstd")
    with tape.number(FP32_NBYTES):
        tape.make("d(x^2)", wide)
    tape.free("dmean")
    tape.make("x^1", wide)
    with tape.number(FP32_NBYTES):
        tape.make("2x", wide)
    tape.make("dx", wide)
    tape.free("x^1", "2x", "d(x^2)")
    if s.is_narrow:
        tape.free(f"{at}wide x")
        add_grads(tape, s, "wide dx", "dx", "wide dx", wide)
        tape.make("dx", s.rows(hidden))
        tape.free("wide dx")
    elif not x_stays:
        tape.free(x)
    give("dx")


def _narrow_grad(tape: Tape, s: Sizes, numel: int) -> None:
    """Gemma-2's code casts a norm's weight to fp32 by itself, so in a narrow dtype its gradient is cast back, and from
    there to the recipe's dtype."""
    if not s.is_narrow:
        cast_grad(tape, s, "dweight", numel, FP32_NBYTES)
        return
    tape.make("narrow", numel * s.itemsize)
    cast_grad(tape, s, "narrow", numel)
    tape.free("dweight")
    tape.rename("narrow", "dweight")
