"""What DeepSpeed must be told before it runs in a process that is not its own."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import nn

from zeroviz.settings import value_of
from zeroviz.spec import Precision, RunSpec, Strategy

STAGE = {Strategy.DDP: 0, Strategy.ZERO1: 1, Strategy.ZERO2: 2, Strategy.ZERO3: 3}


def config_of(spec: RunSpec) -> dict[str, Any]:
    settings, impl = spec.settings, spec.impl
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.batch,
        "gradient_accumulation_steps": spec.accumulation,
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

def join(rank):
    os.environ["LOCAL_RANK"] = str(rank)
    import deepspeed
    from deepspeed.utils import groups
    from deepspeed.comm import comm
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    comm.cdb = None
    groups._release_process_group_references()
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, rank=rank)
    groups._clone_world_group()

def engine_for(steps, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    import deepspeed
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine
