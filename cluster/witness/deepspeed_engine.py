"""What DeepSpeed is told before it runs in a process that is not its own, and what is taken back afterwards.

[Note: nothing is compiled] DeepSpeed compiles some of its operators with the machine's C++ compiler where they are
first used. On the way of a training step there is one: an all-reduce through shared memory, for CPU ranks of one
machine, made where the process group is joined, half a minute of work. Here it is declared incompatible before. Its own
Adam would be compiled as well; the optimizers are torch's, which it takes as "untested" ones.

[Note: left in the process] DeepSpeed keeps in its modules' globals what it finds: the process group and its copies of
it, and under stage 3 the model, once in a stack and once for each module in the cache of a method; with the model stay
the shards, the master and the moments. Its hooks on gradients are a circle through autograd that no garbage collector
sees. `forget` cuts all of these, so that the next run in the process finds nothing. It also numbers modules and
parameters on through all runs of a process, and stops where two ranks disagree, as an engine does that has had runs
before with one that was started just now: `join` lets it count from nought. Unless `memory_efficient_linear` is
off, stage 3 also replaces torch.nn.functional.linear for the whole process and for good; it is off.

[Note: clipping] DeepSpeed clips gradients at a norm of 1.0 where its configuration does not say otherwise. Here it says
0, which is not at all: with clipping it would not train what the others train.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from io import StringIO
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from cluster.collectives import SETTLED_RANGE, Collectives, is_let_go, owners_of
from zeroviz.settings import value_of
from zeroviz.spec import Precision, RunSpec, Strategy

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else its import says on stdout that it found no GPU
with warnings.catch_warnings():
    # torch's own compiler, which DeepSpeed's Muon optimizer imports and nothing here uses, is made of torch.jit.
    warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.comm import comm as deepspeed_comm
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.utils import groups

# The default of an argument that nobody gives: a list that is counted up in.
_module_count: list[int] = (
    inspect.signature(DeepSpeedZeRoOffload._register_deepspeed_module).parameters["count"].default
)

STAGE = {Strategy.DDP: 0, Strategy.ZERO1: 1, Strategy.ZERO2: 2, Strategy.ZERO3: 3}

# The method is wrapped, and what is wrapped is the function with the cache.
_released: Any = inspect.getclosurevars(
    PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
).nonlocals["func"]


def config_of(spec: RunSpec) -> dict[str, Any]:
    """DeepSpeed's configuration. What it does not name is the library's default."""
    settings, impl = spec.settings, spec.impl
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.batch,
        "gradient_accumulation_steps": spec.accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": STAGE[spec.strategy],
            "reduce_bucket_size": value_of(settings, "bucket_numel", impl),
            "stage3_param_persistence_threshold": value_of(settings, "persistence_numel", impl),
            "memory_efficient_linear": False,
        },
    }
    if spec.precision is not Precision.FP32:
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": spec.precision.grad.value}
    return config


def join(comm: Collectives, device: torch.device) -> None:
    """Let DeepSpeed find the process group of this run, and make its copy of it."""
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    os.environ["LOCAL_RANK"] = str(comm.rank)  # its launcher would set it
    set_accelerator(CPU_Accelerator() if device.type == "cpu" else CUDA_Accelerator())
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    _forget_group()
    _module_count[0] = Init.param_id = 0
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(deepspeed_comm.cdb, name, _settled(getattr(deepspeed_comm.cdb, name), comm))
    groups._clone_world_group()


def _settled(call: Callable[..., Any], comm: Collectives) -> Callable[..., Any]:
    """The backend's `call`, which in a metered step is not over before gloo has let go of what it was given and of its
    copies: see [Note: at once] in `cluster.collectives`. So no gather overlaps with what follows it."""

    @wraps(call)
    def settled(*args: Any, **kwargs: Any) -> Any:
        settling = comm.settling
        if settling is None:
            return call(*args, **kwargs)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        before, owners = settling.counter(), owners_of(tensors)
        work = call(*args, **kwargs)
        if work is None:
            settling.until(lambda: is_let_go(tensors, owners))
        else:  # it holds what it was given until the library drops it
            work.wait()
        if (live := settling.down_to(before)) is not None:
            with record_function(f"{SETTLED_RANGE}{live}"):
                pass
        return work

    return settled


def engine_for(model: nn.Module, optimizer: torch.optim.Optimizer, spec: RunSpec) -> Any:
    """The engine around `model`, whose parameters it takes over. Call it, then its `backward`, then its `step`."""
    with quiet(), redirect_stdout(StringIO()):  # one of its optimizers prints what memory the machine has
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(spec))
    return engine


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, torch does not say that DeepSpeed calls two collectives by their older names."""
    with warnings.catch_warnings():
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            warnings.filterwarnings("ignore", f"`torch.distributed.{name}` is deprecated", FutureWarning)
        yield


def forget(engine: Any, backend: Any) -> None:
    """Drop what is kept of the engine's run. See [Note: left in the process]. backend: DeepSpeed's when it was made.

    Without a group, as when steps outlive it, the engine cannot be told to go; the circles are cut all the same.
    """
    for hook in getattr(engine.optimizer, "_grad_acc_hooks", ()):
        hook.remove()
    if deepspeed_comm.is_initialized():
        engine.destroy()
    _released.cache_clear()
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not engine.module]
    if deepspeed_comm.cdb is backend:
        _forget_group()


def backend_now() -> Any:
    """What stands between DeepSpeed and torch's group: one object a run."""
    return deepspeed_comm.cdb


def _forget_group() -> None:
    deepspeed_comm.cdb = None
    groups._release_process_group_references()
