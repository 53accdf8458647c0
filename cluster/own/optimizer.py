"""torch's optimizers, as the step uses them: each sees flat tensors, one a unit, and nothing of their shapes.

AdamW and SGD work element by element, so shards need no shapes. The plain loop rounds every element alike; the fused
kernel rounds a tensor's last few elements apart, so that its result depends on where a shard is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroviz.spec import Optimizer

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
SGD_LEARNING_RATE = 0.1
MOMENTUM = 0.9

_adamw = partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
_sgd = partial(torch.optim.SGD, lr=SGD_LEARNING_RATE, foreach=False)
_MAKE: dict[Optimizer, partial[torch.optim.Optimizer]] = {
    Optimizer.ADAMW: partial(_adamw, foreach=False),
    Optimizer.ADAMW_FOREACH: partial(_adamw, foreach=True),
    Optimizer.ADAMW_FUSED: partial(_adamw, fused=True),
    Optimizer.SGD_MOMENTUM: partial(_sgd, momentum=MOMENTUM),
    Optimizer.SGD: _sgd,
}


def class_of(kind: Optimizer) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """torch's class and what it is given, for a library that makes the optimizer itself. KeyError as below."""
    make = _MAKE[kind]
    return make.func, make.keywords


def make_optimizer(kind: Optimizer, owned: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of `owned`. KeyError for one that is arithmetic only, which `cluster.capacity` refuses."""
    return _MAKE[kind](list(owned))
