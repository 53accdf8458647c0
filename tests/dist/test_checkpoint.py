"""A run saved by N ranks under one strategy goes on with M ranks under another, as if it had never been interrupted.

[Note: bounds] Where every sum is made in the same order nothing may differ: the same cut of the model always, and any
strategy and unit with two ranks, since a sum of two has one order. Where the number of ranks changes, sums of three and
more are made in another order, and the bounds are those of parity with one process (test_parity.py): parameters within
1e-4 of how far training moved. The loss is then a mean over the same tokens in another order, a few roundings of fp32:
1e-5 of itself.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp

from cluster import checkpoint
from cluster.live import LiveBackend
from cluster.manifest import NAME, VERSION, check_job, part_of, read_manifest
from cluster.meter import Meter
from cluster.model import initial_value
from cluster.own.step import Executor
from cluster.rank import RankJob, joined_group, run_rank
from cluster.session import Session
from tests.dist.ranks import RankPool
from tests.dist.test_parity import BOUND, distance
from zeroviz.errors import RunError, SpecError
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import Implementation, Offload, Optimizer, Precision, RunSpec, Strategy, UnitPolicy, Zero1Form
from zeroviz.trace import rank_from_dict

CPU = torch.device("cpu")
NUM_STEPS = 3  # before the save, and after it
LOSS_BOUND = 1e-5

Saved = tuple[list[list[float]], Path]
"""Each rank's losses, and the directory written after them."""


