"""The proof that the suite judges well in both directions; what `iha self-test` runs.

Honest implementations stay at or under half of every limit; every mutant exceeds two limits in some
case of every dtype that can show it, however it rounds; all that a port may mistake moves some output.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from typing import Any

from iha_conformance.power import must_bind
from iha_conformance.power.backward_honest import BACKWARD_HONEST
from iha_conformance.power.honest import HONEST
from iha_conformance.power.measure import Problem, all_cases, excess, mutant_ratio, stages, verdict
from iha_conformance.power.mutants import MUTANTS, Mutant
from iha_conformance.power.outcome import CAUGHT, Measured, Outcome, digest
from iha_conformance.power.steps import ROUNDINGS, Rounding, Steps
from iha_conformance.protocol import DTYPES, Operation
from iha_conformance.runner import HarnessError

Made = tuple[Callable[..., Steps], Rounding]

HONEST_OF: Mapping[Operation, Mapping[str, Made]] = {"attention": HONEST, "gradient": BACKWARD_HONEST}
"""Honest implementations by name: what makes them, and how they round."""

BEYOND_DOUBT = 100.0
"""A mutant so far beyond a limit is not run on the rest of the family; its maxima are lower bounds then."""


def examine(family: str, dtype: str) -> tuple[dict[str, Measured], dict[str, Measured]]:
    """Run all honest implementations and mutants on the cases of a family, in one dtype.

    Returns:
        What was measured, by name: of the honest, of the mutants.
    """
    cases = [case for case in all_cases() if case.family == family and dtype in case.dtypes]
    problems = [Problem.of(case, dtype) for case in cases]
    operation = next(case.operation for case in all_cases() if case.family == family)
    honest = {name: _measure_honest(made, family, problems) for name, made in HONEST_OF[operation].items()}
    mutants = {
        name: Measured(ratios={family: _least_caught(mutant, problems)})
        for name, mutant in MUTANTS.items()
        if dtype in mutant.dtypes and mutant.operation == operation
    }
    return honest, mutants


def _measure_honest(made: Made, family: str, problems: Sequence[Problem]) -> Measured:
    make, rounding = made
    worst, digests = 0.0, {}
    for problem in problems:
        found = stages(make(rounding, stages=True), problem)
        worst = max(worst, excess(verdict(found, problem)))
        if "output" in found:
            digests[problem.case.id] = digest(found["output"])
    return Measured(ratios={family: worst}, digests=digests)


def _least_caught(mutant: Mutant, problems: list[Problem]) -> float:
    """The largest ratio in these cases, with the rounding that hides the fault better.

    Where it is under `CAUGHT` with one rounding, the other is not tried: it could only hide it better still.
    """
    maxima = []
    for rounding in ROUNDINGS if problems and problems[0].dtype != "float64" else ROUNDINGS[:1]:
        worst = 0.0
        for i, problem in enumerate(problems):
            worst = max(worst, mutant_ratio(mutant, rounding, problem))
            if worst >= BEYOND_DOUBT:
                problems.insert(0, problems.pop(i))  # it may show the next one as well
                break
        maxima.append(worst)
        if worst < CAUGHT:  # nor is the smaller one of two
            break
    return min(maxima)


def self_test(
    dtypes: Sequence[str] = DTYPES,
    *,
    workers: int | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Run the self-test on implementations in NumPy, in several processes.

    Args:
        dtypes: storage dtypes.
        workers: number of processes, by default one for each processor.
        on_done: called with how many parts are done, and how many there are.

    Raises:
        HarnessError: one of the processes was ended from outside.
    """
    families = list(dict.fromkeys(case.family for case in all_cases()))
    parts = sorted(itertools.product(families, dtypes), key=_cost, reverse=True)
    honest: dict[str, dict[str, Measured]] = defaultdict(dict)
    mutants: dict[str, dict[str, Measured]] = defaultdict(dict)
    bound: dict[str, must_bind.Bound] = {}
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    _start_tracker()
    count = workers or os.cpu_count()
    with ProcessPoolExecutor(count, mp_context=context, initializer=_begin_worker) as pool:
        try:
            waiting = {pool.submit(examine, *part): part for part in parts}
            binding = {pool.submit(must_bind.bind, dtype): dtype for dtype in dtypes}
            futures: list[Future[Any]] = [*waiting, *binding]
            for done, future in enumerate(as_completed(futures), start=1):
                if future in binding:
                    bound[binding[future]] = future.result()
                else:
                    _, dtype = waiting[future]
                    for found, table in zip(future.result(), (honest, mutants), strict=True):
                        for name, measured in found.items():
                            before = table[name].get(dtype, Measured(ratios={}))
                            table[name][dtype] = before.with_more(measured)
                if on_done is not None:
                    on_done(done, len(futures))
        except BrokenProcessPool as error:
            reason = "a process of the self-test was ended from outside (out of memory?)"
            raise HarnessError(reason) from error
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
    return Outcome(
        dtypes=tuple(dtypes),
        honest={name: honest[name] for of in HONEST_OF.values() for name in of},
        mutants={name: mutants[name] for name in MUTANTS if name in mutants},
        must_bind=bound,
    )


def _cost(part: tuple[str, str]) -> int:
    """Roughly how long a part takes: the logits of its cases, and something for each case."""
    family, dtype = part
    of_family = [case.sizes for case in all_cases() if case.family == family and dtype in case.dtypes]
    return sum(10_000 + z["B"] * z["H"] * z["N"] * z["M"] * z["P"] ** 2 for z in of_family)


def _begin_worker() -> None:
    """In a worker: Ctrl-C, which reaches it too, ends it without a word; it ends when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _start_tracker() -> None:
    """Start multiprocessing's own helper deaf to SIGHUP, as it is to other signals: it would print traces."""
    if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        resource_tracker.ensure_running()
    finally:
        signal.signal(signal.SIGHUP, before)
