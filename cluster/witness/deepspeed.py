"""DeepSpeed's engine, stages 0 to 3, on the process group that is there: no launcher, and nothing is compiled.

[Note: a step] The engine drops the gradients itself when its step is over, so at rest there are none but stage 3's flat
buffer and, where bf16 parameters have fp32 gradients under stage 1, those of the whole model. Its step is called after
each micro-batch; only the last one's updates anything.

[Note: warm steps] Stage 3 learns in its first two steps in which order modules run, and gathers ahead from the third on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cluster.own.optimizer import make_optimizer
from cluster.own.step import STEP_COUNTER
from cluster.text import load_batch
from cluster.witness.deepspeed_engine import config_of, engine_for
from cluster.witness.plain import PlainModel, PlainSteps
from zeroviz.schedule import OpKind, Phase
from zeroviz.spec import Strategy
from zeroviz.trace import Category


class DeepSpeed(PlainSteps):
    """One rank's model and training step."""

    num_warm_steps = 2

    def wrap(self, plain: PlainModel) -> tuple[nn.Module, torch.optim.Optimizer]:
        self.base = make_optimizer(self.spec.optimizer, list(plain.parameters()))
        self.engine = engine_for(self, plain, self.base, config_of(self.spec))
        return self.engine, self.base

    def step(self) -> float:
        """One training step of all micro-batches; returns the mean of their losses."""
        at, losses = self.places.at, []
        for _ in range(self.spec.accumulation):
            at(Phase.FORWARD, OpKind.LOAD_BATCH.value)
            batch = load_batch(self.spec, self.comm.rank, self._num_batches, self.device)
            self._num_batches += 1
            for tensor in batch.tensors():
                self.meter.tag(tensor, Category.INPUT)
            loss = self.engine(batch)
            losses.append(float(loss.item()))
            self.engine.backward(loss)
            at(Phase.BACKWARD, OpKind.DROP_BATCH.value)
            del loss, batch
            at(Phase.OPTIMIZER, OpKind.OPTIMIZER_STEP.value)
            self.engine.step()
        return sum(losses) / len(losses)

    def held_tensors(self) -> Iterator[tuple[Tensor, Category]]:
        wrapped: Any = self.engine.optimizer
        if self.spec.strategy is Strategy.ZERO3:
            for parameter in self.plain.parameters():
                yield parameter.ds_tensor, Category.SHARDED_PARAM
                yield parameter, Category.UNSHARDED_PARAM
            yield wrapped.grad_partitions_flat_buffer, Category.SHARDED_GRAD
            for bucket in wrapped.ipg_buckets.values():
                if bucket.buffer is not None: 
                    yield bucket.buffer, Category.BUCKET
            for master in wrapped.fp32_partitioned_groups_flat:
                yield master, Category.MASTER_PARAM
        else:
            for parameter in self.plain.parameters():
                yield parameter, Category.UNSHARDED_PARAM
            for parameter in self.plain.parameters():
                if parameter.grad is not None:
                    yield parameter.grad, Category.UNSHARDED_GRAD
            for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
                for master in getattr(wrapped, name, []):
                    yield master, Category.MASTER_PARAM
            for group in getattr(wrapped, "fp32_groups", []):
                for master in group:
                    yield master, Category.MASTER_PARAM
                    if master.grad is not None:
                        yield master.grad, Category.UNSHARDED_GRAD
            for grad in getattr(wrapped, "fp32_groups_gradients_flat", []):
                yield grad, Category.UNSHARDED_GRAD
        for name, value in self.optimizer_state():
            if name != STEP_COUNTER:
                yield value, Category.OPTIMIZER_STATE
