"""The targets of a pytest session, each in a worker process, and one case at a time for them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import pytest

from iha_conformance.command import plan_targets
from iha_conformance.corpus import Case, CorpusError, check_frozen, load_cases
from iha_conformance.errors import CommandError, unknown
from iha_conformance.judge import Expectation, expect
from iha_conformance.protocol import Inputs, TargetUnavailable
from iha_conformance.report.reproduction import reproduce
from iha_conformance.report.terminal import describe_failure
from iha_conformance.runner import Row, Suite, run_suite
from iha_conformance.selection import Filters, select
from iha_conformance.targets.backends import ARRAY_API, all_targets, canonical_name, is_known
from iha_conformance.targets.messages import Launch
from iha_conformance.targets.process import ProcessTarget
from iha_core.bounds import HIGHEST


@dataclasses.dataclass(frozen=True)
class Node:
    """What one test is about."""

    launch: Launch
    case: Case
    dtype: str

    def __str__(self) -> str:
        """Its id, for -k."""
        return f"{self.launch.name}-{self.case.id}-{self.dtype}"


class SuiteSession:
    """What the options of pytest ask for.

    Raises:
        pytest.UsageError: they name something that does not exist.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._timeout: float = config.getoption("iha_timeout")
        self._targets: dict[str, ProcessTarget] = {}
        precision: str | None = config.getoption("iha_precision")
        try:
            self.launches = plan(config.getoption("iha_target"), config.getoption("iha_device"), precision)
            pairs = select(load_cases(), Filters(quick=config.getoption("iha_quick")))
            check_frozen(case for case, _ in pairs)
        except (CommandError, TargetUnavailable) as error:
            raise pytest.UsageError(_as_here(str(error))) from error
        except CorpusError as error:
            raise pytest.UsageError(f"fault of the kit: {error}") from error
        # All targets of a case in turn, so that its expectation is computed once.
        self.nodes = [Node(launch, *pair) for pair in pairs for launch in self.launches]
        self._suite = Suite(expect=_Remembered(precision or HIGHEST))

    def load_all(self) -> None:
        """Load every target and end it again.

        Raises:
            pytest.UsageError: one cannot be loaded.
        """
        self._load(self.launches)
        self.close()

    def load_for(self, items: Iterable[pytest.Item]) -> None:
        """Load the targets that these tests need, and keep them.

        Raises:
            pytest.UsageError: one cannot be loaded.
        """
        nodes = (item.callspec.params.get("iha_node") for item in items if hasattr(item, "callspec"))
        self._load(dict.fromkeys(node.launch for node in nodes if isinstance(node, Node)))

    def _load(self, launches: Iterable[Launch]) -> None:
        started = [self._target(launch) for launch in launches]  # all at once: their imports overlap
        for target in started:
            try:
                _ = target.info
            except TargetUnavailable as error:
                raise pytest.UsageError(_as_here(str(error))) from error

    def run(self, node: Node) -> Row:
        """Have the target compute a case, and judge what it gives.

        Raises:
            TargetUnavailable: the target cannot be loaded.
            HarnessError: the kit failed.
        """
        (report,) = run_suite([self._target(node.launch)], [(node.case, node.dtype)], suite=self._suite)
        (row,) = report.rows
        return row

    def close(self) -> None:
        """End all worker processes."""
        while self._targets:
            self._targets.popitem()[1].close()

    def _target(self, launch: Launch) -> ProcessTarget:
        if launch.name not in self._targets:
            self._targets[launch.name] = ProcessTarget(launch, timeout=self._timeout)
        return self._targets[launch.name]


def plan(names: Iterable[str], device: str | None, precision: str | None) -> tuple[Launch, ...]:
    """What to launch for `--iha-target`; a name is a backend's, or MODULE:CALLABLE."""
    backends: list[str] = []
    callables: list[str] = []
    for name in names:
        if is_known(canonical_name(name)):
            backends.append(name)
        elif ":" in name and not name.startswith(ARRAY_API + ":"):
            callables.append(name)
        else:
            raise unknown("--iha-target", name, (*all_targets(), "MODULE:CALLABLE"))
    return plan_targets(backends, callables, device, precision).launches


def describe(node: Node, row: Row) -> str:
    """A failed test: the verdict in one line, and the command that shows it again."""
    return f"{describe_failure([row])}\nto run it again: {reproduce(node.launch, node.case.id, node.dtype)}"


def _as_here(message: str) -> str:
    """A message of `iha run` with the names that its options have under pytest."""
    message = re.sub(r"--(backend|target)\b", "--iha-target", message)
    return re.sub(r"--(device|precision)\b", r"--iha-\1", message)


class _Remembered:
    """What is expected of the last case: the same for all targets."""

    def __init__(self, precision: str) -> None:
        self._precision = precision
        self._known: tuple[str, str] | None = None
        self._expectation: Expectation | None = None

    def __call__(self, case: Case, dtype: str, inputs: Inputs) -> Expectation | None:
        if self._known != (case.id, dtype):
            self._expectation = expect(case, dtype, inputs, self._precision)
            self._known = (case.id, dtype)
        return self._expectation
