"""What gloo's collectives cost beside its all-reduce of the same array, in one run: why a clock says otherwise than a
count of bytes.

    python benchmarks/gloo_times.py [RANKS]

All are of one array of fp32 and made in turn; the ratios are medians of the rounds'. In a ring an all-gather and a
reduce-scatter send half of what an all-reduce sends. "all-gather by broadcasts" is every rank's part broadcast in turn.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore", "`torch.distributed.", FutureWarning)  # names that torch 2.11 has too

NUMELS = (10**5, 10**6, 10**7)
NUM_ROUNDS = 15


def measure(rank: int, ranks: int, store: str) -> list[tuple[int, dict[str, list[float]]]]:
    """Milliseconds of each collective in each round, for each number of elements."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    found = []
    for numel in NUMELS:
        part = numel // ranks
        whole, shard = torch.randn(part * ranks), torch.randn(part)
        parts = list(whole.split(part))

        def by_broadcasts(parts: list[torch.Tensor] = parts) -> None:
            for source, each in enumerate(parts):
                dist.broadcast(each, source)

        kinds: dict[str, Callable[[], object]] = {
            "all-reduce": lambda whole=whole: dist.all_reduce(whole),
            "reduce-scatter": lambda shard=shard, whole=whole: dist.reduce_scatter_tensor(shard, whole),
            "all-gather": lambda shard=shard, whole=whole: dist.all_gather_into_tensor(whole, shard),
            "all-gather by broadcasts": by_broadcasts,
        }
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(NUM_ROUNDS + 2):
            whole.fill_(1.0)
            for name, collective in kinds.items():
                dist.barrier()
                start = time.perf_counter()
                collective()
                if number >= 2:
                    times[name].append((time.perf_counter() - start) * 1e3)
        found.append((part * ranks, times))
    dist.destroy_process_group()
    return found


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks) as pool:
        store = str(Path(folder) / "store")
        futures = [pool.submit(measure, rank, ranks, store) for rank in range(ranks)]
        found, *_ = [future.result() for future in futures]
    print(f"torch {torch.__version__}, gloo, {ranks} ranks, {NUM_ROUNDS} rounds; ratios to the all-reduce of the round")
    print(f"{'elements':>12}  {'all-reduce':>10}  {'reduce-scatter':>14}  {'all-gather':>10}  {'by broadcasts':>13}")
    for numel, times in found:
        base = times["all-reduce"]
        ratios = [
            statistics.median(mine / one for mine, one in zip(times[name], base, strict=True))
            for name in ("reduce-scatter", "all-gather", "all-gather by broadcasts")
        ]
        of_first = f"{numel:>12,}  {statistics.median(base):>7.1f} ms"
        print(f"{of_first}  {ratios[0]:>14.2f}  {ratios[1]:>10.2f}  {ratios[2]:>13.2f}")


if __name__ == "__main__":
    main()
