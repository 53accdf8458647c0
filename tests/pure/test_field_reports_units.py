"""Field reports on units, ranks and configurations: see test_field_reports.py, where reports 2 to 5 and 9 to 11 are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.every import exists, pairs, settings_of
from tests.pure.steps import (
    MODEL,
    UNEVEN,
    events_of,
    rest,
    rest_nbytes,
    text_of,
    units_of,
)
from zeroviz.budget import budget_row
from zeroviz.errors import SpecError
from zeroviz.gathered import fsdp_root_numel, most_gathered
from zeroviz.hf_config import model_from_config
from zeroviz.memory import rest_by_category, rest_padding_nbytes
from zeroviz.models import PRESETS, bare
from zeroviz.partition import Unit, buffers_for, padded_numel
from zeroviz.peak import peak_of
from zeroviz.precision import OWN_PRECISIONS
from zeroviz.predict import predict
from zeroviz.spec import Checkpointing, Offload, Optimizer, Precision, RunSpec, Strategy, UnitPolicy, Zero1Form
from zeroviz.tables_options import scales_nbytes
from zeroviz.trace import Category

LLAMA = PRESETS["llama3-8b"]
SHARDED = tuple(strategy for strategy in Strategy if strategy.shards_optimizer)


# ---- units ----


def test_07_the_root_holds_embedding_and_head_and_is_the_largest_unit() -> None:
    """The root unit holds embedding and head and is the largest: Llama-3-8B root 2 x 128256 x 4096 = 1,050,673,152
    parameters against 218,112,000 in a block. List units with sizes, flag it, show the re-wrapped alternative
    [torchtitan PR 182].

    FSDP's root is what no wrapped module holds: both matrices and the last norm. Here embedding and head are units of
    their own, the re-wrapped alternative, unless they are tied. A block is query and output 2 h h, key and value
    2 h (h heads_kv/heads), the MLP's 3 h f, and two norms 2 h.
    """
    h, vocab, ffn = LLAMA.hidden, LLAMA.vocab, LLAMA.ffn
    block = 2 * h * h + 2 * h * LLAMA.kv_heads * LLAMA.head_dim + 3 * h * ffn + 2 * h
    assert (2 * vocab * h, block) == (1_050_673_152, 218_112_000)
    spec = RunSpec(model=LLAMA, ranks=8, precision=Precision.BF16_MIXED)
    root = 2 * vocab * h + h
    assert fsdp_root_numel(spec) == root
    sizes = {unit.name: unit.numel for unit in units_of(spec)}
    assert sizes == {"embed": vocab * h, **{f"block {i}": block for i in range(32)}, "head": vocab * h + h}
    text = text_of(spec)
    assert f"32 x block 0 .. block 31 {block:,}" in text
    assert f"head {vocab * h + h:,} 0 largest, 7%" in text
    assert f"FSDP's root {root:,} elements, 13%, if its blocks alone are wrapped" in text
    # Smaller blocks do not help against a root, and larger ones soon hide it.
    largest = {unit: max(units_of(replace(spec, unit=UnitPolicy.parse(unit))), key=numel) for unit in WRAPPINGS}
    assert [largest[unit].name for unit in WRAPPINGS] == ["head", "head", "blocks 0-3", FIVE_BLOCKS, "model"]
    assert largest["block:4"].numel == 4 * block
    assert largest["numel:1e9"].numel == 5 * block  # the first whole number of blocks that reaches 1e9


WRAPPINGS = ("layer", "block", "block:4", "numel:1e9", "model")
FIVE_BLOCKS = "block 0 attn to block 4 mlp"


def numel(unit: Unit) -> int:
    return unit.numel


@pytest.mark.parametrize("name", ["llama3.2-1b", "gpt2", "gpt2-xl", "tiny", "tiny-llama", "llama3-70b"])
def test_07_a_root_is_every_parameter_outside_the_blocks(name: str) -> None:
    """The kind: tied or not, the root is what is in no block; a tied one is a unit here too, and the list flags the
    largest unit whichever it is."""
    spec = RunSpec(model=PRESETS[name], ranks=3, seq=8)
    in_blocks = sum(
        shape.numel for sublayer in spec.model.sublayers if sublayer.block is not None for shape in sublayer.params
    )
    root = spec.model.num_params - in_blocks
    assert fsdp_root_numel(spec) == root
    units = {unit.name: unit.numel for unit in units_of(spec)}
    assert units["root"] == root if spec.model.tied else units["embed"] + units["head"] == root
    assert ("FSDP's root" in text_of(spec)) == (not spec.model.tied)
    largest = max(units.values())
    assert f"{largest:,} {-largest % 3} largest, {largest / spec.model.num_params:.0%}" in text_of(spec)


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("name", ["tiny", "llama3-8b"])
def test_08_a_policy_that_matches_nothing_makes_one_unit(strategy: Strategy, name: str) -> None:
    """A wrap policy that matches nothing makes one unit: the peak's parameter term is the whole model. Say so
    [axolotl PR 3710].

    Where parameters are gathered that is P p beside the shard, p the parameter's width; ZeRO-2 then has the whole
    gradient before it is cut. DDP, ZeRO-1 and Megatron's optimizer hold both whole whatever the units are, and nothing
    is to be said.
    """
    spec = RunSpec(model=PRESETS[name], ranks=3, unit=MODEL, seq=16, **settings_of(strategy, 3))
    whole = padded_numel(spec.model.num_params, 3 if strategy.shards_optimizer else 1) * 4
    peak = peak_of(spec).by_category
    assert peak[Category.UNSHARDED_PARAM] == whole
    assert peak.get(Category.UNSHARDED_GRAD, 0) == whole
    said = {Strategy.ZERO2: "the whole gradient, for there is one unit"}
    said |= dict.fromkeys((Strategy.DDP, Strategy.ZERO1, Strategy.MEGATRON_OPTIM), "")
    text = text_of(spec)
    assert said.get(strategy, "gathered at once the whole model, for it is one unit; --unit block") in text
    assert ("at once" in text) == strategy.shards_grad
    # Cut into blocks the term is smaller, except where whole parameters are what the strategy keeps.
    blocks = peak_of(replace(spec, unit=UnitPolicy.parse("block"))).by_category
    if strategy is Strategy.ZERO3:
        assert blocks[Category.UNSHARDED_PARAM] < whole / 2


def test_08_the_whole_model_can_be_gathered_with_several_units_too() -> None:
    """The kind: what matters is not the number of units but how many are gathered at once. A tied root stays gathered
    around all blocks; prefetch gathers ahead; and a unit of more elements than the model is refused."""
    tiny = RunSpec(model=PRESETS["tiny"], ranks=3)

    def gathered(spec: RunSpec) -> float:
        most = most_gathered(spec)
        assert most is not None
        # The most that is gathered at once is also the most that the walk ever holds, padding apart.
        walked = max(
            itertools.accumulate(e.delta_nbytes for e in events_of(spec) if e.category is Category.UNSHARDED_PARAM)
        )
        assert walked == sum(padded_numel(unit.numel, spec.ranks) for unit in most.units) * 4
        return most.numel / spec.model.num_params

    root, block = (unit.numel for unit in units_of(tiny)[:2])
    assert gathered(tiny) == (root + block) / tiny.model.num_params
    three = replace(tiny, unit=UnitPolicy.parse("block:3"))
    assert (len(units_of(three)), gathered(three)) == (2, 1)
    assert "gathered at once the whole model: root and blocks 0-2" in text_of(three)
    assert gathered(replace(tiny, prefetch=2)) == 1
    assert gathered(replace(tiny, strategy=Strategy.SHARD_GRAD_OP)) == 1
    assert gathered(RunSpec(model=PRESETS["tiny-llama"], ranks=2)) < 0.4
    with pytest.raises(SpecError, match="use numel:K with K up to 133106, or model"):
        replace(tiny, unit=UnitPolicy.parse("numel:1e6"))


# ---- parameters and ranks ----


def test_12_tied_embeddings_are_one_parameter() -> None:
    """Tied embeddings are one parameter: Llama-3.2-1B is 1,235,814,400, not 1,498,482,688 [torchtitan PR 3225]."""
    tied = PRESETS["llama3.2-1b"]
    assert tied.num_params == 1_235_814_400
    assert tied.num_params + tied.vocab * tied.hidden == 1_498_482_688
    assert replace(tied, tied=False).num_params == 1_498_482_688


@pytest.mark.parametrize("name", ["gpt2", "tiny", "tiny-llama", "llama3-8b"])
def test_12_a_tied_matrix_is_held_updated_and_sent_once(name: str) -> None:
    """The kind: tying saves vocab x hidden parameters at rest, in optimizer state and in the reduction."""
    for strategy, precision in pairs():
        settings = settings_of(strategy, 2)
        one, two = (
            RunSpec(model=replace(PRESETS[name], tied=tied), ranks=2, precision=precision, seq=8, **settings)
            for tied in (True, False)
        )
        matrix = one.model.vocab * one.model.hidden
        copies = [sum(rest_nbytes(spec) - rest_padding_nbytes(spec, rank) for rank in range(2)) for spec in (one, two)]
        shares = copies[1] / two.model.num_params
        assert copies[1] - copies[0] == shares * matrix
        sent = [
            sum(c.payload_nbytes for c in predict(spec).ranks[0].collectives if c.phase == "backward")
            - sum(
                c.payload_nbytes
                for c in predict(spec).ranks[0].collectives
                if c.op.value == "all_gather" and c.phase == "backward"
            )
            for spec in (one, two)
        ]
        # Padding is at most one element a unit on two ranks.
        assert abs(sent[1] - sent[0] - matrix * precision.grad.itemsize) <= 2 * precision.grad.itemsize


def test_13_one_rank_holds_the_same_in_every_strategy_and_sends_nothing() -> None:
    """N = 1: every strategy holds the same, sends nothing, and no (N-1)/N divides by zero [pytorch 90050].

    At rest; what ZeRO-3 copies from its shard into its full buffers it copies for one rank too, and its peak says so.
    """
    for name, precision, unit in itertools.product(UNEVEN, OWN_PRECISIONS, ("model", "block", "layer")):
        spec = RunSpec(model=PRESETS[name], ranks=1, precision=precision, unit=UnitPolicy.parse(unit))
        for strategy in Strategy:
            if not exists(strategy, precision):
                continue
            one = replace(spec, **settings_of(strategy, 1))
            (rank,) = predict(one).ranks
            assert rank.rest_nbytes == precision.bytes_per_param * one.model.num_params
            assert (rank.collectives, rank.wire(), rank.sent_nbytes, rank.padding_nbytes) == ((), (), 0, 0)
            assert "ON THE WIRE, each rank: nothing; one rank has nobody to send to." in text_of(one)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"accumulation": 3},
    {"accumulation": 2, "no_sync": True},
    {"offload": Offload.OPTIMIZER},
    {"checkpointing": Checkpointing(2)},
    {"optimizer": Optimizer.ADAMW_8BIT},
    {"optimizer": Optimizer.SGD},
    {"async_reduce": True},
)


@pytest.mark.parametrize("settings", OPTIONS, ids=str)
def test_13_with_every_option_and_every_command_as_well(settings: dict[str, Any]) -> None:
    """The kind: no option makes one rank send, no strategy makes it rest otherwise, and a budget answers."""
    at_rest = set()
    for strategy in (each for each in Strategy if exists(each, settings=settings)):
        spec = RunSpec(model=PRESETS["tiny-llama"], ranks=1, **settings_of(strategy, 1), **settings)
        at_rest.add(rest_nbytes(spec) - scales_nbytes(spec))  # of a block of one buffer: the last one is shared
        assert predict(spec).ranks[0].collectives == ()
        row = budget_row(spec, peak_of(spec).total)
        assert row.smallest_ranks.value == 1
        assert row.largest_batch is not None and row.largest_batch.value is not None
        # Where all elements are updated at once the update may be the peak, and room is left for another sequence.
        assert row.largest_batch.value == 1 or peak_of(spec).phase == "optimizer"
    assert len(at_rest) == 1


def test_15_what_zero1_saves_of_momentum_is_one_less_than_n_parts() -> None:
    """With momentum SGD and 4 ranks, ZeRO-1 saves 250 MB x (1 - 1/4) = 187.5 on a 250 MB model; a thread's mental
    arithmetic said 125 [mmengine PR 551].

    62.5e6 fp32 parameters are 250 MB, and so is their momentum; each rank keeps a quarter of it.
    """
    mb, ranks = 10**6, 4
    ddp = RunSpec(
        model=bare(250 * mb // 4), strategy=Strategy.DDP, ranks=ranks, unit=MODEL, optimizer=Optimizer.SGD_MOMENTUM
    )
    assert rest(ddp, Category.OPTIMIZER_STATE) == 250 * mb
    saved = rest_nbytes(ddp) - rest_nbytes(replace(ddp, strategy=Strategy.ZERO1))
    assert saved == 250 * mb * (ranks - 1) // ranks == 187_500_000


@pytest.mark.parametrize("optimizer", [kind for kind in Optimizer if kind.runs])
@pytest.mark.parametrize("name", UNEVEN)
def test_15_and_so_for_every_optimizer_and_every_n(optimizer: Optimizer, name: str) -> None:
    """The kind: of M bytes of state ZeRO-1 saves M (1 - 1/N), less what its padding costs: whole parameters and
    gradients have it on every rank, and the state in one place of all."""
    for ranks in (1, 2, 3, 4, 7, 64):
        ddp = RunSpec(model=PRESETS[name], strategy=Strategy.DDP, ranks=ranks, optimizer=optimizer)
        zero1 = replace(ddp, strategy=Strategy.ZERO1)
        state = optimizer.num_moments * 4 * ddp.model.num_params
        assert rest(ddp, Category.OPTIMIZER_STATE) == state
        unpadded = sum(rest_nbytes(zero1) - rest_padding_nbytes(zero1, rank) for rank in range(ranks))
        assert ranks * rest_nbytes(ddp) - unpadded == (ranks - 1) * state


@pytest.mark.parametrize("name", [*UNEVEN, "gpt2", "llama3-8b"])
def test_16_shard_grad_op_rests_sharded_and_pays_at_the_peak(name: str) -> None:
    """SHARD_GRAD_OP rests sharded (like FULL_SHARD); its price is at the peak. It is not the paper's ZeRO-2
    [distributed-training-guide 38].

    At rest 16 P/N against ZeRO-2's 2 P + 14 P/N. At any moment the difference to FULL_SHARD is what is gathered on top:
    up to all units instead of the one in use. On the wire it saves the second gather.
    """
    for precision, ranks in itertools.product(OWN_PRECISIONS, (2, 3, 8)):
        full = RunSpec(model=PRESETS[name], strategy=Strategy.ZERO3, ranks=ranks, precision=precision, seq=16)
        kept, zero2 = replace(full, strategy=Strategy.SHARD_GRAD_OP), replace(full, strategy=Strategy.ZERO2)
        assert rest_by_category(kept) == rest_by_category(full)
        p = precision.param.itemsize
        whole = p * sum(padded_numel(unit.numel, ranks) for unit in units_of(full))
        assert rest_nbytes(zero2) - rest_nbytes(kept) == whole - whole // ranks
        gathered = [e.delta_nbytes for e in predict(kept).ranks[0].events if e.category is Category.UNSHARDED_PARAM]
        assert max(itertools.accumulate(gathered)) == whole
        high, low = peak_of(kept), peak_of(full)
        in_use = next(unit for unit in units_of(full) if unit.name == high.unit)
        assert 0 < high.total - low.total <= whole - p * in_use.numel
        gathers, once = (
            sum(c.payload_nbytes for c in predict(spec).ranks[0].collectives if c.op.value == "all_gather")
            for spec in (full, kept)
        )
        assert (gathers, once) == (2 * whole, whole)
        assert "gathered at once the whole model, at the end of forward" in text_of(kept)


# ---- partition ----


def test_18_the_right_padding_is_minus_n_modulo_ranks() -> None:
    """The right padding is (-n) % N; n % N is the classic wrong one: 72 over 7 pads 5, not 2 [Muon 30]."""
    assert (padded_numel(72, 7) - 72, -72 % 7, 72 % 7) == (5, 5, 2)
    assert (72 + 72 % 7) % 7  # what the wrong one gives cannot be cut into 7


def test_18_padding_is_the_least_that_n_divides() -> None:
    """The kind: for every numel and N the padded buffer is the smallest multiple of N that holds it, and each of the
    walk's buffers and shards is so padded."""
    for count, ranks in itertools.product(range(1, 90), range(1, 40)):
        padded = padded_numel(count, ranks)
        assert padded % ranks == 0
        assert 0 <= padded - count < ranks
    for name, strategy, ranks in itertools.product(UNEVEN, SHARDED, (2, 3, 5, 7, 11)):
        settings = settings_of(strategy, ranks)
        spec = RunSpec(model=PRESETS[name], ranks=ranks, optimizer=Optimizer.SGD_MOMENTUM, **settings)
        least = sum(buffer.numel + -buffer.numel % ranks for buffer in buffers_for(spec))
        assert rest(spec, Category.OPTIMIZER_STATE) * ranks == 4 * least


