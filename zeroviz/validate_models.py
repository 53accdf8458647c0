"""The published tables, worked out by zeroviz's own arithmetic where it has it, else by a formula written out."""

from __future__ import annotations

from fractions import Fraction

from zeroviz import estimators, facts, references
from zeroviz.formula import evaluate
from zeroviz.models import PRESETS, Family, ModelShape
from zeroviz.predict import predict
from zeroviz.spec import Precision, RunSpec, Strategy
from zeroviz.trace import Category
from zeroviz.validate_rows import Group, Row, figure_text


def param_counts() -> Group:
    rows = []
    for name, sizes in facts.MODEL_SIZES.items():
        # Rotary models keep no table of positions, so their longest sequence counts nothing.
        fields = {"positions": 1, **sizes, "family": Family(sizes["family"])}
        models = {"preset": PRESETS[name], "from its sizes": ModelShape(name=name, **fields)}
        rows += [
            Row(
                id=f"{name} {what}",
                what=f"{name}, {what}",
                expected=facts.NUM_PARAMS[name],
                got=model.num_params,
                unit="params",
                by="models.ModelShape.num_params",
            )
            for what, model in models.items()
        ]
    return Group(
        name="param_counts",
        reference=references.MODEL_CONFIGS,
        about="Parameters, a tied embedding counted once: of the preset, and of the published sizes",
        rows=tuple(rows),
    )


def activation_formula() -> Group:
    gpt3 = {**facts.GPT3, "b": 1}
    gpt2 = {"s": 1024, "b": 1, "h": PRESETS["gpt2"].hidden, "a": PRESETS["gpt2"].heads}

    def row(name: str, what: str, expected: str, got: Fraction | int, unit: str, by: str) -> Row:
        is_product = by.startswith("predict")
        return Row(id=name, what=what, expected=expected, got=got, unit=unit, by=by, is_product=is_product)

    def layer(names: dict[str, int]) -> str:
        return figure_text(evaluate(facts.ACTIVATION_FORMULA, names))

    terms = estimators.korthikanti_layer_nbytes(gpt3["s"], gpt3["b"], gpt3["h"], gpt3["a"])
    by = "estimators.korthikanti_layer_nbytes"
    softmax = Fraction(terms, gpt3["s"] * gpt3["b"] * gpt3["h"]) - 34
    # Our kernels have no dropout (two masks, 2 h) and keep of the (s, s) softmax only its logsumexp (4 a, not 5 a s);
    # the two norms' statistics (8) are left out of the published count.
    s, b, h, a = gpt2["s"], gpt2["b"], gpt2["h"], gpt2["a"]
    ours = kept_by_a_gpt2_block(s, b) + s * b * (2 * h + 5 * a * s - 4 * a - 8)
    return Group(
        name="activation_formula",
        reference=references.ACTIVATIONS,
        place="section 4.1",
        about="s b h (34 + 5 a s / h) bytes a layer in 16 bits. Not for SwiGLU, grouped-query attention, or fused "
        "attention that keeps only the log-sum-exp",
        rows=(
            row("GPT-3 5as/h", "5as/h of GPT-3", facts.GPT3_5AS_OVER_H, softmax, "", by),
            row("GPT-3 layer", "a layer of GPT-3, b=1, term by term", layer(gpt3), terms, "B", by),
            row(
                "gpt2 block",
                "gpt2 block here + dropout + softmax",
                layer(gpt2),
                ours,
                "B",
                "predict.predict, plus what its kernels do not keep",
            ),
        ),
    )


def kept_by_a_gpt2_block(seq: int, batch: int) -> int:
    """Bytes that stand after the forward of one gpt2 block in bf16, by zeroviz's account of the operators."""
    spec = RunSpec(
        model=PRESETS["gpt2"], strategy=Strategy.DDP, ranks=1, precision=Precision.BF16_MIXED, batch=batch, seq=seq
    )
    (rank,) = predict(spec).ranks
    return sum(
        event.delta_nbytes
        for event in rank.events
        if (event.phase, event.unit, event.category) == ("forward", "block 0", Category.ACTIVATION)
    )


def gpu_capacity() -> Group:
    return Group(
        name="gpu_capacity_bytes",
        reference=references.GPU_CAPACITIES,
        about='What "GB" on the label means: GiB for the first three. The H200\'s figure is the 143,771 MiB that '
        "nvidia-smi lists, more than 141 GB and less than 141 GiB",
        rows=tuple(
            Row(
                id=name,
                what=f"{name} = {formula}",
                expected=str(facts.GPU_CAPACITY_NBYTES[name]),
                got=evaluate(formula),
                unit="B",
                by=formula,
                is_product=False,
            )
            for name, formula in facts.GPU_CAPACITY_FORMULAS.items()
        ),
    )
