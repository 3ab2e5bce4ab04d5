"""What `iha diagnose` does, from the name on its command line to the printed diagnosis."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator

from iha_conformance.command import Plan, plan_targets, start
from iha_conformance.diagnose.search import diagnose
from iha_conformance.errors import CommandError, unknown
from iha_conformance.protocol import DTYPES, Job, Result, Target, TargetInfo, TargetUnavailable
from iha_conformance.report.diagnosis import as_json, print_diagnosis
from iha_conformance.report.json_report import open_json
from iha_conformance.report.terminal import PartsBar
from iha_conformance.targets.backends import ARRAY_API, all_targets, canonical_name, is_known, missing_module
from iha_conformance.targets.callables import split_name
from iha_core import SPEC_VERSION

CALLABLE = "MODULE:CALLABLE"


def diagnose_command(
    target: str | None,
    command: str | None,
    *,
    dtype: str | None = None,
    device: str | None = None,
    precision: str | None = None,
    timeout: float = 60.0,
    json_name: str | None = None,
    fix: bool = False,
) -> bool:
    """Diagnose one target, write and print what was found; returns whether a dialect explains it.

    Args:
        target: MODULE:CALLABLE or the name of a backend, or None.
        command: a command in its place; exactly one of the two.
        dtype: storage dtype to ask in, None for the first that the target takes.
        device, precision, timeout: as for `iha run`.
        json_name: file for the diagnosis, or None.
        fix: whether to print the change of weights that makes up for what deviates.

    Raises:
        CommandError: something asked for does not exist, or the target answers nothing.
        TargetUnavailable: the target cannot be launched.
    """
    if math.isnan(timeout):
        raise CommandError("--timeout: expected a number of seconds, got nan")
    if dtype is not None and dtype not in DTYPES:
        raise unknown("--dtype", dtype, DTYPES)
    (launch,) = _plan(target, command, device, precision).launches
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_json(json_name))
        launched = start(launch, timeout=timeout)
        stack.callback(launched.close)
        launched.info  # noqa: B018 - waits until the target is loaded, before a bar counts its calls
        with PartsBar(sys.stderr, launched.name) as bar:
            found = diagnose(_Counted(launched, bar.on_done), dtype=dtype, precision=precision)
        # Before anything is printed: a reader that leaves must not cost a report.
        if file is not None:
            file.write(as_json(found, spec_version=SPEC_VERSION))
    print_diagnosis(sys.stdout, found, spec_version=SPEC_VERSION, fix=fix)
    return found.matched


def _plan(target: str | None, command: str | None, device: str | None, precision: str | None) -> Plan:
    """What to launch: one target, whichever way it is named.

    Raises:
        CommandError: there is no such backend, or it is not installed, or this names no target or several.
        TargetUnavailable: a command of a program that does not exist.
    """
    if target is None and command is None:
        raise CommandError(
            f"expected one target, {CALLABLE}, the name of a backend or --exec 'CMD ARGS', got none"
        )
    if target is not None and command is not None:
        raise CommandError(f"expected one target, got two: {target!r} and --exec {command!r}")
    if target is None:
        return plan_targets((), (), device, precision, (command or "",))
    name = canonical_name(target)
    if name == ARRAY_API:
        raise CommandError(
            f"TARGET: expected one namespace, such as {ARRAY_API}:numpy, got {target!r}, which means all"
        )
    if is_known(name):
        if (module := missing_module(name)) is not None:
            raise CommandError(
                f"TARGET: expected {target!r} to be installed, found no module named {module!r}"
            )
        return plan_targets((name,), (), device, precision)
    if ":" not in target:
        backends = [known for known in all_targets() if known != ARRAY_API]
        raise unknown("TARGET", target, [CALLABLE, *backends])
    try:
        split_name(target)
    except TargetUnavailable:
        raise CommandError(
            f"TARGET: expected {CALLABLE}, with names as Python has them, or the name of a backend,"
            f" got {target!r}"
        ) from None
    return plan_targets((), (target,), device, precision)


class _Counted:
    """A target whose results are counted; how many calls there will be depends on the answers.

    Args:
        target: whom to ask; the caller closes it.
        on_done: takes the number of results, and of the calls so far.
    """

    def __init__(self, target: Target, on_done: Callable[[int, int], None]) -> None:
        self._target = target
        self._on_done = on_done
        self._done = self._total = 0

    @property
    def info(self) -> TargetInfo:
        return self._target.info

    @property
    def capabilities(self) -> frozenset[str]:
        return self._target.capabilities

    @property
    def takes_all(self) -> bool:
        return self._target.takes_all

    def evaluate(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """The results of the target, one for each job."""
        asked = list(jobs)
        self._total += len(asked)
        for result in self._target.evaluate(asked):
            self._done += 1
            self._on_done(self._done, self._total)
            yield result

    def close(self) -> None:
        self._target.close()
