"""torch's DistributedDataParallel as a witness: it trains what one process trains, every byte of it predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from cluster.rank import RankJob, run_rank
from cluster.witness.ddp import DDP
from cluster.witness.plain import PlainSteps
from tests.dist.plain_steps import assert_as_predicted, live, rest, with_steps
from tests.dist.ranks import RankPool
from tests.dist.references import BF16_SUM_BOUND, BOUND, distance, reference
from tests.dist.trained import trained
from tests.every import crossed
from zeroviz.collectives import CollectiveOp
from zeroviz.models import PRESETS, ModelShape
from zeroviz.predict import predict
from zeroviz.settings import Settings
from zeroviz.spec import DType, Implementation, Optimizer, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.trace import Category, rank_from_dict
from zeroviz.witness.ddp import buckets
from zeroviz.witness.graph import Graph

TINY, LLAMA = PRESETS["tiny"], PRESETS["tiny-llama"]
# The options the presets leave out.
UNTIED = replace(TINY, heads=1, kv_heads=1, head_dim=55, attention_bias=False, mlp_bias=False, tied=False)
BIASED = replace(LLAMA, tied=True, heads=4, kv_heads=2, head_dim=14, attention_bias=True, mlp_bias=True)


def ddp(model: ModelShape = TINY, ranks: int = 2, **settings: Any) -> RunSpec:
    """17 tokens: nothing is divisible by anything."""
    fixed = {"strategy": Strategy.DDP, "impl": Implementation.DDP}
    return RunSpec(model=model, ranks=ranks, **fixed, **{"seq": 17, "steps": 2, **settings})


# ---- it trains ----


@pytest.mark.parametrize(("model", "ranks"), crossed([TINY, LLAMA], [1, 2, 3, 4]))
def test_it_trains_as_one_process_does(rank_pool: RankPool, model: ModelShape, ranks: int) -> None:
    for settings in (Settings(), Settings(bucket_nbytes=30_000, bucket_view=True)):
        spec = ddp(model, ranks, batch=2, settings=settings)
        want, start = reference(spec)
        for got in trained(rank_pool, spec):
            assert distance(got, want, start) <= BOUND[ranks], settings


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_in_bf16_it_trains_as_one_process_with_the_same_casts(rank_pool: RankPool, ranks: int) -> None:
    """With more than two ranks sums in bf16 have several orders; see `BF16_SUM_BOUND`."""
    for model in (TINY, LLAMA):
        spec = ddp(model, ranks, batch=2, precision=Precision.BF16)
        want, start = reference(spec)
        for got in trained(rank_pool, spec):
            assert distance(got, want, start) <= (BOUND[2] if ranks == 2 else BF16_SUM_BOUND), model.name


@pytest.mark.parametrize("no_sync", [None, False])
@pytest.mark.parametrize("view", [False, True])
def test_micro_batches_train_as_one_process_does(rank_pool: RankPool, no_sync: bool | None, view: bool) -> None:
    """Reducing each time adds to the mean of those before: another order of additions."""
    spec = ddp(LLAMA, 2, batch=2, accumulation=3, no_sync=no_sync, settings=Settings(bucket_view=view))
    want, start = reference(spec)
    for got in trained(rank_pool, spec):
        assert distance(got, want, start) <= (BOUND[2] if no_sync is None else BOUND[3])


# ---- every byte is predicted ----

BUCKETS = (None, 200_000, 30_000)
OPTIMIZERS = [optimizer for optimizer in Optimizer if optimizer.runs]
UNITS = ("model", "block", "layer", "block:2")


@pytest.mark.parametrize("model", [TINY, LLAMA, UNTIED, BIASED], ids=["tiny", "llama", "untied", "biased"])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_every_rank_holds_and_sends_what_is_predicted(
    rank_pool: RankPool, model: ModelShape, bucket: int | None
) -> None:
    """Ranks, recipes, units and optimizers go round, so that all of them meet."""
    turn = [TINY, LLAMA, UNTIED, BIASED].index(model) * len(BUCKETS) + BUCKETS.index(bucket)
    for view in (None, True):
        place = 2 * turn + bool(view)
        spec = ddp(
            model,
            1 + place % 4,
            precision=Precision.BF16 if place % 3 == 1 else Precision.FP32,
            unit=UnitPolicy.parse(UNITS[turn % 4]),
            optimizer=OPTIMIZERS[place % 5],
            batch=1 + place % 2,
            settings=Settings(bucket_nbytes=bucket, bucket_view=view),
        )
        assert_as_predicted(live(rank_pool, spec))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_takes_what_is_predicted(rank_pool: RankPool, optimizer: Optimizer) -> None:
    for model, precision in ((TINY, Precision.FP32), (LLAMA, Precision.BF16)):
        assert_as_predicted(live(rank_pool, ddp(model, 2, optimizer=optimizer, precision=precision)))


@pytest.mark.parametrize("no_sync", [None, False])
@pytest.mark.parametrize("view", [False, True])
def test_micro_batches_hold_what_is_predicted(rank_pool: RankPool, no_sync: bool | None, view: bool) -> None:
    for model, ranks in ((TINY, 2), (LLAMA, 3)):
        settings = Settings(bucket_view=view, bucket_nbytes=30_000)
        assert_as_predicted(live(rank_pool, ddp(model, ranks, accumulation=3, no_sync=no_sync, settings=settings)))


# ---- what it is known for ----


def test_01_a_second_copy_of_the_gradients_is_held_in_the_buckets(rank_pool: RankPool) -> None:
    """Field report 1 (pytorch PR 41954): 4P + 4P + 4P + 8P at rest, and 4P less with gradient_as_bucket_view."""
    size = 4 * TINY.num_params
    whole = {
        Category.UNSHARDED_PARAM: size,
        Category.UNSHARDED_GRAD: size,
        Category.OPTIMIZER_STATE: 2 * size,
    }
    for view, want in ((False, {**whole, Category.BUCKET: size}), (True, whole)):
        spec = ddp(settings=Settings(bucket_view=view))
        assert rest(predict(spec).ranks[0]) == want
        for rank in live(rank_pool, spec).ranks:
            assert rest(rank) == want
            assert rank.allocator is not None
            assert rank.allocator.rest_nbytes == sum(want.values()) + rank.step_counter_nbytes


def bucket_sizes(job: RankJob) -> tuple[list[int], list[str]]:
    """(bytes of the buckets as torch's own log has them, parameters in the order their gradients became ready)."""
    return with_steps(job, _logged)


def _logged(steps: PlainSteps) -> tuple[list[int], list[str]]:
    order: list[str] = []
    for name, parameter in steps.plain.by_name.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    for _ in range(3):
        order.clear()
        steps.step()
    model: Any = steps.model
    sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return [int(size) for size in sizes.split(",")], order


@pytest.mark.parametrize("model", [TINY, LLAMA, UNTIED, BIASED], ids=["tiny", "llama", "untied", "biased"])
def test_buckets_are_those_of_torchs_own_log(rank_pool: RankPool, model: ModelShape) -> None:
    """In the order in which gradients become ready, which autograd decides and we derive."""
    for bucket in BUCKETS:
        spec = ddp(model, 2, settings=Settings(bucket_nbytes=bucket))
        order = Graph(spec, fresh=Category.UNSHARDED_GRAD).ready_order
        want = [4 * sum(shape.numel for shape in each) for each in buckets(spec, order)]
        for sizes, names in rank_pool.run(bucket_sizes, spec):
            assert names == [shape.name for shape in order]
            assert sizes == want


def test_the_first_bucket_is_smaller_by_default(rank_pool: RankPool) -> None:
    """1 MiB, then 25 MiB: a model of 7 million bytes has two buckets, and one where 25 MiB were asked for."""
    model = replace(TINY, hidden=220, heads=5, kv_heads=5, head_dim=44, ffn=888)
    for settings, num_buckets in ((Settings(), 2), (Settings(bucket_nbytes=25 * 2**20), 1)):
        spec = ddp(model, 2, settings=settings)
        measured = live(rank_pool, spec)
        assert_as_predicted(measured)
        assert [call.op for call in measured.ranks[0].collectives] == [CollectiveOp.ALL_REDUCE] * num_buckets
        assert sum(call.payload_nbytes for call in measured.ranks[0].collectives) == 4 * model.num_params


def test_the_wire_is_2p(rank_pool: RankPool) -> None:
    """However many buckets: 2 (N-1)/N of the gradient's bytes, rounded up."""
    for precision, dtype in ((Precision.FP32, DType.FP32), (Precision.BF16, DType.BF16)):
        spec = ddp(LLAMA, 3, precision=precision, settings=Settings(bucket_nbytes=30_000))
        for rank in live(rank_pool, spec).ranks:
            assert rank.sent_nbytes == -(-2 * 2 * LLAMA.num_params * dtype.itemsize // 3)


# ---- the comparison can fail ----


def with_buckets_hidden(job: RankJob) -> dict[str, int]:
    """At rest, by category, where the witness does not say that it holds buckets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDP, "held_tensors", lambda self: super(DDP, self).held_tensors())
        rank = rank_from_dict(run_rank(job))
    return {category.value: nbytes for category, nbytes in rank.rest.items()}


def test_buckets_that_nobody_names_are_found(rank_pool: RankPool) -> None:
    for found in rank_pool.run(with_buckets_hidden, ddp()):
        assert found[Category.UNATTRIBUTED.value] == 4 * TINY.num_params


def with_a_gradient_kept(job: RankJob) -> dict[str, int]:
    """What is still held when a step ends before which the token table's gradient was kept."""
    kept: list[Tensor] = []
    zero_grad = DDP.zero_grad

    def keep_one(self: DDP) -> None:
        grad = self.plain.by_name["wte.weight"].grad
        kept[:] = [] if grad is None else [grad]
        zero_grad(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDP, "zero_grad", keep_one)
        rank = rank_from_dict(run_rank(job))
    return {category.value: nbytes for category, nbytes in rank.leftover().items()}


def test_a_gradient_kept_is_found(rank_pool: RankPool) -> None:
    """257 rows of 55 in fp32. It was kept before the metered step as well, so the place it took then is given back."""
    nbytes = 4 * 257 * 55
    for found in rank_pool.run(with_a_gradient_kept, ddp()):
        assert found == {Category.UNSHARDED_GRAD.value: nbytes, Category.UNATTRIBUTED.value: -nbytes}
