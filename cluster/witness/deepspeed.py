"""DeepSpeed's engine, stages 0 to 3, on the process group that is there: no launcher, and nothing is compiled.

[Note: a step] The engine drops gradients by itself when its step is over, so that none are held at rest but stage 3's
flat buffer and, where bf16 parameters have fp32 gradients under stage 1, those of the whole model. Its `step` is called
after each micro-batch; only the last one's updates anything.

[Note: warm steps] Stage 3 learns in its first two steps in which order modules run, and gathers ahead from then on.

[Note: names] Gradients and gathered parameters lie in buffers that live for a part of the step. They get their names
from hooks of ours, which come after the library's own: on each module's forward, and on each parameter's gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cluster.meter import Meter
from cluster.own.optimizer import make_optimizer
from cluster.own.step import STEP_COUNTER
from cluster.witness.deepspeed_engine import backend_now, engine_for, forget, quiet
from cluster.witness.deepspeed_engine import join as join
from cluster.witness.plain import PlainModel, PlainSteps
from zeroviz.schedule import OpKind, Phase
from zeroviz.spec import Strategy
from zeroviz.trace import Category
from zeroviz.witness.deepspeed_parts import padding_nbytes


class DeepSpeed(PlainSteps):
    """One rank's model and training step. When it goes, what the library keeps in the process goes with it."""

    num_warm_steps = 2

    def wrap(self, plain: PlainModel) -> tuple[nn.Module, torch.optim.Optimizer]:
        base = make_optimizer(self.spec.optimizer, list(plain.parameters()))
        self._engine = engine_for(plain, base, self.spec)
        self._zero: Any = self._engine.optimizer  # the library's own around `base`; under stage 0 in fp32 `base`
        self._names = _Names(self.spec.strategy, self.meter, plain, self._zero)
        finalize(self, _close, self._engine, backend_now(), self._names.hooks)
        return self._engine, base

    def step(self) -> float:
        """One training step; returns this rank's loss, the mean over its tokens and micro-batches."""
        loss = 0.0
        with quiet():
            for _ in range(self.spec.accumulation):
                loss += self.micro_batch() / self.spec.accumulation
                self.places.at(Phase.OPTIMIZER, OpKind.OPTIMIZER_STEP.value)
                self._engine.step()
        if self.spec.strategy is Strategy.ZERO3:
            self.tag(self._names.whole(), Category.UNSHARDED_PARAM)
        self.counted.sent.clear()  # else they would be held
        return loss

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def tag_gradients(self) -> None:
        super().tag_gradients()
        self.tag(self._names.owned_gradients(), Category.SHARDED_GRAD)

    def held_tensors(self) -> Iterator[tuple[Tensor, Category]]:
        zero = self._zero
        if self.spec.strategy is Strategy.ZERO3:
            for parameter in self.plain.parameters():
                shard: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
                yield shard, Category.SHARDED_PARAM
            yield zero.grad_partitions_flat_buffer, Category.SHARDED_GRAD
            yield from ((bucket, Category.BUCKET) for bucket in self._names.buckets())
        yield from ((parameter, Category.UNSHARDED_PARAM) for parameter in self._names.whole())
        for parameter in self.plain.parameters():
            if parameter.grad is not None:
                yield parameter.grad, Category.UNSHARDED_GRAD
        for name in _MASTERS:
            for master in _flat(getattr(zero, name, ())):
                yield master, Category.MASTER_PARAM
        for grad in getattr(zero, "fp32_groups_gradients_flat", ()):
            yield grad, Category.UNSHARDED_GRAD
        for name in ("_global_grad_norm", "inf_or_nan_tracker"):  # the last gradient's norm, and stage 3's flag
            if isinstance(number := getattr(zero, name, None), Tensor):
                yield number, Category.TEMPORARY
        for name, value in self.optimizer_state():
            if name != STEP_COUNTER:
                yield value, Category.OPTIMIZER_STATE

    def padding_nbytes(self) -> int:
        return padding_nbytes(self.spec, self.comm.rank)


def _close(engine: Any, backend: Any, hooks: list[RemovableHandle]) -> None:
    for hook in hooks:  # as the library's own, each is a circle that no garbage collector sees
        hook.remove()
    forget(engine, backend)


class _Names:
    """See [Note: names]. The hooks know this and not the steps, which could not go while they are held from there."""

    def __init__(self, strategy: Strategy, meter: Meter, plain: PlainModel, zero: Any) -> None:
        self._strategy, self._meter, self._plain, self._zero = strategy, meter, plain, zero
        self.hooks: list[RemovableHandle] = []
        if strategy is Strategy.DDP:
            return  # gradients are tensors of their own till the step
        for parameter in plain.parameters():
            hook = parameter.register_post_accumulate_grad_hook(self._gradient_is_there)  # type: ignore[no-untyped-call]
            self.hooks.append(hook)
        if strategy is Strategy.ZERO3:
            self.hooks += [module.register_forward_pre_hook(self._parameters_are_there) for module in plain.modules()]

    def whole(self) -> Iterator[Tensor]:
        """The parameters that are whole now."""
        return (parameter for parameter in self._plain.parameters() if parameter.untyped_storage().nbytes())

    def buckets(self) -> Iterator[Tensor]:
        """The buffers that gradients are reduced in, where they stand now."""
        for bucket in getattr(self._zero, "ipg_buckets", {}).values():
            yield from bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]

    def owned_gradients(self) -> Iterator[Tensor]:
        """Of stages 1 and 2, between the reduction and the update."""
        for name in ("averaged_gradients", "all_grad_tensors"):
            for gradients in getattr(self._zero, name, {}).values():
                yield from gradients or ()

    def _gradient_is_there(self, parameter: Tensor) -> None:
        self._tag(self.buckets(), Category.BUCKET)
        if self._strategy is Strategy.ZERO1 and parameter.grad is not None:
            self._tag([parameter.grad], Category.UNSHARDED_GRAD)
        if self._strategy is Strategy.ZERO3:
            self._tag(self.whole(), Category.UNSHARDED_PARAM)

    def _parameters_are_there(self, module: nn.Module, inputs: Any) -> None:
        self._tag(self.whole(), Category.UNSHARDED_PARAM)
        for under_way in self._plain.ds_inflight_param_registry.values():  # type: ignore[operator]
            for handle in getattr(under_way, "handles", (under_way,)):
                self._tag(getattr(handle, "partitions", ())[:1], Category.ALL_GATHER_BUFFER)

    def _tag(self, tensors: Iterable[Tensor], category: Category) -> None:
        for tensor in tensors:
            self._meter.tag(tensor, category)


_MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_partitioned_groups_flat",
    "fp32_groups",
)
"""What each of the library's optimizers calls its masters: stages 1 and 2, stage 1 with fp32 gradients, stage 3, and
stage 0, which has one for each parameter."""


def _flat(groups: Any) -> Iterator[Tensor]:
    for each in groups:
        yield from each if isinstance(each, list) else [each]
