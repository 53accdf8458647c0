"""Save and load our own implementation's run: N ranks under one strategy write, M ranks under another read.

What is saved is told by the parameters' published names and by nothing else: of every parameter the values that the
optimizer works on (the master's where there is one) and its moments, each a tensor of one dimension, of which each rank
writes and reads the stretch it owns. Units, shards, padding and ranks are gone from it, so any cut of the model can
write and any other read; torch's distributed checkpoint finds out which file has what. Parameters in another dtype and
gathered ones follow from these.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from cluster.manifest import NAME, Manifest, digest, part_of, read_manifest
from cluster.own.ddp import DDPUnit, Slice
from cluster.own.step import STEP_COUNTER, Executor
from zeroviz.errors import RunError

PARAM = "param"


@dataclass(frozen=True)
class Piece:
    """A rank's stretch of one saved tensor: `values` (numel,) from element `start` on of `whole_numel`."""

    key: str
    start: int
    whole_numel: int
    values: torch.Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.start]), torch.Size([self.values.numel()]))

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.key, torch.Size([self.start]))


@torch.no_grad()
def save(executor: Executor, directory: Path, num_steps: int) -> None:
    """Write the run's state to `directory`, which must be new. Every rank calls it, between two steps.

    num_steps: how many have been made since the first run began. The directory is there when this returns, and whole:
    it is written under another name. RunError or OSError if it cannot be.
    """
    part, rank = part_of(directory), executor.comm.rank
    if rank == 0 and part.exists():
        shutil.rmtree(part)  # of a run that did not finish
    executor.comm.barrier()
    pieces = list(_pieces(executor))
    with _told("write"):
        dcp.save(
            {},
            storage_writer=dcp.FileSystemWriter(part),
            planner=_SavePieces(pieces),
            no_dist=not dist.is_initialized(),
        )
    if rank == 0:
        manifest = Manifest(
            spec=executor.spec,
            num_steps=num_steps,
            num_batches=executor.num_batches,
            counters=_counters(executor),
            moments=tuple(_moment_names(executor)),
            files={path.name: path.stat().st_size for path in sorted(part.iterdir())},
            sha256={path.name: digest(path) for path in sorted(part.iterdir())},
        )
        _write_durably(part / NAME, manifest.to_json())
        os.rename(part, directory)
    executor.comm.barrier()


@torch.no_grad()
def load(executor: Executor, directory: Path) -> Manifest:
    """Put a checkpoint's state into a model that has made no step yet. Every rank calls it. SpecError if it is none."""
    manifest = read_manifest(directory)
    for optimizer in executor.optimizers:
        for owned in optimizer.param_groups[0]["params"]:
            optimizer.state[owned] |= _empty_state(owned, manifest)
    pieces = list(_pieces(executor))
    with _told("read"):
        dcp.load(
            {},
            storage_reader=dcp.FileSystemReader(directory),
            planner=_LoadPieces(pieces),
            no_dist=not dist.is_initialized(),
        )
    executor.num_batches = manifest.num_batches
    for unit in executor.units:
        unit.take_update()
        if unit.params_held and executor.spec.strategy.shards_optimizer:
            unit.sync_param()  # type: ignore[attr-defined]
            unit.wait()
    return manifest


def _pieces(executor: Executor) -> Iterator[Piece]:
    """What this rank owns: of each slice the values, then each moment."""
    parts = [(unit, part, optimizer.state[part.owned]) for unit, part, optimizer in _slices(executor)]
    for unit, part, _ in parts:
        yield from _of_slice(unit, part, PARAM, part.owned.detach())
    for name in _moment_names(executor):
        for unit, part, state in parts:
            yield from _of_slice(unit, part, name, state[name])


def _slices(executor: Executor) -> Iterator[tuple[DDPUnit, Slice, torch.optim.Optimizer]]:
    for updates in executor.updates.values():
        for update in updates:
            yield from ((unit, part, update.optimizer) for unit, part in update.parts)


def _of_slice(unit: DDPUnit, part: Slice, kind: str, values: torch.Tensor) -> Iterator[Piece]:
    """The stretches of the unit's parameters that lie in the slice of the rank's shard; padding is nobody's."""
    first, last = unit.start + part.start, unit.start + part.stop
    start = 0
    for shape in unit.unit.params:
        low, high = max(start, first), min(start + shape.numel, last)
        if low < high:
            yield Piece(f"{kind}/{shape.name}", low - start, shape.numel, values[low - first : high - first])
        start += shape.numel


def _moment_names(executor: Executor) -> list[str]:
    """The optimizer's states that are as large as what it updates; none for plain SGD."""
    _, part, optimizer = next(_slices(executor))
    state = optimizer.state[part.owned]
    return [name for name, value in state.items() if name != STEP_COUNTER and isinstance(value, torch.Tensor)]


def _counters(executor: Executor) -> dict[str, float]:
    """The step counters: one value, however many tensors keep it."""
    found = {float(counter) for counter in executor.step_counters()}
    if len(found) > 1:
        raise RunError(f"The optimizer's step counters differ ({sorted(found)}); a step was not finished.")
    return {STEP_COUNTER: found.pop()} if found else {}


def _empty_state(owned: nn.Parameter, manifest: Manifest) -> dict[str, Any]:
    """The state torch's optimizers would make in their first step, in their order, to be filled."""
    counters: dict[str, Any] = {name: torch.tensor(value) for name, value in manifest.counters.items()}
    return counters | {name: torch.zeros_like(owned) for name in manifest.moments}


class _SavePieces(dcp.DefaultSavePlanner):
    """Writes pieces; of one that several ranks have, one rank's."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {piece.index: piece for piece in pieces}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(piece) for piece in self._pieces.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._pieces[write_item.index].values


def _write_item(piece: Piece) -> WriteItem:
    properties = TensorProperties(dtype=piece.values.dtype)
    data = TensorWriteData(chunk=piece.chunk, properties=properties, size=torch.Size([piece.whole_numel]))
    return WriteItem(index=piece.index, type=WriteItemType.SHARD, tensor_data=data)


class _LoadPieces(dcp.DefaultLoadPlanner):
    """Reads into pieces, from whichever stretches were written."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {piece.index: piece for piece in pieces}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for piece in self._pieces.values():
            saved = self.metadata.state_dict_metadata.get(piece.key)
            if not isinstance(saved, TensorStorageMetadata) or saved.size != torch.Size([piece.whole_numel]):
                raise RunError(f"The checkpoint has no {piece.key} of {piece.whole_numel} elements.")
            found = create_read_items_for_chunk_list(piece.key, saved, [piece.chunk])
            if (num_found := sum(item.lengths.numel() for item in found)) != piece.values.numel():
                raise RunError(
                    f"The checkpoint has {num_found} of the {piece.values.numel()} elements of {piece.key} from "
                    f"{piece.start} on."
                )
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._pieces[replace(index, index=None)].values


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What fails on any rank is, on every rank, a RunError that names the rank. torch says it as a BaseException."""
    try:
        with warnings.catch_warnings():
            if not dist.is_initialized():  # a single rank has no group, of which torch warns each time
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        text = str(cause) if isinstance(cause, RunError) else f"{type(cause).__name__}: {cause}"
        raise RunError(f"Rank {rank} could not {what} the checkpoint ({text.rstrip('.')}).", rank=rank) from None


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
