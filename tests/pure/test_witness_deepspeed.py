"""DeepSpeed by arithmetic: parts, chunks, buckets, gathers and the wire as derived by hand; what is refused; extras."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from zeroviz import extras
from zeroviz.category import Category
from zeroviz.cli import main
from zeroviz.collectives import CollectiveOp
from zeroviz.errors import SpecError
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.rank_trace import RankTrace
from zeroviz.settings import Settings
from zeroviz.spec import Checkpointing, DType, Implementation, Offload, Optimizer, Precision, RunSpec, Strategy
from zeroviz.witness import deepspeed_gathers
from zeroviz.witness.deepspeed_flat import Bucketed
from zeroviz.witness.deepspeed_gathers import Act, deeds_of
from zeroviz.witness.deepspeed_parts import chunk_numel, flat_numel, is_persistent, part_numel

TINY, LLAMA, GPT2 = PRESETS["tiny"], PRESETS["tiny-llama"], PRESETS["gpt2"]
P = TINY.num_params
STAGES = (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3)


def deepspeed(strategy: Strategy, ranks: int = 3, **settings: Any) -> RunSpec:
    return RunSpec(
        impl=Implementation.DEEPSPEED, strategy=strategy, ranks=ranks, **{"model": TINY, "seq": 17, **settings}
    )


def first(spec: RunSpec) -> RankTrace:
    return predict(spec).ranks[0]


def payloads(rank: RankTrace, op: CollectiveOp) -> list[int]:
    return [call.payload_nbytes for call in rank.collectives if call.op is op]


# ---- at rest ----


def test_the_flat_tensor_is_padded_to_two_elements_a_rank() -> None:
    """133,106 over 3 ranks: the next multiple of 6 is 133,110; each owns 44,370 and the last 4 of padding."""
    spec = deepspeed(Strategy.ZERO1)
    assert (P, flat_numel(spec), part_numel(spec)) == (133_106, 133_110, 44_370)
    # In fp32: 4 whole padding elements of the parameters on each rank; of the last rank's part 4 times 4 + 8 bytes.
    assert [rank.padding_nbytes for rank in predict(spec).ranks] == [16, 16, 16 + 4 * 12]


@pytest.mark.parametrize("strategy", [Strategy.ZERO1, Strategy.ZERO2])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_stages_1_and_2_rest_alike_and_fp32_keeps_a_master_too(strategy: Strategy, ranks: int) -> None:
    """4P + 4P/N + 8P/N in fp32, 2P + 12P/N in bf16, of the padded P, and the norm's 4 bytes; no gradient at all."""
    for precision, width in ((Precision.FP32, 4), (Precision.BF16_MIXED, 2)):
        spec = deepspeed(strategy, ranks, precision=precision)
        flat = -(-P // (2 * ranks)) * 2 * ranks
        assert first(spec).rest == {
            Category.UNSHARDED_PARAM: width * flat,
            Category.MASTER_PARAM: 4 * flat // ranks,
            Category.OPTIMIZER_STATE: 8 * flat // ranks,
            Category.TEMPORARY: 4,
        }
        assert first(spec).step_counter_nbytes == 4


def test_fp32_gradients_of_bf16_parameters_are_whole_under_stage_1_and_nowhere_under_stage_2() -> None:
    """2P + 4P + 12P/N against 2P + 12P/N."""
    whole, cut = (
        first(deepspeed(stage, 2, precision=Precision.BF16_FP32GRAD)).rest for stage in (Strategy.ZERO1, Strategy.ZERO2)
    )
    assert whole[Category.UNSHARDED_GRAD] == 4 * flat_numel(deepspeed(Strategy.ZERO1, 2))
    assert {category: nbytes for category, nbytes in whole.items() if category is not Category.UNSHARDED_GRAD} == cut


def test_stage_0_is_data_parallel_and_bf16_has_a_master() -> None:
    assert first(deepspeed(Strategy.DDP)).rest == {Category.UNSHARDED_PARAM: 4 * P, Category.OPTIMIZER_STATE: 8 * P}
    assert first(deepspeed(Strategy.DDP, precision=Precision.BF16_MIXED)).rest == {
        Category.UNSHARDED_PARAM: 2 * P,
        Category.MASTER_PARAM: 4 * P,
        Category.OPTIMIZER_STATE: 8 * P,
    }


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED, Precision.BF16_FP32GRAD])
def test_stage_3_rests_in_chunks_with_its_bucket(precision: Precision) -> None:
    """Each parameter in 3 chunks of ceil(numel / 3); parameters and gradients in their dtypes, master and moments fp32;
    the bucket is as large as it is told, in the parameters' dtype."""
    spec = deepspeed(Strategy.ZERO3, precision=precision, settings=Settings(bucket_numel=777, persistence_numel=55))
    owned = sum(-(-shape.numel // 3) for shape in TINY.params)
    whole = sum(57 for shape in TINY.params if shape.numel == 55)  # 55 in 3 chunks of 19
    param, grad = spec.recipe.param.itemsize, spec.recipe.grad.itemsize
    assert first(spec).rest == {
        Category.SHARDED_PARAM: param * owned,
        Category.UNSHARDED_PARAM: param * whole,
        Category.SHARDED_GRAD: grad * owned,
        Category.MASTER_PARAM: 4 * owned,
        Category.OPTIMIZER_STATE: 8 * owned,
        Category.BUCKET: param * 777,
        Category.TEMPORARY: 9,
    }


def test_chunks_pad_the_last_ranks() -> None:
    """55 elements over 4 ranks: chunks of 14, the last with 13 and one of padding. 1 over 4: three of padding."""
    assert chunk_numel(55, 4) == 14 and chunk_numel(1, 4) == 1
    spec = deepspeed(Strategy.ZERO3, 4, settings=Settings(persistence_numel=0))
    padding = [sum(_pad(shape.numel, 4, rank) for shape in TINY.params) for rank in range(4)]
    assert [rank.padding_nbytes for rank in predict(spec).ranks] == [number * (4 + 4 + 4 + 8) for number in padding]
    assert padding[0] == 0 < padding[3]


def _pad(numel: int, ranks: int, rank: int) -> int:
    chunk = -(-numel // ranks)
    return sum(index >= numel for index in range(rank * chunk, (rank + 1) * chunk))


def test_what_stays_whole_by_default_is_all_of_a_tiny_model() -> None:
    """1e5 elements: every parameter of tiny, and of gpt2 all but the matrices, which have 768 * 768 or more."""
    assert all(is_persistent(deepspeed(Strategy.ZERO3), shape) for shape in TINY.params)
    spec = deepspeed(Strategy.ZERO3, model=GPT2)
    assert {shape.name.rpartition(".")[2] for shape in GPT2.params if not is_persistent(spec, shape)} == {"weight"}


# ---- the bucket ----


def most_in_backward(spec: RunSpec) -> int:
    """Bytes the device holds at most in backward."""
    rank = first(spec)
    total, most = rank.rest_nbytes, 0
    for event in rank.events:
        total += event.delta_nbytes if event.category.on_device else 0
        most = max(most, total if event.phase == "backward" else 0)
    return most


@pytest.mark.parametrize(("name", "pays"), [("gpt2", False), ("gpt2-large", False), ("gpt2-xl", True)])
def test_06_the_default_bucket_outweighs_what_stage_2_saves_below_a_billion_parameters(name: str, pays: bool) -> None:
    """Field report 6. Beside a ZeRO-1 that reduces in place, stage 2 in bf16 saves 2P - 2P/N of gradient. It holds a
    bucket of 5e8 elements, 1 GB, whatever the model, and what is in it once more as it goes out, up to another: with
    N = 8 that pays from 2e9 = 2P * 7/8 on, P = 1.14e9. gpt2 has 0.12e9 parameters, large 0.77e9 and xl 1.56e9."""
    spec = deepspeed(Strategy.ZERO2, 8, model=PRESETS[name], precision=Precision.BF16_MIXED)
    beside = replace(spec, impl=Implementation.OWN, strategy=Strategy.ZERO1)
    assert (most_in_backward(spec) < most_in_backward(beside)) is pays
    assert (spec.model.num_params > 1e9 * 8 / 7) is pays
    # A bucket of the size of the model's parts, and it always pays.
    small = replace(spec, settings=Settings(bucket_numel=2_000_000))
    assert most_in_backward(small) < most_in_backward(beside)


def test_stage_3_holds_the_bucket_between_steps() -> None:
    assert first(deepspeed(Strategy.ZERO3)).rest[Category.BUCKET] == 4 * 500_000_000


@pytest.mark.parametrize("model", [TINY, LLAMA, GPT2])
def test_stage_1_has_the_same_bucket_so_stage_2_never_needs_more_than_it(model: Any) -> None:
    """In 0.19.8; in the release of field report 6 stage 1 had none."""
    for settings in (Settings(), Settings(bucket_numel=100_000)):
        one, two = (first(deepspeed(stage, 2, model=model, settings=settings)) for stage in STAGES[1:3])
        assert two.peak().total <= one.peak().total


def test_stage_1_holds_whole_gradients_between_micro_steps_and_stage_2_does_not() -> None:
    """When the first of two micro-batches is over: 4P of gradients, or its owner's, 4P/N and a little."""
    for stage, category, least in (
        (Strategy.ZERO1, Category.UNSHARDED_GRAD, 4 * P),
        (Strategy.ZERO2, Category.SHARDED_GRAD, 4 * P // 2),
    ):
        rank = first(deepspeed(stage, 2, accumulation=2, settings=Settings(bucket_numel=20_000)))
        held, between = 0, -1
        for event in rank.events:
            if event.op == "load batch" and held and between < 0:
                between = held
            held += event.delta_nbytes if event.category is category else 0
        assert least <= between < least + 4 * 60_000
        assert held == 0


# ---- the wire ----


@pytest.mark.parametrize("strategy", [Strategy.ZERO1, Strategy.ZERO2])
@pytest.mark.parametrize("bucket_numel", [500_000_000, 20_000, 5_000])
def test_24_stages_1_and_2_all_reduce_and_gather(strategy: Strategy, bucket_numel: int) -> None:
    """As written: an all-reduce of the gradient (2P), not a reduce-scatter, and an all-gather of the padded parameters
    (P): the naive 3P, whichever the stage. And one number, the norm."""
    rank = first(deepspeed(strategy, settings=Settings(bucket_numel=bucket_numel)))
    *gradient, norm = payloads(rank, CollectiveOp.ALL_REDUCE)
    assert sum(gradient) == 4 * P and norm == 4
    assert payloads(rank, CollectiveOp.ALL_GATHER) == [4 * flat_numel(deepspeed(strategy))]
    assert (len(gradient) == 1) is (bucket_numel > P)
    assert payloads(rank, CollectiveOp.REDUCE_SCATTER) == []


def test_stage_2_reduces_every_micro_batch_and_stage_1_the_last() -> None:
    for stage, times in ((Strategy.ZERO1, 1), (Strategy.ZERO2, 3)):
        rank = first(deepspeed(stage, accumulation=3))
        assert sum(payloads(rank, CollectiveOp.ALL_REDUCE)) == times * 4 * P + 4


def test_a_million_parts_are_cut_as_a_few_are() -> None:
    """Cut where parts begin, the slices of a bucket are the gradients in it again, whatever N; and each call is the
    first to have more than the bucket holds, or the last."""
    for ranks, bucket in ((3, 1000), (64, 1000), (64, 50_001), (2**20, 1000), (2**20, 5 * 10**8)):
        spec = deepspeed(Strategy.ZERO2, ranks, model=GPT2, settings=Settings(bucket_numel=bucket))
        walk = Bucketed(spec, 0)
        shapes = list(walk._start)
        runs = walk._slices(shapes)
        assert sum(run.num * run.numel for run in runs) == GPT2.num_params
        assert all(one.stop <= other.owner for one, other in pairwise(runs))
        assert all(run.numel <= walk.part for run in runs) and all(
            run.numel == walk.part for run in runs if run.num > 1
        )
        calls = list(walk._calls(runs))
        numels = [sum(run.num * run.numel for run in call) for call in calls]
        assert sum(numels) == GPT2.num_params
        for call, numel in zip(calls[:-1], numels, strict=False):
            assert numel - call[-1].numel <= bucket < numel
    assert first(deepspeed(Strategy.ZERO2, 2**20, model=GPT2)).rest_nbytes > 0


def test_fp32_gradients_are_reduced_in_bf16() -> None:
    for stage in STAGES[1:]:
        rank = first(deepspeed(stage, precision=Precision.BF16_FP32GRAD))
        big = [call for call in rank.collectives if call.payload_nbytes > 4]
        assert {call.dtype for call in big} == {DType.BF16.value}


def test_a_small_model_is_gathered_once_under_stage_3() -> None:
    """What does not stay whole in one call, and each of the rest once after the update: P in all, and P reduced."""
    spec = deepspeed(Strategy.ZERO3, settings=Settings(persistence_numel=1000))
    rank = first(spec)
    padded = sum(3 * chunk_numel(shape.numel, 3) for shape in TINY.params)
    gathers = payloads(rank, CollectiveOp.ALL_GATHER)
    assert sum(gathers) == 4 * padded
    assert len(gathers) == 1 + sum(shape.numel <= 1000 for shape in TINY.params)
    assert payloads(rank, CollectiveOp.REDUCE_SCATTER) == [4 * padded]


def test_a_large_model_is_gathered_again_in_backward() -> None:
    """Where less may be whole at a time than there is, forward frees it: 2P of the gathers, as FSDP with reshard."""
    spec = deepspeed(Strategy.ZERO3, 64, model=PRESETS["llama3-70b"], precision=Precision.BF16_MIXED)
    rank = first(spec)
    assert 1.9 < sum(payloads(rank, CollectiveOp.ALL_GATHER)) / (2 * spec.model.num_params) < 2.0
    rank.check()


# ---- gathers ----


def test_limits_decide_what_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for everything: one gather as forward begins, copied out once, nothing freed before backward. With none
    to gather ahead: each module's own parameters, as it begins."""
    spec = deepspeed(Strategy.ZERO3, settings=Settings(persistence_numel=0))
    deeds = deeds_of(spec)
    (gather,) = [deed for log in deeds.forward_begin.values() for deed in log if deed.act is Act.GATHER]
    assert {shape.name for shape in gather.shapes} == {shape.name for shape in TINY.params}
    assert not any(log for log in deeds.forward_end.values())
    for name in ("PREFETCH_NUMEL", "REUSE_NUMEL"):
        monkeypatch.setattr(deepspeed_gathers, name, 0)
    deeds = deeds_of(spec)
    gathers = [deed for log in deeds.forward_begin.values() for deed in log if deed.act is Act.GATHER]
    assert max(len(deed.shapes) for deed in gathers) == 2  # a weight and its bias
    freed = [shape.name for log in deeds.forward_end.values() for deed in log for shape in deed.shapes]
    assert "h.0.mlp.c_fc.weight" in freed


@pytest.mark.parametrize("model", [TINY, LLAMA, replace(TINY, tied=False), replace(LLAMA, tied=True, mlp_bias=True)])
@pytest.mark.parametrize("limits", [(0, 0, 0), (10_000, 30_000, 40_000), (10**9, 10**9, 10**9)])
@pytest.mark.parametrize("threshold", [0, 60, 10**6])
def test_what_is_gathered_is_copied_and_freed(
    model: Any, limits: tuple[int, int, int], threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the limits: no byte is freed twice or left, and each parameter is whole when its module runs."""
    for name, limit in zip(("PREFETCH_NUMEL", "LIVE_NUMEL", "REUSE_NUMEL"), limits, strict=True):
        monkeypatch.setattr(deepspeed_gathers, name, limit)
    for ranks in (2, 3):
        spec = deepspeed(
            Strategy.ZERO3, ranks, model=model, accumulation=2, settings=Settings(persistence_numel=threshold)
        )
        predict.cache_clear()
        for rank in predict(spec).ranks:
            rank.check()
    predict.cache_clear()


# ---- every spec that is accepted ----


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED, Precision.BF16_FP32GRAD])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 64])
def test_every_step_ends_where_it_began(strategy: Strategy, precision: Precision, ranks: int) -> None:
    if strategy is Strategy.DDP and precision is Precision.BF16_FP32GRAD:
        return
    for optimizer in (Optimizer.ADAMW, Optimizer.SGD):
        spec = deepspeed(strategy, ranks, precision=precision, optimizer=optimizer, accumulation=2)
        for rank in predict(spec).ranks:
            rank.check()
            assert (rank.sent_nbytes == 0) is (ranks == 1)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("strategy", "settings", "words"),
    [
        (Strategy.SHARD_GRAD_OP, {}, "DeepSpeed has ddp and zero1 and zero2 and zero3 here"),
        (Strategy.ZERO2, {"precision": Precision.BF16}, "use fp32 or bf16-mixed or bf16-fp32grad"),
        (Strategy.DDP, {"precision": Precision.BF16_FP32GRAD}, "stage 0, which has no fp32 gradients"),
        (Strategy.DDP, {"settings": Settings(bucket_numel=10)}, "bucket_numel is 10 with impl deepspeed, strategy ddp"),
        (Strategy.ZERO2, {"settings": Settings(persistence_numel=10)}, "persistence_numel is 10 with impl deepspeed"),
        (
            Strategy.ZERO1,
            {"settings": Settings(bucket_numel=10), "precision": Precision.BF16_FP32GRAD},
            "precision bf16-fp32grad, which does not look at it",
        ),
        (Strategy.ZERO3, {"offload": Offload.OPTIMIZER}, "offload is 'optimizer'"),
        (Strategy.ZERO3, {"checkpointing": Checkpointing.parse("block:1")}, "checkpointing is 'block"),
        (Strategy.ZERO2, {"grad_dtype": DType.BF16}, "grad_dtype is 'bf16'"),
        (
            Strategy.ZERO2,
            {"accumulation": 2, "no_sync": True},
            "no_sync is true .* always reduces in every micro-batch",
        ),
        (Strategy.DDP, {"accumulation": 2, "no_sync": False}, "no_sync is false .* always reduces in the last"),
        (Strategy.ZERO1, {"clip_norm": 1.0}, "clip_norm is 1.0"),
    ],
)
def test_what_it_has_not_got_is_refused(strategy: Strategy, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words) as refusal:
        deepspeed(strategy, **settings)
    assert "deepspeed" in str(refusal.value) and str(refusal.value).endswith(".")


# ---- the extra ----


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)


LINE = "pip install -c constraints.txt -e '.[deepspeed]'"


def test_an_absent_extra_is_refused_with_the_line_that_installs_it(without_deepspeed: None) -> None:
    with pytest.raises(SpecError) as refusal:
        extras.check_installed(Implementation.DEEPSPEED)
    assert LINE in str(refusal.value)
    extras.check_installed(Implementation.FSDP2)


def test_run_says_so_before_anything_is_started(
    without_deepspeed: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cluster.session import Pool

    monkeypatch.setattr(Pool, "__init__", lambda *_: pytest.fail("engines were started"))
    assert main(["run", "--impl", "deepspeed", "--strategy", "zero2"]) != 0
    assert LINE in " ".join(capsys.readouterr().err.split())


def test_prediction_needs_no_extra(without_deepspeed: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--impl", "deepspeed", "--strategy", "zero2"]) == 0
    assert "BUCKET" in capsys.readouterr().out


def test_the_doctor_lists_every_implementation(without_deepspeed: None) -> None:
    from cluster.doctor import Findings, implementations

    checks = {check.name: check for check in implementations()}
    assert list(checks) == [f"impl {impl.value}" for impl in Implementation]
    absent = checks["impl deepspeed"]
    assert (absent.ok, absent.word) == (True, "absent") and LINE in absent.detail
    assert "torch" in checks["impl fsdp2"].detail and checks["impl own"].detail == "this repository"
    text = Findings(tuple(checks.values())).render()
    assert "absent" in text and max(map(len, text.splitlines())) <= 80


def test_the_library_is_imported_only_to_be_run() -> None:
    """Nor is megatron-core: an import takes seconds, and neither may be there."""
    code = "import cluster.steps, cluster.rank, sys; sys.exit(bool({'deepspeed', 'megatron'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
