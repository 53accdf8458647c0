"""torch's optimizers, as the step uses them: each sees flat tensors, one a slice, and nothing of their shapes.

AdamW and SGD work element by element, so shards need no shapes. The plain loop rounds every element alike; the fused
kernel rounds a tensor's last few elements apart, so that its result depends on where a shard is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zeroviz.spec import Optimizer

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
SGD_LEARNING_RATE = 0.1
MOMENTUM = 0.9

_ADAMW = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
_SGD = {"lr": SGD_LEARNING_RATE, "foreach": False}
_MADE_OF: dict[Optimizer, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    Optimizer.ADAMW: (torch.optim.AdamW, {**_ADAMW, "foreach": False}),
    Optimizer.ADAMW_FOREACH: (torch.optim.AdamW, {**_ADAMW, "foreach": True}),
    Optimizer.ADAMW_FUSED: (torch.optim.AdamW, {**_ADAMW, "fused": True}),
    Optimizer.SGD_MOMENTUM: (torch.optim.SGD, {**_SGD, "momentum": MOMENTUM}),
    Optimizer.SGD: (torch.optim.SGD, _SGD),
}


def class_of(kind: Optimizer) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """torch's class and what it is given, for a library that makes the optimizer itself. KeyError as below."""
    return _MADE_OF[kind]


def make_optimizer(kind: Optimizer, owned: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of `owned`. KeyError for one that is arithmetic only, which `cluster.capacity` refuses."""
    made_of, options = _MADE_OF[kind]
    return made_of(list(owned), **options)
