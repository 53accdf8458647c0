"""Labels in English or Chinese: what controls, headings, buttons and parts of pictures are called.

Labels alone are translated. Sentences stay English, and so do the field's own words where Chinese texts keep them:
names of strategies, rank, shard, batch, all-gather.
"""

from __future__ import annotations

import re
from enum import Enum


class Language(Enum):
    ENGLISH = "English"
    CHINESE = "中文"


_AMOUNT = re.compile(r"(?P<label>.+?)(?P<up_to> up to)? (?P<amount>[\d.,]+ [kMGTPE]?B)")
"""A label with its bytes, as areas and bars carry them."""
_RANKS = re.compile(r"ranks (?P<first>[\d,]+)(?: to |-)(?P<last>[\d,]+)")
_RANK = re.compile(r"rank (?P<rank>[\d,]+)(?P<more>, group [\d,]+, shard [\d,]+)?")


def say(label: str, language: Language) -> str:
    """`label` in a language; what is no label, as it is."""
    if language is Language.ENGLISH:
        return label
    if label in _CHINESE:
        return _CHINESE[label]
    if (found := _AMOUNT.fullmatch(label)) and found["label"] in _CHINESE:
        return f"{_CHINESE[found['label']]}{' 至多' if found['up_to'] else ''} {found['amount']}"
    if label.startswith("ranks ") and label.endswith("…"):
        return label.replace("ranks", "rank")
    if found := _RANKS.fullmatch(label):
        return f"rank {found['first']} 至 {found['last']}"
    if (found := _RANK.fullmatch(label)) and found["more"]:
        return f"rank {found['rank']}" + found["more"].replace(", group ", "，第 ").replace(", shard ", " 组，shard ")
    return label


_CHINESE = {
    # what is held
    "parameters, own shard": "参数，本地分片",
    "parameters, whole": "参数，完整",
    "parameters on the host": "主机上的参数",
    "gradients, own shard": "梯度，本地分片",
    "gradients, whole": "梯度，完整",
    "gradients on the host": "主机上的梯度",
    "fp32 master": "fp32 主参数",
    "fp32 master, own shard": "fp32 主参数，本地分片",
    "fp32 master on the host": "主机上的 fp32 主参数",
    "Adam m and v": "Adam 矩 m、v",
    "Adam m and v, own shard": "Adam 矩 m、v，本地分片",
    "Adam m and v on the host": "主机上的 Adam 矩 m、v",
    "momentum": "动量",
    "momentum, own shard": "动量，本地分片",
    "momentum on the host": "主机上的动量",
    "activations": "激活",
    "gather buffer": "gather 缓冲区",
    "reduce buffer": "reduce 缓冲区",
    "buckets": "桶",
    "temporaries": "临时张量",
    "temporaries on the host": "主机上的临时张量",
    "input": "输入",
    "kernels' scratch": "算子暂存",
    "backend's copies": "通信后端的副本",
    "unattributed": "未归属",
    "padding": "填充",
    "params": "参数",
    "grads": "梯度",
    "master": "主参数",
    "temp": "临时",
    # the pictures
    "at rest": "静止时",
    "at peak": "峰值时",
    "at rest (difference)": "静止时（差）",
    "at peak (difference)": "峰值时（差）",
    "predicted": "预测",
    "measured": "实测",
    "recorded": "录制",
    "rehearsed": "演练",
    "forward": "前向",
    "backward": "反向",
    "optimizer": "优化器",
    "block": "块",
    "unit": "单元",
    "root": "根",
    "each rank": "每个 rank",
    "held by this rank alone": "只由这个 rank 持有",
    "held by this rank alone, of its group": "在组内只由这个 rank 持有",
    "a whole copy, the same on every rank": "完整副本，各 rank 相同",
    "not held": "未持有",
    "whole copy": "完整副本",
    "nothing": "无",
    "Parameters, own shard": "参数：本地分片",
    "Parameters, whole copy": "参数：完整副本",
    "Gradients, own shard": "梯度：本地分片",
    "Gradients, whole copy": "梯度：完整副本",
    "Master copy, own shard": "主参数：本地分片",
    "Master copy, whole copy": "主参数：完整副本",
    "Adam m and v, whole copy": "Adam 矩 m、v：完整副本",
    "Momentum, own shard": "动量：本地分片",
    "Momentum, whole copy": "动量：完整副本",
    "calls": "次数",
    "payload": "负载",
    "sent": "发送",
    "in group": "组内",
    "across groups": "跨组",
    # controls
    "example": "例子",
    "code": "实现",
    "strategy": "策略",
    "ranks": "rank 数",
    "group": "分片组",
    "precision": "精度",
    "dtypes": "各精度",
    "moments": "矩",
    "bytes a parameter": "字节/参数",
    "blocks/unit": "每单元块数",
    "model": "模型",
    "batch": "batch",
    "sequence": "序列长度",
    "gradient": "梯度",
    "recompute": "重计算",
    "together": "一起",
    "offload": "卸载",
    "accumulate": "累积",
    "reduce": "归约",
    "clip": "裁剪",
    "gradient by": "梯度归约",
    "prefetch": "预取",
    "bucket": "桶",
    "gradients": "梯度",
    "keep whole": "保持完整",
    "reduce in": "归约精度",
    "reshard to": "重新分片到",
    "parameters": "参数",
    "gather ahead": "提前 gather",
    "gathers": "gather 数",
    "axis": "坐标轴",
    "film axis": "步骤坐标轴",
    "film of": "步骤所属",
    "wire in": "通信单位",
    "GPU": "GPU",
    "labels": "标签",
    # what they offer
    "whole model": "整个模型",
    "blocks": "块",
    "layer": "层",
    "as precision": "随精度",
    "none": "无",
    "in the last": "最后一次",
    "in each": "每一次",
    "as usual": "默认",
    "off": "关",
    "on": "开",
    "to DDP's peak": "到 DDP 峰值",
    "to the longest bar": "到最长的条",
    "from zero": "从零起",
    "from rest": "从静止起",
    "bytes": "字节",
    "elements": "元素",
    "overlap reduction and compute": "归约与计算重叠",
    # headings and buttons
    "Who holds what": "谁持有什么",
    "The whole step, op by op": "一步的全过程",
    "What each rank sends": "每个 rank 发送什么",
    "How the figures come about": "数字从何而来",
    "What to cut first": "先减什么",
    "Compare": "比较",
    "Does it fit a GPU?": "放得下吗？",
    "Take it away": "带走",
    "Another model, or a recorded trace": "另一个模型，或录制的轨迹",
    "Present": "演示",
    "Predict first": "先猜后看",
    "Run on cluster": "在集群上运行",
    "Stop": "停止",
    "Stop engines": "停止引擎",
    "Undo": "撤销",
    "Reset": "重置",
    "rest": "静止",
    "end": "结束",
    "peak": "峰值",
    "choose a question": "选择一个问题",
    "map": "图",
    "pinned": "已固定",
    "file": "文件",
    "guess": "猜",
    "number": "数值",
    "That is my guess": "这是我的猜测",
    "Pin this state": "固定此状态",
    "Go to it": "回到它",
    "Unpin it": "取消固定",
    "Download": "下载",
}
