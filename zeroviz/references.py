"""Every source once: what a figure in `zeroviz.facts` was taken from, and where to read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reference:
    """A source. `title` says who and what in one line; `url` is empty for what is not public."""

    title: str
    url: str = ""


ZERO = Reference(
    "Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, arXiv 1910.02054",
    "https://arxiv.org/abs/1910.02054",
)
MEGATRON_OPTIMIZER = Reference(
    "Megatron Core documentation, Distributed Optimizer",
    "https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/dist_optimizer.html",
)
DEEPSPEED_MEMORY = Reference(
    "DeepSpeed documentation, Memory Requirements",
    "https://deepspeed.readthedocs.io/en/latest/memory.html",
)
FSDP_BLOG = Reference(
    "Mangrulkar and Gugger, Accelerate Large Model Training using PyTorch FSDP (Hugging Face blog, 2022)",
    "https://huggingface.co/blog/pytorch-fsdp",
)
NCCL_TESTS = Reference(
    "nccl-tests, Performance reported by NCCL tests",
    "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md",
)
MODEL_CONFIGS = Reference("config.json of each model, as published with its weights", "https://huggingface.co/models")
ACTIVATIONS = Reference(
    "Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198",
    "https://arxiv.org/abs/2205.05198",
)
GPU_CAPACITIES = Reference(
    "NVIDIA's nominal capacities of A100 and H100; of H200 what nvidia-smi lists",
    "https://www.nvidia.com/en-us/data-center/",
)
STUDY_PAGES = Reference("Three study pages on ZeRO and FSDP (S0, S1, S3), worked out again claim by claim")