def spec_of(ranks: int, strategy: Strategy = Strategy.ZERO3, *, model: str = "tiny", **settings: Any) -> RunSpec:
    """An odd number of tokens; by default as many sequences in all as four ranks have."""
    settings.setdefault("batch", 4 // ranks if 4 % ranks == 0 else 1)
    return RunSpec(model=PRESETS[model], ranks=ranks, strategy=strategy, seq=17, **settings)


def train(job: RankJob, num_steps: int, save_to: str = "", resume_from: str = "") -> list[float]:
    """One rank's losses."""
    torch.set_num_threads(1)
    with joined_group(job) as comm:
        executor = Executor(job.spec, comm, Meter(), CPU)
        num_before = checkpoint.load(executor, Path(resume_from)).num_steps if resume_from else 0
        losses = [executor.step() for _ in range(num_steps)]
        if save_to:
            checkpoint.save(executor, Path(save_to), num_before + num_steps)
        return losses


class Runs:
    """Trains on the pool; every run is saved to a directory of its own."""

    def __init__(self, pool: RankPool, directory: Path) -> None:
        self._pool, self._directory, self._num = pool, directory, 0

    def __call__(self, spec: RunSpec, num_steps: int, resume_from: Path | None = None) -> Saved:
        self._num += 1
        save_to = self._directory / f"run{self._num}"
        function = partial(
            train, num_steps=num_steps, save_to=str(save_to), resume_from=str(resume_from) if resume_from else ""
        )
        return self._pool.run(function, spec), save_to


@pytest.fixture
def runs(rank_pool: RankPool, tmp_path: Path) -> Runs:
    return Runs(rank_pool, tmp_path)


def saved_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Everything that was saved, read by torch alone, in one process, as plain tensors of one dimension."""
    reader = dcp.FileSystemReader(directory)
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
    }
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [key for key in left if not torch.equal(left[key], right[key])] == []


def parameters(spec: RunSpec, saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {shape.name: saved[f"param/{shape.name}"].float() for shape in spec.model.params}


def mean(losses: list[list[float]]) -> list[float]:
    return [sum(step) / len(step) for step in zip(*losses, strict=True)]


# ---- what is saved ----


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED])
def test_a_checkpoint_has_every_parameter_and_moment_by_name_and_no_padding(runs: Runs, precision: Precision) -> None:
    spec = spec_of(3, precision=precision)
    _, directory = runs(spec, NUM_STEPS)
    found, manifest = saved_tensors(directory), read_manifest(directory)
    assert set(found) == {f"{kind}/{s.name}" for kind in ("param", "exp_avg", "exp_avg_sq") for s in spec.model.params}
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}  # the master's, in a recipe that has one
    for shape in spec.model.params:
        assert found[f"param/{shape.name}"].shape == (shape.numel,)
        # Trained, all of it: no stretch was left at its initial value, or at nothing.
        start = initial_value(spec.model, shape, spec.seed).view(-1)
        moved = (found[f"param/{shape.name}"] != start).float().mean()
        assert moved > (0.9 if "wpe" not in shape.name and "wte" not in shape.name else 0.0)
    assert (manifest.spec, manifest.num_steps, manifest.num_batches) == (spec, NUM_STEPS, NUM_STEPS)
    assert manifest.counters == {"step": NUM_STEPS}
    assert manifest.moments == ("exp_avg", "exp_avg_sq")
    assert set(manifest.files) == {path.name for path in directory.iterdir()} - {NAME}
    assert not part_of(directory).exists()


def test_replicas_are_written_once(runs: Runs) -> None:
    """DDP's ranks all have everything: 12 bytes a parameter in the files, and some of torch's own around each piece."""
    _, directory = runs(spec_of(2, Strategy.DDP), NUM_STEPS)
    _, sharded = runs(spec_of(2, Strategy.ZERO3), NUM_STEPS)
    nbytes = [sum(read_manifest(each).files.values()) for each in (directory, sharded)]
    assert 12 * PRESETS["tiny"].num_params < nbytes[0] < 24 * PRESETS["tiny"].num_params
    assert nbytes[0] < 1.3 * nbytes[1]


# ---- the same cut: not a bit differs ----

SAME: list[RunSpec] = [
    spec_of(1, Strategy.ZERO2),
    spec_of(2, Strategy.ZERO1, precision=Precision.BF16_MIXED),
    spec_of(3, Strategy.ZERO3, model="tiny-llama"),
    spec_of(3, Strategy.DDP, precision=Precision.BF16_FP32GRAD),
    spec_of(2, Strategy.ZERO2, accumulation=2, batch=1),
    spec_of(2, Strategy.ZERO3, optimizer=Optimizer.SGD_MOMENTUM),
    spec_of(2, Strategy.ZERO3, optimizer=Optimizer.SGD),
    spec_of(2, Strategy.ZERO1, optimizer=Optimizer.ADAMW_FOREACH, zero1_form=Zero1Form.ALL_REDUCE),
    spec_of(3, Strategy.ZERO3, optimizer=Optimizer.ADAMW_FUSED),
    spec_of(2, Strategy.ZERO1, offload=Offload.OPTIMIZER, precision=Precision.BF16_MIXED),
    spec_of(2, Strategy.ZERO3, offload=Offload.PARAMS),
    spec_of(4, Strategy.HYBRID_SHARD, shard_ranks=2),
    spec_of(3, Strategy.MEGATRON_OPTIM, precision=Precision.BF16_FP32GRAD),
]


@pytest.mark.parametrize(
    "spec", SAME, ids=lambda s: f"{s.strategy.value}-{s.ranks}-{s.precision.value}-{s.optimizer.value}"
)
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(runs: Runs, spec: RunSpec) -> None:
    whole, at_end = runs(spec, 2 * NUM_STEPS)
    first, directory = runs(spec, NUM_STEPS)
    then, end = runs(spec, NUM_STEPS, directory)
    assert [a + b for a, b in zip(first, then, strict=True)] == whole
    assert_equal(saved_tensors(end), saved_tensors(at_end))
    assert read_manifest(end).num_steps == 2 * NUM_STEPS
    assert read_manifest(end).num_batches == 2 * NUM_STEPS * spec.accumulation


# ---- another cut ----

TWO_RANKS: list[tuple[RunSpec, RunSpec]] = [
    (spec_of(2, Strategy.ZERO3), spec_of(2, Strategy.DDP)),
    (spec_of(2, Strategy.ZERO1), spec_of(2, Strategy.ZERO3)),
    (spec_of(2, Strategy.DDP), spec_of(2, Strategy.ZERO2)),
    (spec_of(2, Strategy.ZERO3), spec_of(2, Strategy.ZERO3, unit=UnitPolicy.parse("model"))),
    (
        spec_of(2, Strategy.ZERO2, unit=UnitPolicy.parse("model")),
        spec_of(2, Strategy.ZERO1, unit=UnitPolicy.parse("layer")),
    ),
    (
        spec_of(2, Strategy.ZERO3, model="tiny-llama", precision=Precision.BF16_MIXED),
        spec_of(2, Strategy.DDP, model="tiny-llama", precision=Precision.BF16_MIXED),
    ),
    (spec_of(2, Strategy.SHARD_GRAD_OP), spec_of(2, Strategy.ZERO1, offload=Offload.OPTIMIZER)),
]


@pytest.mark.parametrize(
    ("before", "after"), TWO_RANKS, ids=lambda s: f"{s.strategy.value}-{s.unit}-{s.precision.value}"
)
def test_two_ranks_go_on_under_another_strategy_to_the_bit(runs: Runs, before: RunSpec, after: RunSpec) -> None:
    whole, at_end = runs(before, 2 * NUM_STEPS)
    _, directory = runs(before, NUM_STEPS)
    then, end = runs(after, NUM_STEPS, directory)
    assert then == [losses[NUM_STEPS:] for losses in whole]
    assert_equal(saved_tensors(end), saved_tensors(at_end))


OTHER_RANKS: list[tuple[RunSpec, RunSpec]] = [
    (spec_of(4, Strategy.ZERO3), spec_of(2, Strategy.ZERO3)),
    (spec_of(4, Strategy.ZERO3), spec_of(2, Strategy.DDP)),
    (spec_of(2, Strategy.ZERO1, model="tiny-llama"), spec_of(4, Strategy.ZERO3, model="tiny-llama")),
    (spec_of(4, Strategy.ZERO2), spec_of(1, Strategy.DDP)),
    (spec_of(1, Strategy.ZERO3, batch=3), spec_of(3, Strategy.ZERO1, unit=UnitPolicy.parse("model"))),
]


@pytest.mark.parametrize(
    ("before", "after"), OTHER_RANKS, ids=lambda s: f"{s.ranks}-{s.strategy.value}-{s.unit}-{s.model.name}"
)
def test_other_ranks_go_on_within_the_bounds_of_parity(runs: Runs, before: RunSpec, after: RunSpec) -> None:
    """4 -> 2 ranks and zero3 -> ddp among them. The global batch is the same, so the run is the same but for the order
    of sums."""
    assert before.ranks * before.batch == after.ranks * after.batch
    whole, at_end = runs(before, 2 * NUM_STEPS)
    _, directory = runs(before, NUM_STEPS)
    then, end = runs(after, NUM_STEPS, directory)
    assert mean(then) == pytest.approx(mean(whole)[NUM_STEPS:], rel=LOSS_BOUND)
    start = {shape.name: initial_value(after.model, shape, 0).view(-1) for shape in after.model.params}
    got, want = (parameters(after, saved_tensors(each)) for each in (end, at_end))
    assert distance(got, want, start) <= BOUND[4]
    # Without the moments and the counters the step after would be another one: that the bound tells.
    first, fresh = (
        parameters(after, saved_tensors(each)) for each in (directory, _without_moments(runs, after, directory))
    )
    assert distance(fresh, want, start) > 10 * BOUND[4]
    assert distance(first, want, start) > 10 * BOUND[4]


def _without_moments(runs: Runs, spec: RunSpec, directory: Path) -> Path:
    """The run gone on with from a copy of the checkpoint whose counters were set back."""
    copy = directory.with_name("copy")
    shutil.copytree(directory, copy)
    data = json.loads((copy / NAME).read_text())
    data["counters"] = {"step": 1}
    (copy / NAME).write_text(json.dumps(data))
    return runs(spec, NUM_STEPS, copy)[1]


def test_a_resumed_run_is_metered_as_predicted(rank_pool: RankPool, runs: Runs, tmp_path: Path) -> None:
    """What a checkpoint brings is held as what a step makes: the same bytes at rest and at the peak, nothing more."""
    _, directory = runs(spec_of(4, Strategy.ZERO3), NUM_STEPS)
    spec = spec_of(2, Strategy.ZERO1, steps=2)
    for result, predicted in zip(
        rank_pool.run(partial(resumed_run, resume_from=str(directory)), spec), predict(spec).ranks, strict=True
    ):
        rank = rank_from_dict(result)
        assert (rank.at_rest, rank.peak(), rank.leftover()) == (predicted.at_rest, predicted.peak(), {})
        assert rank.step_counter_nbytes == predicted.step_counter_nbytes
        assert rank.collectives == predicted.collectives


def resumed_run(job: RankJob, resume_from: str) -> dict[str, Any]:
    return run_rank(replace(job, resume_from=resume_from))


# ---- through a session ----


@pytest.fixture(scope="module")
def backend() -> Iterator[LiveBackend]:
    with Session(run_timeout_s=120) as session:
        yield LiveBackend(session)


def test_a_session_saves_and_goes_on(backend: LiveBackend, tmp_path: Path) -> None:
    async def both() -> tuple[Any, Any, Any]:
        whole = await backend.run(spec_of(2, Strategy.ZERO3, steps=4))
        first = await backend.run(spec_of(2, Strategy.ZERO3, steps=2), save_to=str(tmp_path / "here"))
        then = await backend.run(spec_of(2, Strategy.DDP, steps=2), resume_from=str(tmp_path / "here"))
        return whole, first, then

    whole, first, then = asyncio.run(both())
    for rank in range(2):
        assert first.ranks[rank].losses + then.ranks[rank].losses == whole.ranks[rank].losses
    assert any("after 2 steps of ZeRO-3 on 2 ranks, fp32" in note for note in then.notes)


# ---- what is refused ----


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Runs(rank_pool, tmp_path_factory.mktemp("saved"))(spec_of(2), 1)[1]


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def refused(spec: RunSpec, directory: Path) -> str:
    with pytest.raises(SpecError) as caught:
        check_job(spec, "", str(directory))
    said = str(caught.value)
    assert said.count(". ") == 0 and said.endswith(".")  # one sentence
    return said


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (spec_of(2, model="tiny-llama"), ["tiny-llama (", "is of tiny (133,106)"]),
        (spec_of(2, precision=Precision.BF16_MIXED), ["precision is 'bf16-mixed'", "use --precision fp32"]),
        (spec_of(2, optimizer=Optimizer.SGD), ["optimizer is 'sgd'", "use --optimizer adamw"]),
        (spec_of(2, seed=7), ["seed is 7", "use --seed 0"]),
        (spec_of(2, impl=Implementation.FSDP2), ["impl is 'fsdp2'", "use impl own"]),
    ],
)
def test_another_model_or_another_rule_is_refused(saved: Path, spec: RunSpec, words: list[str]) -> None:
    said = refused(spec, saved)
    assert [word for word in words if word not in said] == []


def test_what_is_no_whole_checkpoint_is_refused(copy: Path, tmp_path: Path) -> None:
    spec = spec_of(2)
    check_job(spec, "", str(copy))
    assert "is no directory" in refused(spec, tmp_path / "nowhere")
    data = json.loads((copy / NAME).read_text())
    name = next(each for each in data["files"] if each.endswith(".distcp"))
    whole = (copy / name).read_bytes()
    (copy / name).write_bytes(whole[:-1])
    assert f"has {len(whole) - 1:,} of the {len(whole):,} bytes of {name!r}" in refused(spec, copy)
    (copy / name).unlink()
    assert f"lacks its file {name!r}" in refused(spec, copy)
    (copy / name).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert f"has a file {name!r} that is not as it was written" in refused(spec, copy)
    (copy / name).write_bytes(whole)
    for text, words in (
        (json.dumps({**data, "num_steps": -3}), "garbled zeroviz.json (-3 steps"),
        (
            json.dumps({**data, "schema": f"zeroviz.checkpoint/{VERSION + 1}"}),
            f"is of version {VERSION + 1}, written by a newer",
        ),
        (json.dumps({**data, "schema": "zeroviz.trace/1"}), "of another kind ('zeroviz.trace/1')"),
        (json.dumps({**data, "spec": {}}), "garbled"),
        (json.dumps([1]), "of another kind"),
        (json.dumps(data)[:-20], "cannot be read"),
    ):
        (copy / NAME).write_text(text)
        assert words in refused(spec, copy)
    (copy / NAME).unlink()
    assert "was not finished" in refused(spec, copy)


def test_nothing_is_written_over_and_nowhere_else(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is there already, and a checkpoint is never written over"):
        check_job(spec_of(2), str(saved), "")
    with pytest.raises(SpecError, match="cannot be written"):
        check_job(spec_of(2), str(tmp_path / "no" / "such" / "folder"), "")
    with pytest.raises(SpecError, match="is not saved here; use impl own"):
        check_job(spec_of(2, impl=Implementation.FSDP2), str(tmp_path / "new"), "")
    check_job(spec_of(2), str(tmp_path / "new"), "")
    assert list(tmp_path.iterdir()) == []


def failing_save(job: RankJob, save_to: str) -> str:
    """Rank 1's disk is full when its tensors are written."""
    with joined_group(job) as comm:
        executor = Executor(job.spec, comm, Meter(), CPU)
        executor.step()
        broken = patch.object(
            checkpoint._SavePieces, "resolve_data", side_effect=OSError(28, "No space left on device")
        )
        with (
            broken if job.rank == 1 else patch.object(checkpoint, "PARAM", "param"),
            pytest.raises(RunError) as caught,
        ):
            checkpoint.save(executor, Path(save_to), 1)
        return str(caught.value)


def test_a_save_that_fails_leaves_no_checkpoint_and_the_next_one_works(
    rank_pool: RankPool, runs: Runs, tmp_path: Path
) -> None:
    directory = tmp_path / "run1"  # where `runs` will write next
    for said in rank_pool.run(partial(failing_save, save_to=str(directory)), spec_of(2)):
        assert said == "Rank 1 could not write the checkpoint (OSError: [Errno 28] No space left on device)."
    assert not directory.exists()
    assert part_of(directory).exists()
    with pytest.raises(SpecError, match="is no directory"):
        read_manifest(directory)
    with pytest.raises(SpecError, match="was not finished"):
        read_manifest(part_of(directory))
    _, written = runs(spec_of(2), 1)
    assert written == directory
    assert read_manifest(directory).num_steps == 1
    assert not part_of(directory).exists()


def test_steps_that_were_not_finished_are_not_saved() -> None:
    class Torn:
        @staticmethod
        def step_counters() -> list[torch.Tensor]:
            return [torch.tensor(2.0), torch.tensor(3.0)]

    with pytest.raises(RunError, match=r"differ \(\[2.0, 3.0\]\)"):
        checkpoint._counters(Torn())  # type: ignore[arg-type]
