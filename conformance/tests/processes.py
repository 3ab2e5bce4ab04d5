"""Waiting for processes and for what they write."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def wait_for_text(path: Path, seconds: float = 30) -> str:
    """Contents of a file as soon as there are any."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def wait_until_gone(pid: int, seconds: float = 10) -> None:
    """Return when a process has ended; kill it and fail if it does not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not is_running(pid):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"process {pid} is still there")


def is_running(pid: int) -> bool:
    """Whether a process runs; one that ended but that nobody has waited for does not."""
    if Path("/proc/self/stat").exists():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
