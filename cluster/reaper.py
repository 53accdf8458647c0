"""No process outlives its owner: a guard beside every pool, and the sweep that guard and owner share.

[Note: marked processes] Every process of a pool carries `ZEROVIZ_POOL=<the pool's directory>` in its environment and
passes it on to whatever it starts or forks. The sweep kills by that mark and never by a remembered number, so a
reused process id is never hit, nothing has to be registered, and a process started an instant before its owner died
is found all the same.

The guard is `python -m cluster.reaper DIRECTORY OWNER_PID`, in a session of its own so that no terminal signal reaches
it. It holds the read end of a pipe from the owner. When the pipe closes, or when its parent is no longer the owner
(a forked child of the owner may still hold the pipe), it sweeps the pool and leaves. It never imports torch.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "ZEROVIZ_POOL"
OWNER_CHECK_S = 0.5
SWEEP_TIMEOUT_S = 5.0
KILL_POLL_S = 0.01


def package_path(*more: str) -> str:
    """A PYTHONPATH under which a child imports the same zeroviz and cluster as this process, then `more`."""
    return os.pathsep.join([str(Path(__file__).resolve().parent.parent), *(path for path in more if path)])


def start_guard(directory: Path) -> subprocess.Popen[bytes]:
    """Start the guard of the pool in `directory`. It sweeps as soon as its stdin closes or this process is gone."""
    environment = {**os.environ, "PYTHONPATH": package_path()}
    # The guard must not carry a mark itself, or it would be swept: by its own pool or, nested, by an outer one.
    environment.pop(MARK, None)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cluster.reaper", str(directory), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd="/",
        start_new_session=True,
    )


def dismiss_guard(guard: subprocess.Popen[bytes]) -> None:
    """Close the guard's pipe and wait for it to leave. Idempotent."""
    if guard.stdin and not guard.stdin.closed:
        guard.stdin.close()
    try:
        guard.wait(SWEEP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def marked_processes() -> Iterator[tuple[Path, psutil.Process]]:
    """Every process on this machine, readable by this user, that belongs to a pool, with the pool's directory."""
    for process in psutil.process_iter():
        try:
            directory = process.environ().get(MARK)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
        if directory and process.pid != os.getpid():
            yield Path(directory), process


def sweep(directory: Path) -> None:
    """Kill every process of the pool in `directory`, wait until they are gone, and remove the directory.

    SIGKILL at once: none of them holds anything worth saving, and a graceful stop of the controller takes seconds.
    Raises TimeoutError if some are still there after SWEEP_TIMEOUT_S.
    """
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    # Listed again after each kill, since a process may have forked in between. A zombie has no environment and counts
    # as gone: the controller's children become those of process 1, which may take seconds to collect them.
    while members := [process for home, process in marked_processes() if home == directory]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[process.pid for process in members]} of {directory} do not die")
        for process in members:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(KILL_POLL_S)
    shutil.rmtree(directory, ignore_errors=True)


def _wait_for_owner(owner_pid: int) -> None:
    """Return when stdin is closed or the owner is gone."""
    while os.getppid() == owner_pid:
        readable, _, _ = select.select([sys.stdin], [], [], OWNER_CHECK_S)
        if readable and not os.read(sys.stdin.fileno(), 1024):
            return


def main() -> None:
    directory, owner_pid = Path(sys.argv[1]), int(sys.argv[2])
    _wait_for_owner(owner_pid)
    sweep(directory)


if __name__ == "__main__":
    main()
