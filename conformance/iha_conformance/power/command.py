"""What `iha self-test` does."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence

from iha_conformance.command import plan_targets
from iha_conformance.corpus import check_frozen, corpus_sha256
from iha_conformance.errors import CommandError, unknown
from iha_conformance.power.kernels import measure_targets
from iha_conformance.power.measure import all_cases
from iha_conformance.power.outcome import Outcome
from iha_conformance.power.self_test import self_test
from iha_conformance.protocol import DTYPES
from iha_conformance.report.json_report import open_json
from iha_conformance.report.power import as_json, print_outcome
from iha_conformance.report.terminal import PartsBar
from iha_conformance.targets.process import ProcessTarget
from iha_core import SPEC_VERSION

TIMEOUT = 120.0
"""Seconds for one case of a backend; a framework may compile for long."""


def self_test_command(dtypes: Sequence[str], *, json_name: str | None) -> bool:
    """Run the self-test, write and print its outcome; returns whether nothing speaks against the suite.

    Args:
        dtypes: those to run, all if empty.
        json_name: file for the outcome, or None.

    Raises:
        CommandError: no such dtype, or a file that cannot be written.
        CorpusError: a case is not the one that was frozen.
        TargetUnavailable: an installed backend cannot be loaded.
    """
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise unknown("--dtype", dtype, DTYPES)
    chosen = tuple(dtype for dtype in DTYPES if dtype in dtypes or not dtypes)
    check_frozen(all_cases())
    with open_json(json_name) as file:
        with PartsBar(sys.stderr, "self-test") as bar:
            outcome = self_test(chosen, on_done=bar.on_done)
        outcome, notes = _with_backends(outcome)
        if file is not None:
            file.write(as_json(outcome, spec_version=SPEC_VERSION, corpus_sha256=corpus_sha256()))
    print_outcome(sys.stdout, outcome, spec_version=SPEC_VERSION, notes=notes)
    return next(outcome.faults(), None) is None


def _with_backends(outcome: Outcome) -> tuple[Outcome, list[str]]:
    """The outcome with each installed backend among the honest, and a line for each that is not."""
    try:
        plan = plan_targets((), (), None)
    except CommandError as error:  # none is installed
        return outcome, [f"NOTE backends: {error}"]
    with contextlib.ExitStack() as stack:
        targets = []
        for launch in plan.launches:
            target = ProcessTarget(launch, timeout=TIMEOUT)
            stack.callback(target.close)
            targets.append(target)
        measured = measure_targets(targets, outcome.dtypes)
    named = {f"{name} (quick cases)": of for name, of in measured.items()}
    return dataclasses.replace(outcome, honest={**outcome.honest, **named}), list(plan.absent)
