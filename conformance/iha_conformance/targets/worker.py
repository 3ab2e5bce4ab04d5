"""The worker process: loads one target and answers jobs, one at a time.

Jobs come in and results go out as pickles over what were standard input and output. Both are put
away before the target is imported: what it prints goes to standard error, what it reads is empty.
"""

from __future__ import annotations

import copy
import os
import pickle
import queue
import signal
import sys
import threading
import time
from typing import Any, BinaryIO

import numpy as np

from iha_conformance.corpus import apply_layout
from iha_conformance.protocol import Inputs, Job, Result, TargetUnavailable
from iha_conformance.targets.messages import (
    Adapter,
    Arrays,
    Launch,
    OutputMissingError,
    Ready,
    RefusedError,
    Unavailable,
    WrongReturnError,
    class_names,
    describe,
    one_line,
    only_wanted,
)

LINGER = 2.0
"""Seconds that a busy target is left alone after the parent is gone."""


def main() -> None:
    """Serve until the parent closes the pipe."""
    incoming, outgoing = _take_over_standard_streams()
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(incoming, messages), daemon=True).start()

    launch: Launch | None = messages.get()
    if launch is None:
        return
    try:
        adapter = load(launch)
    except TargetUnavailable as error:
        _send(outgoing, Unavailable(reason=one_line(str(error))))
        return
    except BaseException as error:  # such as an attribute of the target that raises when it is read
        _send(outgoing, Unavailable(reason=f"target {launch.name!r} cannot be loaded: {describe(error)}"))
        return
    _send(outgoing, Ready(info=adapter.info, capabilities=adapter.capabilities))
    while (job := messages.get()) is not None:
        result = run_job(adapter, job)
        _send(outgoing, result)
        if result.failure == "crashed":
            return  # whatever asked the process to end gets its way; the parent starts a new one


def load(launch: Launch) -> Adapter:
    """The adapter for what is to be launched; imports only what that needs."""
    if launch.kind == "callable":
        from iha_conformance.targets import callables

        return callables.load(launch.name, launch.directory, launch.precision)
    from iha_conformance.targets import backends

    return backends.load(launch.name, launch.device, launch.precision)


def run_job(adapter: Adapter, job: Job) -> Result:
    """Carry out a job twice, on fresh inputs each time, and compare the bits."""

    def fresh() -> Inputs:
        # Copied before the layout is applied: a pickle is contiguous, and so is a deep copy.
        return apply_layout(copy.deepcopy(dict(job.inputs)), job.layout)

    def gradients() -> tuple[Arrays, str | None]:
        inputs = dict(fresh())
        cotangent = inputs.pop("cotangent")
        return adapter.gradients(inputs, dict(job.config), cotangent)

    def result(**fields: Any) -> Result:
        return Result(case_id=job.case_id, dtype=job.dtype, **fields)

    kernel: str | None = None
    prefix = ""
    start = time.perf_counter()
    seconds = 0.0
    try:
        if job.capability == "invalid":  # what users call has to refuse bad input
            arrays = adapter.plain(fresh(), dict(job.config))
        elif job.operation == "gradient":
            arrays, kernel = gradients()
        else:
            arrays, kernel = adapter.detailed(fresh(), dict(job.config))
        seconds = time.perf_counter() - start
        prefix = "second run: "
        again = gradients()[0] if job.operation == "gradient" else adapter.plain(fresh(), dict(job.config))
    except RefusedError as error:
        return result(kind="refused", reason=one_line(str(error)))
    except OutputMissingError as error:
        return result(kind="failed", failure="missing", reason=prefix + one_line(str(error)))
    except WrongReturnError as error:
        reason = f"{prefix}TypeError: {one_line(str(error))}"
        return result(kind="failed", failure="raised", reason=reason, kernel=kernel, seconds=seconds)
    except BaseException as error:  # whatever a target raises is its result
        wants_to_end = isinstance(error, (SystemExit, KeyboardInterrupt))
        return result(
            kind="failed",
            failure="crashed" if wants_to_end else "raised",
            reason=prefix + describe(error),
            error_types=class_names(error),
            kernel=kernel,
            seconds=seconds or time.perf_counter() - start,
        )
    same = all(_same_bits(arrays.get(stage), array) for stage, array in again.items())
    return result(
        kind="arrays",
        arrays=only_wanted(job.wanted, arrays),
        kernel=kernel,
        repeatable=same,
        rerun=None if same else only_wanted(job.wanted, again),
        seconds=seconds,
    )


def _same_bits(first: np.ndarray[Any, Any] | None, second: np.ndarray[Any, Any]) -> bool:
    return (
        first is not None
        and first.dtype == second.dtype
        and first.shape == second.shape
        and first.tobytes() == second.tobytes()
    )


def _take_over_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Private copies of the two pipes; afterwards 0 is empty and 1 is standard error."""
    incoming = os.fdopen(os.dup(0), "rb")
    outgoing = os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        # Prints of any target must neither fail for want of an encoding nor be lost in a crash.
        stream.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    return incoming, outgoing


def _receive(incoming: BinaryIO, messages: queue.SimpleQueue[Any]) -> None:
    """Hand on messages; end the process if the parent is gone and the target does not notice."""
    try:
        while True:
            messages.put(pickle.load(incoming))
    except (EOFError, OSError):
        messages.put(None)
    time.sleep(LINGER)
    _end()


def _send(outgoing: BinaryIO, message: object) -> None:
    try:
        pickle.dump(message, outgoing, protocol=pickle.HIGHEST_PROTOCOL)
        outgoing.flush()
    except BrokenPipeError:
        _end()  # the parent is gone


def _end() -> None:
    """End this process and whatever the target started in its group."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
