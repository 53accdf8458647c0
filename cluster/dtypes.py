"""zeroviz's dtypes as torch's."""

from __future__ import annotations

import torch

from zeroviz.spec import DType

TORCH_DTYPE = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16}
NAME_OF = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPE.items()}
