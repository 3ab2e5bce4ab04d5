"""A command as a target, in any language: run once, on a folder of inputs, for one of results (8.1)."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from iha_conformance.errors import CommandError
from iha_conformance.protocol import FailureKind, Job, Result, TargetInfo, TargetUnavailable
from iha_conformance.targets.folder import files_info
from iha_conformance.targets.messages import Launch, how_it_ended, one_line
from iha_conformance.vectors.exchange import TENSORS, Awaited, Fault, collect, input_file, results_in

POLL_SECONDS = 0.2
"""How often it is looked whether a command goes on."""

LINGER_SECONDS = 1.0
"""How long the last words of an ended command are waited for."""

TAIL_BYTES = 65536
"""Of what a command wrote to standard error, so much is kept for the reasons of failures."""

MIN_FREE = 2**20
"""Bytes that have to be free on the disk of the temporary folder, for a port to be blamed for its files."""

OF_NO_ROOM: tuple[FailureKind, ...] = ("missing", "unreadable", "crashed")
"""What a port fails by if it cannot write."""

NOT_RUN = (126, 127)
"""Exit statuses by which shells and their like say that there was nothing to run."""


class ExecTarget:
    """A command that is run once as `CMD IN_DIR OUT_DIR`, in a process group of its own.

    Results are read when it has ended, so that none is half-written. Both folders are temporary.

    Args:
        launch: its name is the command, in words as a shell has them; no shell runs it.
        timeout: seconds without a new result after which it is ended.

    Raises:
        CommandError: those are no words.
        TargetUnavailable: there is no such program.
    """

    capabilities: frozenset[str] = frozenset()
    takes_all = True

    def __init__(self, launch: Launch, *, timeout: float) -> None:
        self.name = launch.name
        self.launch = launch
        self._words = split_command(launch.name)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._closed = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def info(self) -> TargetInfo:
        """What is known of a command; its precision class is what was declared for it."""
        return files_info(self.launch, "command")

    def evaluate(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """One result for each job; all jobs are taken before the first result is given.

        Raises:
            CommandError: the inputs cannot be written, or the results could not, since the disk is full.
            TargetUnavailable: the command cannot be run.
        """
        try:
            with self._lock:
                if self._closed:
                    return
                self._folder = _temporary_folder()
            root = Path(self._folder.name)
            awaited = self._write_inputs(root, jobs)
            cases = [one for one in awaited if one.capability is None]
            fault, seconds = self._run(root, cases) if cases else (None, 0.0)
            free = _free(root)  # before anything is removed
            if not self._closed:
                share = seconds / max(1, len(cases))
                for result in collect(root / "out", awaited, fault=fault, seconds=share):
                    _check_space(root, free, result)
                    yield result
        finally:
            self._end()

    def close(self) -> None:
        """End the command, if it runs, with whatever it started; remove its folders."""
        self._closed = True
        self._end()

    def _write_inputs(self, root: Path, jobs: Iterable[Job]) -> list[Awaited]:
        awaited = []
        for job in jobs:
            one = Awaited.of(job)
            awaited.append(one)
            with self._lock, _writing(root):
                if self._closed:
                    return []
                if one.capability is None:
                    (root / "in" / (one.stem + TENSORS)).write_bytes(input_file(job))
        return awaited

    def _run(self, root: Path, cases: Sequence[Awaited]) -> tuple[Fault | None, float]:
        """Run the command; how it ended, if not well, and how long it took."""
        start = time.monotonic()
        with self._lock:
            if self._closed:
                return None, 0.0
            process = self._process = _start([*self._words, str(root / "in"), str(root / "out")])
        assert process.stderr is not None
        tail = bytearray()
        tee = threading.Thread(target=_copy_to_stderr, args=(process.stderr, tail), daemon=True)
        tee.start()
        hung = not _wait(process, root / "out", cases, self._timeout)
        seconds = time.monotonic() - start
        with self._lock:
            self._kill()
        tee.join(LINGER_SECONDS)
        if hung:
            return Fault("hung", f"no new file with a result within {self._timeout:g} s"), seconds
        status = process.returncode
        if status == 0:
            return None, seconds
        reason, said = how_it_ended(status), _lines(tail)
        if status in NOT_RUN and not results_in(root / "out", cases):
            words = ": ".join([reason, *map(one_line, said[-1:])])
            raise TargetUnavailable(f"--exec: cannot run {self.name!r}: {words}")
        return Fault("crashed", reason, said), seconds

    def _end(self) -> None:
        with self._lock:
            self._kill()
            if self._folder is not None:
                with contextlib.suppress(OSError, RecursionError):  # whatever a port left there
                    self._folder.cleanup()
                _say_if_left(self._folder.name)
                self._folder = None

    def _kill(self) -> None:
        """End the command and all of its process group, also what it left running."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._process = None