# ---- configurations ----

LLAMA2_CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
}
GPT2_CONFIG = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}


def num_params(config: dict[str, Any], **fields: Any) -> int:
    return model_from_config({**config, **fields}, name="m").num_params


def test_27_what_a_config_leaves_out_is_the_familys_default() -> None:
    """num_key_value_heads missing means equal to num_attention_heads; head_dim missing means hidden / heads (must be
    whole); the real config may sit in `text_config`; tie_word_embeddings missing is the family's default, not false;
    GPT-2 names its fields n_embd, n_layer, n_head.

    Both counts are published: 6,738,415,616 of Llama-2-7B, whose config has neither field, and 124,439,808 of GPT-2,
    whose config does not say that it is tied: untied it would be 50257 x 768 more.
    """
    assert num_params(LLAMA2_CONFIG) == PRESETS["llama2-7b"].num_params == 6_738_415_616
    assert num_params(LLAMA2_CONFIG, num_key_value_heads=32, head_dim=4096 // 32) == 6_738_415_616
    assert num_params({"model_type": "any", "text_config": LLAMA2_CONFIG}) == 6_738_415_616
    assert num_params(GPT2_CONFIG) == PRESETS["gpt2"].num_params == 124_439_808
    assert num_params(GPT2_CONFIG, tie_word_embeddings=False) == 124_439_808 + 50257 * 768
    assert num_params(LLAMA2_CONFIG, tie_word_embeddings=True) == 6_738_415_616 - 32000 * 4096
    with pytest.raises(SpecError, match=r"hidden_size = 4100 .* the second must divide the first \(4100 % 32 = 4\)"):
        num_params(LLAMA2_CONFIG, hidden_size=4100)


@pytest.mark.parametrize("heads", [4, 32, 33])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_27_a_missing_field_and_a_null_are_not_the_same_everywhere(family: str, heads: int) -> None:
    """The kind: Mistral's default is 8 key-value heads, but null means one for each head there too, as in Llama.

    A layer has 2 h (kv d) parameters for key and value, with d a head's width.
    """
    config = {**LLAMA2_CONFIG, "model_type": family, "num_attention_heads": heads, "head_dim": 10}

    def kv_heads(**fields: Any) -> int:
        one = num_params(config, num_key_value_heads=1)
        return 1 + (num_params(config, **fields) - one) // (32 * 2 * 4096 * 10)

    assert kv_heads(num_key_value_heads=None) == heads
    if family == "llama" or heads % 8 == 0:
        assert kv_heads() == (heads if family == "llama" else 8)
    else:
        with pytest.raises(SpecError, match=f"{heads} attention heads and 8 key-value heads; the second must divide"):
            kv_heads()


def test_27_a_nested_config_may_not_contradict_itself() -> None:
    """Loaders differ in whose tie_word_embeddings they follow, and an embedding of parameters depends on it."""
    nested = {"model_type": "any", "text_config": LLAMA2_CONFIG}
    assert num_params(nested, tie_word_embeddings=False) == 6_738_415_616
    assert num_params(nested, tie_word_embeddings=None) == 6_738_415_616
    with pytest.raises(SpecError, match="= True outside 'text_config' and means False inside it; set it in"):
        num_params(nested, tie_word_embeddings=True)
    tied = {"text_config": {**GPT2_CONFIG}, "tie_word_embeddings": False}
    with pytest.raises(SpecError, match="= False outside 'text_config' and means True inside it"):
        num_params(tied)


# ---- the wire ----


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_24_zero1_by_all_reduce_sends_3p_and_by_reduce_scatter_2p(ranks: int) -> None:
    """(N-1)/N of P elements for a reduce-scatter or an all-gather, twice that for an all-reduce, P being padded. A
    well-known small trainer all-reduced first and was mended [llm.c PR 421]; here the form is a toggle, and said."""
    for name in UNEVEN:
        spec = RunSpec(model=PRESETS[name], strategy=Strategy.ZERO1, ranks=ranks)
        whole = 4 * sum(padded_numel(unit.numel, ranks) for unit in units_of(spec))
        for form, times in ((Zero1Form.REDUCE_SCATTER, 2), (Zero1Form.ALL_REDUCE, 3)):
            asked = replace(spec, zero1_form=form)
            assert predict(asked).ranks[0].sent_nbytes == times * whole * (ranks - 1) // ranks
            assert ("zero1 form all-reduce" in text_of(asked)) == (form is Zero1Form.ALL_REDUCE)
