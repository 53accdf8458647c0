"""megatron-core's distributed optimizer: parameters and gradients whole in two contiguous buffers, the rest sharded.

[Note: without CUDA] megatron-core 0.16 is written for GPUs and asks for one by name: its buffers are made on
`torch.cuda.current_device()`, its flags with device="cuda", and it tells a parameter's dtype by comparing
`Tensor.type()` with "torch.cuda.FloatTensor". None of this matters for what it holds or sends. `as_if_cuda` answers
these three questions for a rank on CPU, and is in force only while the library builds its buffers and its optimizer,
and in the optimizer's step if it clips: nothing else asks. On a CUDA machine it does nothing. It is a
TorchFunctionMode, which sees calls before they reach autograd: unlike a dispatch mode it changes nothing of what is
allocated (tests compare a step with and without it, event by event).

[Note: groups] The library keeps its process groups in module globals, unless it is given them. It is given them: the
data-parallel group is the run's own, and for the kinds of parallelism that are not used here each rank is a group by
itself. So nothing of a run is left behind when the run's group is destroyed, and the next may have other ranks.

[Note: overlap] Buckets exist only where the reduction overlaps backward: without `overlap_grad_reduce` the library sets
its own `bucket_size` aside and reduces one bucket, the whole buffer. So `bucket_numel` turns the overlap on, and left
out there is one bucket.

[Note: hooks] The library keeps the autograd nodes that its hooks are on, and the hooks keep the library: a ring through
C++ that Python's collector cannot see, which would hold both buffers until the engine ends. The nodes are kept here
instead, and go with the run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cluster.collectives import Collectives, LetGo
from cluster.dtypes import TORCH_DTYPE
from cluster.meter import Meter
from cluster.own.optimizer import LEARNING_RATE, WEIGHT_DECAY
from cluster.witness.plain import Places, PlainModel, PlainSteps
from zeroviz.schedule import OpKind, Phase
from zeroviz.settings import value_of
from zeroviz.spec import DType, Optimizer, RunSpec
from zeroviz.trace import Category

with warnings.catch_warnings():
    # It says on import that its own kernels are not installed and torch's are used, which is what is wanted here; and
    # it imports parts of its own and of torch's that are about to go.
    warnings.filterwarnings("ignore", "Transformer Engine and Apex are not installed", UserWarning)
    warnings.filterwarnings("ignore", "The following imports from `dynamic_context.py` will be", DeprecationWarning)
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


def groups_of(rank: int) -> ProcessGroupCollection:
    """The run's group for data parallelism, this rank alone for every other kind. See [Note: groups]."""
    world, alone = dist.group.WORLD, dist.new_group([rank], use_local_synchronization=True)
    shared = dict.fromkeys(("dp", "dp_cp", "intra_dist_opt"), world)
    single = dict.fromkeys(("tp", "pp", "ep", "mp", "tp_ep_pp", "expt_dp"), alone)
    return ProcessGroupCollection(**shared, **single)


