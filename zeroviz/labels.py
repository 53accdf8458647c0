"""Labels in English or Chinese: what controls, headings, buttons and parts of pictures are called.

Labels alone are translated. Sentences stay English, and so do the field's own words where Chinese texts keep them:
names of strategies and of collectives, rank, shard, batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import Enum
from functools import lru_cache
from html import escape, unescape

from zeroviz.labels_chinese import CHINESE

Say = Callable[[str], str]
"""Puts a label in a language."""


class Language(Enum):
    ENGLISH = "English"
    CHINESE = "中文"


_AMOUNT = r"(?P<amount>[\d.,]+ [kMGTPE]?B|[\d.,]*P|[\d,]+ elements?)"
_COUNT = r"(?P<count>[\d,]+)"
_RULES = [
    (re.compile(pattern), said)
    for pattern, said in (
        # a label with its bytes, as areas and bars carry them
        (rf"(?P<label>.+) up to {_AMOUNT}", "{label} 至多 {amount}"),
        (rf"(?P<label>.+?) {_AMOUNT}", "{label} {amount}"),
        (rf"peak {_AMOUNT} in (?P<free_place>.+)", "峰值 {amount}，{free_place}"),
        (r"(?P<times>[\d.,]+) x DDP's", "DDP 的 {times} 倍"),
        (r"(?P<label>dotted|almost there too): (?P<what>.+)", "{label}：{what}"),
        (r"(?P<gpu>.+) less its reserve: (?P<budget>[^,]+)", "{gpu} 减去预留：{budget}"),
        (r"(?P<label>.+), beyond the axis", "{label}，在坐标轴之外"),
        # where in a step
        (r"(?P<label>forward|backward|optimizer) of (?P<unit>.+)", "{label} {unit}"),
        (r"(?P<label>forward|backward|optimizer), (?P<unit>[^,]+)", "{label}，{unit}"),
        # axes
        (rf"(?P<label>.+); the axis begins at {_AMOUNT}, not at 0", "{label}；坐标轴始于 {amount}，不始于 0"),
        (r"(?P<unit>\w?B) (?P<label>[hs].+?) \(1 \w?B = (?P<scale>[\d,]+) bytes\)",
         "{label}，{unit}（1 {unit} = {scale} 字节）"),
        (r"(?P<unit>\w?B) (?P<label>[hs].+)", "{label}，{unit}"),
        (rf"elements moved by a rank in one step \(P = {_COUNT} parameters\)",
         "每个 rank 一步中移动的元素（P = {count} 个参数）"),
        (r"(?P<label>held .+|sent .+) by rank (?P<rank>[\d,]+)", "rank {rank} {label}"),
        (r"bytes (?P<label>.+); logarithmic: each line is 10 times the one before",
         "{label}，字节；对数轴：每格 10 倍"),
        # ranks and their groups
        (r"ranks (?P<first>[\d,]+)(?: to |-)(?P<last>[\d,]+)", "rank {first} 至 {last}"),
        (r"ranks (?P<list>\d[\d,\- ]*(?:…|\.\.\.)?)", "rank {list}"),
        (r"rank (?P<rank>[\d,]+), group (?P<group>[\d,]+), shard (?P<shard>[\d,]+)",
         "rank {rank}，第 {group} 组，shard {shard}"),
        (rf"{_COUNT} ranks, replicas of (?P<label>ranks? [\d,]+(?: to [\d,]+)?)", "{count} 个 rank，{label} 的副本"),
        (rf"{_COUNT} ranks, (?P<label>.+)", "{count} 个 rank，{label}"),
        (r"(?P<free_who>.+), (?P<label>in bytes|in elements|in group|across groups|among all)", "{free_who}，{label}"),
        (r"(?P<dtype>\w+) (?P<label>in group|across groups)", "{dtype} {label}"),
        (r"(?P<label>predicted|measured|sent|moved), (?P<free_more>.+)", "{label}，{free_more}"),
        # what is drawn
        (r"(?P<dtype>\w+), (?P<width>[\dx ]+ B) an element", "{dtype}，每元素 {width}"),
        (r"(?P<label>.+); in the host's memory", "{label}；在主机内存"),
        (r"one (?P<op>[a-z-]+) of the (?P<dtype>\w+) gradient", "{dtype} 梯度的一次 {op}"),
        (r"The model's (?P<amount>.+):", "模型的 {amount}："),
        (r"(?P<label>[AO].+), rank (?P<rank>[\d,]+)", "{label}，rank {rank}"),
        (r"The allocator's own figures \((?P<source>.+)\)", "分配器自己的数字（{source}）"),
        (r"step (?P<number>\d+)", "第 {number} 步"),
        # what controls offer
        (rf"(?P<name>[^;,]+), {_COUNT} parameters?", "{name}，{count} 个参数"),
        (rf"{_COUNT} parameters?", "{count} 个参数"),
        (r"(?P<free_value>.+), as usual", "{free_value}，默认"),
        (r"(?P<name>[\w-]+), arithmetic only", "{name}，只作推算"),
        # changes
        (r"(?P<label>[a-z]+) (?P<new>[\w.:,]+) instead of (?P<old>[\w.:,]+)", "{label} {new}（原为 {old}）"),
        (rf"{_COUNT} ranks instead of (?P<old>[\d,]+)", "{count} 个 rank（原为 {old}）"),
        (r"strategy (?P<name>\S+) and (?P<label>.+)", "策略 {name}，{label}"),
        (r"shard groups of (?P<new>[\d,]+) instead of (?P<old>[\d,]+)", "分片组 {new}（原为 {old}）"),
        (r"recompute block by block instead of (?P<old>\d+) together", "逐块重计算（原为 {old} 块一起）"),
        (r"gradients (?P<dtype>\w+), as the precision has them", "梯度 {dtype}，随精度"),
        (r"(?P<label>strategy|precision|optimizer) (?P<name>\S+)", "{label} {name}"),
        (r"All of it: (?P<all>.+)", "全部：{all}"),
        # what a guess and a change do
        (rf"{_AMOUNT} too much", "多 {amount}"),
        (rf"{_AMOUNT} too little", "少 {amount}"),
        (rf"(?P<label>.+?) {_AMOUNT} less", "{label}减 {amount}"),
        (rf"{_AMOUNT} more on the host", "主机上增 {amount}"),
        (rf"(?P<label>.+? {_AMOUNT} less), (?P<what>.+)", "{label}；{what}"),
    )
]  # fmt: skip
"""Labels with what varies in them: `label` and `what` are labels themselves, or it is none; `free_...` may be one."""
_NAME = re.compile(r"rank [\d,]+|(?:all|reduce|broadcast)[\w-]*(?: \w+)?")
"""What a label may be made of as it is."""


def say(label: str, language: Language) -> str:
    """`label` in a language; what is no label, as it is."""
    return label if language is Language.ENGLISH else _chinese(label)


@lru_cache(maxsize=4096)
def _chinese(label: str) -> str:
    if label in CHINESE:
        return CHINESE[label]
    for pattern, said in _RULES:
        if found := pattern.fullmatch(label):
            parts = {name: _part(name, part) for name, part in found.groupdict().items()}
            if None not in parts.values():
                return said.format_map(parts)
    return label


def _part(name: str, part: str) -> str | None:
    """What a label is made of; None for what should be a label and is none."""
    if name not in ("label", "what", "all") and not name.startswith("free_"):
        return part
    said = "、".join(map(_chinese, part.split(", "))) if name == "all" else _chinese(part)
    is_label = said != part or part in CHINESE or _NAME.fullmatch(part)
    return said if is_label or name not in ("label", "what") else None


# ---- in HTML ----

_PIECE = re.compile(r"<(?P<end>/?)(?P<tag>\w+)[^>]*>|(?P<text>[^<>]+)")
_SENTENCES = frozenset(("p", "li", "dd", "pre", "sub", "style"))
"""Elements in which there are no labels."""


def say_html(html: str, say: Say) -> str:
    """HTML with its labels put as `say` does: each text between two tags, but for what stands in sentences."""
    return "".join(_said(html, say)) if say is not str else html


def _said(html: str, say: Say) -> Iterator[str]:
    within = 0
    for found in _PIECE.finditer(html):
        if found["tag"] in _SENTENCES:
            within += -1 if found["end"] else 1
        if found["text"] and not within:
            yield escape(say(unescape(found["text"])))
        else:
            yield found[0]
