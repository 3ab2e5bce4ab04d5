"""What `iha run` does, from the names on its command line to the printed report.

Other commands that judge results share its second half, `judge_targets`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from iha_conformance.corpus import check_frozen, corpus_sha256, load_cases
from iha_conformance.errors import CommandError, unknown
from iha_conformance.judge import expect
from iha_conformance.protocol import Target, TargetUnavailable
from iha_conformance.report.files import check_distinct, open_report
from iha_conformance.report.json_report import as_json, open_json
from iha_conformance.report.junit import as_junit
from iha_conformance.report.terminal import ProgressBar, print_report
from iha_conformance.runner import Pair, Suite, TargetReport, run_suite
from iha_conformance.selection import Filters, select
from iha_conformance.targets.backends import (
    ARRAY_API,
    all_targets,
    canonical_name,
    has_devices,
    is_known,
    known_targets,
    missing_module,
)
from iha_conformance.targets.callables import split_name
from iha_conformance.targets.exec import ExecTarget, split_command
from iha_conformance.targets.folder import FolderTarget
from iha_conformance.targets.messages import Launch
from iha_conformance.targets.process import ProcessTarget
from iha_core import SPEC_VERSION
from iha_core.bounds import HIGHEST, precision_classes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `iha run`."""

    backends: tuple[str, ...] = ()
    callables: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    device: str | None = None
    precision: str | None = None
    filters: Filters = dataclasses.field(default_factory=Filters)
    timeout: float = 60.0
    json_name: str | None = None
    junit_name: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to launch, and a line for each backend that is left out though nobody said so."""

    launches: tuple[Launch, ...]
    absent: tuple[str, ...]


def run_command(options: Options) -> bool:
    """Run the suite on what is asked for; returns whether every executed case passed.

    Raises:
        CommandError: something asked for does not exist, or nothing was executed.
        TargetUnavailable: a target cannot be launched.
        CorpusError: a case is not the one that was frozen.
        HarnessError: the kit failed.
    """
    if math.isnan(options.timeout):
        raise CommandError("--timeout: expected a number of seconds, got nan")
    check_distinct({"--json": options.json_name, "--junit": options.junit_name})
    pairs = select(load_cases(), options.filters)
    check_frozen(case for case, _ in pairs)
    plan = plan_targets(
        options.backends, options.callables, options.device, options.precision, options.commands
    )
    return judge_targets(plan, pairs, options)


def judge_targets(plan: Plan, pairs: Sequence[Pair], options: Options) -> bool:
    """Hold targets to cases, write and print the report; returns whether every executed case passed.

    Args:
        plan: what to launch.
        pairs: the cases and dtypes.
        options: how; `filters` are what the report says of the cases.

    Raises:
        CommandError: a report cannot be written, or nothing was executed.
        TargetUnavailable: a target cannot be launched.
        HarnessError: the kit failed.
    """
    suite = Suite(expect=functools.partial(expect, precision=options.precision or HIGHEST))
    with contextlib.ExitStack() as stack:
        json_file = stack.enter_context(open_json(options.json_name))
        junit_file = stack.enter_context(open_report(options.junit_name, option="--junit"))
        targets = []
        for launch in plan.launches:  # all at once, so that their imports overlap
            target = start(launch, timeout=options.timeout)
            stack.callback(target.close)
            targets.append(target)
        absent = list(plan.absent)
        if not options.backends and options.device is not None:
            targets = having_device(targets, options.device, absent)
        progress = stack.enter_context(
            ProgressBar(sys.stderr, [target.name for target in targets], len(pairs))
        )
        reports = run_suite(targets, pairs, suite=suite, on_row=progress.on_row)
        fault = nothing_executed(reports, [target.launch for target in targets])
        of = {"spec_version": SPEC_VERSION, "corpus_sha256": corpus_sha256()}
        # Before anything is printed: a reader that leaves must not cost a report.
        if json_file is not None:
            json_file.write(as_json(reports, options.filters, **of))
        if junit_file is not None:
            launches = [target.launch for target in targets]
            junit_file.write(as_junit(reports, launches, options.filters, **of))
    print_report(
        sys.stdout,
        reports,
        options.filters,
        spec_version=SPEC_VERSION,
        launches=[target.launch for target in targets],
        precision=options.precision,
        absent=absent,
        fault=fault,
    )
    if any(report.summary.failed for report in reports):
        return False
    if fault is not None:
        raise CommandError(fault)
    return True


class LaunchedTarget(Target, Protocol):
    """A target, and what it was launched by."""

    @property
    def name(self) -> str: ...

    @property
    def launch(self) -> Launch: ...


def start(launch: Launch, *, timeout: float) -> LaunchedTarget:
    """The target that is to be launched, started if it is one that starts before its first job.

    Raises:
        CommandError: a command that is none.
        TargetUnavailable: a command of a program that does not exist.
    """
    if launch.kind == "exec":
        return ExecTarget(launch, timeout=timeout)
    if launch.kind == "files":
        return FolderTarget(launch)
    return ProcessTarget(launch, timeout=timeout)


def having_device(targets: Sequence[LaunchedTarget], device: str, absent: list[str]) -> list[LaunchedTarget]:
    """The targets, none of which was asked for by name, that have the device; a line for each other one.

    Raises:
        CommandError: none has.
    """
    found = []
    for target in targets:
        try:
            target.info  # noqa: B018 - waits until the target is loaded
        except TargetUnavailable as error:
            absent.append(f"SKIPPED {target.name}: {error}")
        else:
            found.append(target)
    if not found:
        raise CommandError(
            f"--device: expected a backend that has {device!r}, found none: " + "; ".join(absent)
        )
    return found


def nothing_executed(reports: Sequence[TargetReport], launches: Sequence[Launch]) -> str | None:
    """Why a run says nothing: nothing was executed, by any target or by one that is the user's own."""
    idle = [launch for report, launch in zip(reports, launches, strict=True) if not report.summary.executed]
    if len(idle) == len(reports):
        return "expected at least one executed case, got 0: all were refused or do not apply"
    for launch in idle:
        if launch.kind != "backend":
            return f"target {launch.name!r}: expected at least one executed case, got 0"
    return None


