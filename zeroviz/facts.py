"""Every number taken from a paper, a manual or a datasheet, under its source. Nothing is worked out here.

Figures are text where the printed digits matter: "1.88" is known to two decimals, "120" to none. `zeroviz validate`
works every one of them out again; the claims of the study pages, with their formulas, are in data/study_pages.json.
Formulas are text for `zeroviz.formula`. GB is 10**9 bytes, GiB is 2**30.
"""

from __future__ import annotations

from typing import Any

# ---- ZeRO: references.ZERO. K = 12: 2 + 2 + 12 bytes a parameter. GB a rank, of ZeRO-1, ZeRO-2, ZeRO-3. ----

ZERO_FORMULAS = {"zero1": "4*P + 12*P/N", "zero2": "2*P + 14*P/N", "zero3": "16*P/N"}
# Table 1 by parameters and ranks. The 7.5B half is rounded to the digits printed, the 1T half is cut off after them.
ZERO_TABLE1_ROUNDED = {
    1: ("120", "120", "120"),
    4: ("52.5", "41.3", "30"),
    16: ("35.6", "21.6", "7.5"),
    64: ("31.4", "16.6", "1.88"),
    256: ("30.4", "15.4", "0.47"),
    1024: ("30.1", "15.1", "0.12"),
}
ZERO_TABLE1_TRUNCATED = {
    1: ("16000", "16000", "16000"),
    4: ("7000", "5500", "4000"),
    16: ("4750", "2875", "1000"),
    64: ("4187", "2218", "250"),
    256: ("4046", "2054", "62.5"),
    1024: ("4011", "2013", "15.6"),
}
# Figure 1: 7.5B parameters on 64 ranks, one decimal throughout.
ZERO_FIGURE1 = {"ddp": "120", "zero1": "31.4", "zero2": "16.6", "zero3": "1.9"}

# ---- Megatron Core: references.MEGATRON_OPTIMIZER. Bytes a parameter, d data-parallel ranks. ----

# (parameter dtype, gradient dtype): without and with the distributed optimizer.
MEGATRON_OPTIMIZER = {
    ("fp16", "fp16"): ("20", "4 + 16/d"),
    ("bf16", "fp32"): ("18", "6 + 12/d"),
    ("fp32", "fp32"): ("16", "8 + 8/d"),
}
# The worked example: a buffer of 16 elements on 4 ranks, and who owns what. The gradient buffer stays 16 long.
MEGATRON_EXAMPLE_NUMEL = 16
MEGATRON_EXAMPLE_OWNED = ("[0:4]", "[4:8]", "[8:12]", "[12:16]")

# ---- DeepSpeed: references.DEEPSPEED_MEMORY. Its estimator prints "GB" and means GiB. ----

DEEPSPEED_NUM_PARAMS = 2_851_000_000
DEEPSPEED_LARGEST_LAYER = 32_000_000
DEEPSPEED_RANKS = 8
DEEPSPEED_PRINTED = {
    ("zero3", "none"): "6.09",
    ("zero3", "optimizer"): "0.78",
    ("zero3", "params"): "0.12",
    ("zero2 docs", "none"): "15.93",
    ("zero2", "optimizer"): "5.31",
}
# The documentation still shows what 4P + 16P/N gave; the code has computed 2P + 18P/N since 2024.
DEEPSPEED_ZERO2_CODE = "11.28"

# ---- FSDP1: references.FSDP_BLOG. BERT-base-uncased with a 2-class head (the text says cased) on 2 ranks. ----

BERT = {"vocab": 30522, "hidden": 768, "layers": 12, "ffn": 3072, "positions": 512, "types": 2, "classes": 2}
FSDP1_RANKS = 2
# Elements of each flat parameter on one rank.
FSDP1_NUMEL = {"root": "494209", "word_embeddings": "11720448", "encoder": "42527232"}

# ---- nccl-tests: references.NCCL_TESTS. Bus bandwidth over algorithm bandwidth, S the whole array. ----

BUSBW_FACTORS = {"all_reduce": "2*(n-1)/n", "all_gather": "(n-1)/n", "reduce_scatter": "(n-1)/n"}

# ---- Models: references.MODEL_CONFIGS. Sizes as ModelShape names them, and the count. ----


def _llama(
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, *, tied: bool = False
) -> dict[str, Any]:
    """Heads of hidden / heads elements and no biases."""
    sizes = {"vocab": vocab, "hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return {"family": "llama", **sizes, "head_dim": hidden // heads, "tied": tied}


MODEL_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "family": "gpt2",
        "vocab": 50257,
        "hidden": 768,
        "layers": 12,
        "heads": 12,
        "kv_heads": 12,
        "head_dim": 64,
        "ffn": 3072,
        "positions": 1024,
        "tied": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama2-7b": _llama(32000, 4096, 32, 32, 32, 11008),
    "llama3-8b": _llama(128256, 4096, 32, 32, 8, 14336),
    "llama3-70b": _llama(128256, 8192, 80, 64, 8, 28672),
    "llama3.2-1b": _llama(128256, 2048, 16, 32, 8, 8192, tied=True),
    "mistral-7b-v0.1": _llama(32000, 4096, 32, 32, 8, 14336),
    "qwen2-7b": {**_llama(152064, 3584, 28, 28, 4, 18944), "qkv_bias": True},
    "gemma2-9b": {
        **_llama(256000, 3584, 42, 16, 8, 14336, tied=True),
        "family": "gemma2",
        "head_dim": 256,
        "caps_logits": True,
    },
    "mixtral-8x7b": {
        **_llama(32000, 4096, 32, 32, 8, 14336),
        "family": "mixtral",
        "experts": 8,
        "experts_per_token": 2,
    },
}
NUM_PARAMS = {
    "gpt2": "124439808",
    "llama2-7b": "6738415616",
    "llama3-8b": "8030261248",
    "llama3-70b": "70553706496",
    "llama3.2-1b": "1235814400",
    "mistral-7b-v0.1": "7241732096",
    "qwen2-7b": "7615616512",
    "gemma2-9b": "9241705984",
    "mixtral-8x7b": "46702792704",
}

# ---- Activations: references.ACTIVATIONS, sections 4.1 and 5. Bytes of one layer with 16-bit activations. ----

# s sequence, b batch, h hidden, a heads; GELU, a 4h MLP, dropout, multi-head attention whose (s, s) matrix is stored.
# Not for SwiGLU, grouped-query attention, or fused attention that keeps only the log-sum-exp.
ACTIVATION_FORMULA = "s*b*h*(34 + 5*a*s/h)"
GPT3 = {"s": 2048, "h": 12288, "a": 96}
GPT3_5AS_OVER_H = "80"

# ---- Quantized moments: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861, section 2.1.
# Elements that share one fp32 scale. ----

QUANTIZED_BLOCK_NUMEL = 2048

# ---- Devices: references.GPU_CAPACITIES. What the driver gives a process is a little less: show both. ----

GPU_CAPACITY_NBYTES = {
    "a100-40gb": 42_949_672_960,
    "a100-80gb": 85_899_345_920,
    "h100-80gb": 85_899_345_920,
    "h200-141gb": 150_754_820_096,
}
# "GB" on the label is GiB for the first three. The H200's figure is the 143,771 MiB that nvidia-smi lists: more than
# the 141 * 10**9 of its label, less than 141 GiB.
GPU_CAPACITY_FORMULAS = {
    "a100-40gb": "40 * 2**30",
    "a100-80gb": "80 * 2**30",
    "h100-80gb": "80 * 2**30",
    "h200-141gb": "143771 * 2**20",
}
