"""The parent's side: a target in a worker process, which may raise, crash, hang or print at will."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from iha_conformance.protocol import FailureKind, Job, Result, TargetInfo, TargetUnavailable
from iha_conformance.targets.messages import Launch, Ready, Unavailable, how_it_ended

MAX_HANGS = 3
"""Cases in a row that may hang; a target that always does would cost the time limit for each case."""

START_SECONDS = 120.0
"""Time to import a target; generous, since a framework may start slowly on a busy machine."""

# The worker imports from exactly where this process does; "-c" with a list of our own avoids that
# the working directory, with whatever lies there, comes first for the built-in backends too.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from iha_conformance.targets.worker import main; main()"
)


class WorkerEndedError(Exception):
    """The worker process is gone; the message says how it ended."""


class WorkerSilentError(Exception):
    """No answer came in time."""


class Worker:
    """One worker process. A thread does the reading and writing, so that waiting can end in time."""

    def __init__(self) -> None:
        # Several frameworks compute side by side: threads that spin while they wait would slow all of
        # them down many times over. How many threads there are, and so every result, stays as it is.
        # A session of its own: Ctrl-C reaches the parent alone, which then ends all that it started.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps([path or os.getcwd() for path in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ,
        )
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def post(self, message: object) -> None:
        """Send a message and return at once; each has one answer."""
        self._outbox.put(message)

    def take(self, timeout: float) -> Any:
        """The next answer.

        Raises:
            WorkerEndedError: the process ended, or what it sent cannot be read.
            WorkerSilentError: there was no answer within `timeout` seconds.
        """
        try:
            answer = self._inbox.get(timeout=timeout)
        except queue.Empty:
            raise WorkerSilentError from None
        if answer is None:
            raise WorkerEndedError(self._how_it_ended())
        return answer

    def kill(self) -> None:
        """End the process and whatever it started."""
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._outbox.put(None)
        self._thread.join(timeout=1.0)

    def _talk(self) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(OSError), stdin, stdout:
            while (message := self._outbox.get()) is not None:
                try:
                    pickle.dump(message, stdin, protocol=pickle.HIGHEST_PROTOCOL)
                    stdin.flush()
                    self._inbox.put(pickle.load(stdout))
                except Exception:  # a broken pipe, its end, or bytes that are no pickle
                    self._inbox.put(None)
                    return

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "the process closed its pipe or sent something unreadable"
        return how_it_ended(code)


class ProcessTarget:
    """A target that runs in a worker process, replaced by a new one when it crashes or hangs.

    The process starts at once and in the background; `info` waits until the target is loaded.

    Args:
        launch: what to load.
        timeout: seconds for one job, both runs of it.
    """

    takes_all = False

    def __init__(self, launch: Launch, *, timeout: float) -> None:
        self.name = launch.name
        self.launch = launch
        self._timeout = timeout
        self._about: Ready | None = None
        self._hangs = 0  # in a row
        self._closed = False
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._loaded: Worker | None = None  # the worker that has said it is ready
        self._start()

    @property
    def info(self) -> TargetInfo:
        """Who this is. Raises `TargetUnavailable` if the target cannot be loaded."""
        return self._introduction().info

    @property
    def capabilities(self) -> frozenset[str]:
        """What the target declares. Raises `TargetUnavailable` if it cannot be loaded."""
        return self._introduction().capabilities

    def evaluate(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """One result for each job, whatever the target does; after `MAX_HANGS` in a row, failures."""
        for job in jobs:
            if self._closed:
                return
            yield self._evaluate(job)

    def close(self) -> None:
        """End the worker process."""
        with self._lock:
            self._closed = True
            if self._worker is not None:
                self._worker.kill()

    def _evaluate(self, job: Job) -> Result:
        if job.capability is not None and job.capability not in self.capabilities:
            reason = f"the target does not declare the capability {job.capability!r}"
            return Result(case_id=job.case_id, dtype=job.dtype, kind="not_applicable", reason=reason)
        if self._hangs >= MAX_HANGS:
            return _failed(job, "hung", f"not run: hung {MAX_HANGS} times in a row")
        result = self._run(job)
        self._hangs = self._hangs + 1 if result.failure == "hung" else 0
        return result

    def _run(self, job: Job) -> Result:
        """Have the worker carry out a job; starts and ends workers as needed."""
        try:
            worker = self._load()
        except TargetUnavailable as error:  # it loaded once, but not again
            return _failed(job, "crashed", f"cannot be started again: {error}")
        worker.post(job)
        try:
            result = worker.take(self._timeout)
        except WorkerEndedError as error:
            self._drop(worker)
            return _failed(job, "crashed", str(error))
        except WorkerSilentError:
            self._drop(worker)
            return _failed(job, "hung", f"no result within {self._timeout:g} s", seconds=self._timeout)
        if not isinstance(result, Result) or (result.case_id, result.dtype) != (job.case_id, job.dtype):
            self._drop(worker)
            return _failed(job, "crashed", "the process sent something else than a result")
        if result.failure == "crashed":
            self._drop(worker)
        return result

    def _start(self) -> Worker:
        """The worker process, started anew if there is none."""
        with self._lock:
            if self._closed:
                raise TargetUnavailable("closed")
            if self._worker is None:
                self._worker = Worker()
                self._worker.post(self.launch)
            return self._worker

    def _drop(self, worker: Worker) -> None:
        with self._lock:
            if self._worker is worker and not self._closed:
                self._worker = None
        worker.kill()

    def _introduction(self) -> Ready:
        """What the target said of itself when it was first loaded."""
        if self._about is None:
            self._load()
        assert self._about is not None
        return self._about

    def _load(self) -> Worker:
        """A worker that has loaded the target, waiting for that if need be."""
        worker = self._start()
        if worker is self._loaded:
            return worker
        limit = max(START_SECONDS, self._timeout)
        try:
            answer = worker.take(limit)
        except WorkerEndedError as error:
            answer = Unavailable(reason=f"target {self.name!r} crashed at import: {error}")
        except WorkerSilentError:
            answer = Unavailable(reason=f"target {self.name!r} was not loaded within {limit:g} s")
        if not isinstance(answer, Ready):
            self._drop(worker)
            unclear = f"target {self.name!r} answered something unclear at import"
            raise TargetUnavailable(answer.reason if isinstance(answer, Unavailable) else unclear)
        self._about = answer
        self._loaded = worker
        return worker


def _failed(job: Job, failure: FailureKind, reason: str, *, seconds: float = 0.0) -> Result:
    return Result(
        case_id=job.case_id, dtype=job.dtype, kind="failed", failure=failure, reason=reason, seconds=seconds
    )
