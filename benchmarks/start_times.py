"""How long a person waits: a run from a cold shell, and the second run in a notebook whose engines are warm.

The notebook runs are made in a real Jupyter kernel, as one asyncio task on its main loop, as the explorer makes them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import nbformat
from nbclient import NotebookClient

MODEL, STRATEGY, RANKS, NUM_WARM = "tiny", "zero3", 4, 5

NOTEBOOK = f"""
import json, time
from cluster.live import LiveBackend
from zeroviz.spec import RunSpec, Strategy, preset

spec = RunSpec(model=preset({MODEL!r}), strategy=Strategy({STRATEGY!r}), ranks={RANKS})
backend = LiveBackend()
times_s = []
for _ in range(1 + {NUM_WARM}):
    start = time.perf_counter()
    trace = await backend.run(spec, lambda progress: None)
    times_s.append(time.perf_counter() - start)
await backend.stop()
step_s = max(max(rank.step_time_ns[:-1]) for rank in trace.ranks) / 1e9
print(json.dumps([times_s, step_s]))
"""


def cold_shell_s() -> float:
    """Seconds from typing the command to the prompt."""
    command = [sys.executable, "-m", "zeroviz.cli", "run", "--json"]
    options = ["--model", MODEL, "--strategy", STRATEGY, "--ranks", str(RANKS)]
    start = time.perf_counter()
    subprocess.run([*command, *options], check=True, capture_output=True, timeout=120)
    return time.perf_counter() - start


def notebook_s() -> tuple[list[float], float]:
    """(seconds of each run in one kernel, the first one cold; seconds of the slowest unmetered warm step)."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTEBOOK)])
    NotebookClient(notebook, timeout=180, kernel_name="python3").execute()
    times_s, step_s = json.loads(notebook.cells[0].outputs[-1]["text"])
    return times_s, step_s


def main() -> None:
    shell_s = cold_shell_s()
    (first_s, *warm_s), step_s = notebook_s()
    print(f"{MODEL}, {STRATEGY}, {RANKS} ranks")
    print(f"  cold shell, command to prompt   {shell_s:6.2f} s")
    print(f"  notebook, first run             {first_s:6.2f} s   {first_s / shell_s:5.2f} of the cold shell")
    print(f"  notebook, second run            {warm_s[0]:6.2f} s   {warm_s[0] / shell_s:5.2f} of the cold shell")
    median_s = sorted(warm_s)[len(warm_s) // 2]
    print(f"  notebook, warm runs, median     {median_s:6.2f} s   {median_s / shell_s:5.2f} of the cold shell")
    print(f"  of it the slowest plain step    {step_s:6.2f} s")


if __name__ == "__main__":
    main()