class Megatron(PlainSteps):
    """One rank's model and training step. groups: what `groups_of` made before the model."""

    num_warm_steps = 2  # the first step only counts which gradients come

    def __init__(
        self, spec: RunSpec, comm: Collectives, meter: Meter, device: torch.device, groups: ProcessGroupCollection
    ) -> None:
        self._groups = groups
        self._let_go = LetGo()
        super().__init__(spec, comm, meter, device)

    def wrap(self, plain: PlainModel) -> tuple[nn.Module, torch.optim.Optimizer]:
        spec = self.spec
        bucket_numel = value_of(spec.settings, "bucket_numel", spec.impl)
        bf16 = spec.recipe.param is DType.BF16
        # A config of a transformer is asked for; only its dtypes and its parallelism are looked at.
        config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, bf16=bf16, cuda_graph_scope=[])
        how = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=bucket_numel is not None,
            bucket_size=bucket_numel,
        )
        optimizer = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            bf16=bf16,
            params_dtype=TORCH_DTYPE[spec.recipe.param],
            use_distributed_optimizer=True,
            clip_grad=spec.clip_norm or 0.0,
        )
        with as_if_cuda(self.device):
            self._ddp = DistributedDataParallel(config, how, plain, pg_collection=self._groups)
            # {}: weight decay for every parameter alike, and not only for those of two dimensions.
            chained = get_megatron_optimizer(
                optimizer, [self._ddp], {}, use_gloo_process_groups=False, pg_collection=self._groups
            )
        self._grad_nodes, self._ddp.grad_accs = self._ddp.grad_accs, []  # [Note: hooks]
        (self._sharded,) = chained.chained_optimizers
        inner: torch.optim.Optimizer = self._sharded.optimizer
        for group in inner.param_groups:  # torch's own choice differs by device
            group["foreach"] = spec.optimizer is Optimizer.ADAMW_FOREACH
        # The elements this rank owns are updated; they are copied into the buffer, and the buffer is gathered.
        inner.register_step_post_hook(partial(_mark_sync, self.places))
        return self._ddp, inner

    def step(self) -> float:
        with _quiet():
            return super().step()

    def zero_grad(self) -> None:
        self._ddp.zero_grad_buffer()
        self._sharded.zero_grad()

    def reducing(self, reduces: bool) -> AbstractContextManager[None]:
        self._reduces = reduces
        no_sync: AbstractContextManager[None] = self._ddp.no_sync()
        return nullcontext() if reduces else no_sync

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if self._reduces:
            self.places.at(Phase.BACKWARD, OpKind.REDUCE_GRAD.value)
            self._ddp.finish_grad_sync()

    def update(self) -> None:
        clips = self.spec.clip_norm is not None
        with as_if_cuda(self.device, self._settle) if clips else nullcontext():
            self._sharded.step()
        self.counted.sent.clear()  # the norm is no buffer, and would outlive its step there

    def _settle(self, norm: Tensor) -> None:
        """In a metered step, wait until gloo has let go of the norm that it has summed, as our own seam does: its bytes
        go when Megatron drops it."""
        self._let_go.wait(norm, self.comm.settling)

    def held_tensors(self) -> Iterator[tuple[Tensor, Category]]:
        yield from super().held_tensors()
        yield from ((buffer.grad_data, Category.UNSHARDED_GRAD) for buffer in self._ddp.buffers)
        for group in self._sharded.shard_fp32_from_float16_groups:
            yield from ((master, Category.MASTER_PARAM) for master in group)

    def step_counters(self) -> Iterator[Tensor]:
        """The optimizer's, and the library's two flags: the scale of the loss, which is one, and an overflow flag."""
        yield from super().step_counters()
        flags = (self._sharded._scale_one, self._sharded._dummy_overflow_buf)
        yield from (flag for flag in flags if flag is not None)

    def padding_nbytes(self) -> int:
        """Of the two buffers: before a parameter, and at the end of a bucket."""
        numel = self.spec.model.num_params
        return sum(
            (len(whole) - numel) * whole.itemsize
            for buffer in self._ddp.buffers
            for whole in (buffer.param_data, buffer.grad_data)
        )


def _mark_sync(places: Places, *_: Any) -> None:
    places.at(Phase.OPTIMIZER, OpKind.SYNC_PARAM.value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, the library may call torch by old names, and look at gradients of its views of parameters."""
    with warnings.catch_warnings():
        for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
            warnings.filterwarnings("ignore", f"`torch.distributed.{name}` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield


@contextmanager
def as_if_cuda(device: torch.device, before_item: Callable[[Tensor], None] | None = None) -> Iterator[None]:
    """Answer, inside, for `device` what the library asks of a GPU. See [Note: without CUDA].

    before_item: called with a tensor whose value is about to be read. On a GPU reading it waits for the collective.
    """
    if device.type == "cuda":
        yield
        return
    with patch.object(torch.cuda, "current_device", lambda: device), _AsIfCuda(device, before_item):
        yield


class _AsIfCuda(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on `device`, and say of their type that they are there."""

    def __init__(self, device: torch.device, before_item: Callable[[Tensor], None] | None) -> None:
        super().__init__()
        self._device, self._before_item = device, before_item

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = self._device
        if func is Tensor.item and self._before_item is not None:
            self._before_item(args[0])
        result = func(*args, **kwargs)
        if func is Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result