def split_command(text: str) -> list[str]:
    """The words of a command, as a POSIX shell would split them.

    Raises:
        CommandError: there is none, or a quotation mark too few.
        TargetUnavailable: the first one names no program.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise CommandError(f"--exec: expected words as in a shell, got {text!r}: {error}") from error
    if not words or not words[0]:
        raise CommandError(f"--exec: expected a command, got {text!r}")
    if shutil.which(words[0]) is None:
        found = "a file that is not executable" if os.path.exists(words[0]) else "no such program"
        raise TargetUnavailable(f"--exec: cannot run {text!r}: {found}: {words[0]!r}")
    return words


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder with the folders `in` and `out`."""
    where = Path(tempfile.gettempdir())
    with _writing(where):
        folder = tempfile.TemporaryDirectory(prefix="iha-", ignore_cleanup_errors=True)
        for name in ("in", "out"):
            (Path(folder.name) / name).mkdir()
    return folder


@contextlib.contextmanager
def _writing(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"--exec: cannot write inputs in {str(where)!r}: {error.strerror}") from error


def _free(folder: Path) -> int | None:
    """Bytes that are free where the folder is; None if nobody can say."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _check_space(where: Path, free: int | None, result: Result) -> None:
    """Refuse to blame a port for a result that found no room on the kit's own disk.

    Raises:
        CommandError: the disk was full, and the result is not what it should be.
    """
    if free is not None and free < MIN_FREE and result.failure in OF_NO_ROOM:
        raise CommandError(
            f"--exec: expected at least {MIN_FREE} bytes free for results in {str(where.parent)!r}, found"
            f" {free}; TMPDIR names another folder"
        )


def _say_if_left(folder: str) -> None:
    """A line about a temporary folder that is still there: it may be large, and nobody else removes it."""
    if os.path.lexists(folder):
        with contextlib.suppress(OSError):
            print(f"iha: --exec: cannot remove {folder!r}", file=sys.stderr, flush=True)


def _start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    try:
        # What it prints goes to standard error, as for any target: standard output has the report. In a
        # session of its own Ctrl-C reaches this process alone, which then ends all that it started.
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise TargetUnavailable(f"--exec: cannot run {words[0]!r}: {error.strerror}") from error


def _wait(process: subprocess.Popen[bytes], out: Path, cases: Sequence[Awaited], timeout: float) -> bool:
    """Wait for the end, as long as there are new results; False if there were none for too long."""
    seen, last = 0, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=min(POLL_SECONDS, timeout))
            return True
        found = results_in(out, cases)
        if found > seen:
            seen, last = found, time.monotonic()
        elif time.monotonic() - last > timeout:
            return False


def _copy_to_stderr(pipe: IO[bytes], tail: bytearray) -> None:
    """Pass on what a command says, and keep the end of it, until everybody has closed the pipe."""
    with contextlib.suppress(OSError, ValueError), pipe:
        while chunk := os.read(pipe.fileno(), 65536):
            tail += chunk
            del tail[:-TAIL_BYTES]
            with contextlib.suppress(OSError):  # nobody reads it: the command goes on
                while chunk:
                    chunk = chunk[os.write(2, chunk) :]


def _lines(tail: bytearray) -> tuple[str, ...]:
    """What a command said at the end, without blank lines."""
    return tuple(line for line in tail.decode("utf-8", "replace").splitlines() if line.strip())