def plan_targets(
    backends: Sequence[str],
    callables: Sequence[str],
    device: str | None,
    precision: str | None = None,
    commands: Sequence[str] = (),
) -> Plan:
    """Names on the command line as targets to launch.

    A backend that is asked for by name must be installed; one that is merely among the known ones
    is left out with a line that says so.
    """
    check_precision(precision)
    if device == "":
        raise CommandError("--device: expected the name of a device, such as cpu, got ''")
    own = (*callables, *commands)
    if device is not None and own and not backends:
        raise CommandError(
            f"--device: expected a backend that it applies to, got only callables or commands for {device!r}"
        )
    absent: list[str] = []
    names: list[str] = []
    if not backends and not own:
        names += _installed(known_targets(), device, absent)
        if not names:
            raise CommandError(
                "expected an installed backend or a --target or --exec, found none: " + "; ".join(absent)
            )
    for asked in backends:
        name = canonical_name(asked)
        if not is_known(name):
            raise unknown("--backend", asked, all_targets())
        if name == ARRAY_API:
            of_standard = [known for known in known_targets() if known.startswith(ARRAY_API + ":")]
            found = _installed(of_standard, device, absent)
            if not found:
                raise CommandError(
                    "--backend array-api: expected an installed namespace, found none: " + "; ".join(absent)
                )
            names += found
            continue
        module = missing_module(name)
        if module is not None:
            raise CommandError(
                f"--backend: expected {asked!r} to be installed, found no module named {module!r}"
            )
        names.append(name)
    launches = [
        Launch(kind="backend", name=name, device=device, precision=precision) for name in dict.fromkeys(names)
    ]
    for name in dict.fromkeys(callables):
        split_name(name)
        launches.append(Launch(kind="callable", name=name, precision=precision, directory=_directory()))
    for name in dict.fromkeys(commands):
        split_command(name)
        launches.append(Launch(kind="exec", name=name, precision=precision))
    return Plan(tuple(launches), tuple(absent))


def check_precision(precision: str | None) -> None:
    """Refuse a precision class that is none.

    Raises:
        CommandError: it is unknown.
    """
    if precision is not None and precision not in precision_classes():
        raise unknown("--precision", precision, precision_classes())


def _directory() -> str:
    """The working directory, on the import path of callables."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise CommandError("--target: expected a working directory, but it has been deleted") from None


def _installed(names: Sequence[str], device: str | None, absent: list[str]) -> list[str]:
    """The names of what is installed and has the device; a line in `absent` for each other one."""
    found = []
    for name in names:
        module = missing_module(name)
        if module is not None:
            absent.append(f"SKIPPED {name}: not installed, no module named {module!r}")
        elif device not in (None, "cpu") and not has_devices(name):
            absent.append(f"SKIPPED {name}: it has no device {device!r}")
        else:
            found.append(name)
    return found
