"""The proof that the suite judges well in both directions; what `iha self-test` runs.

Honest implementations stay at or under `HALF` of every limit; every mutant exceeds `CAUGHT` limits in some
case of every dtype in which it exists, however it rounds; all that a port may mistake moves some output.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import multiprocessing
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any

from iha_conformance.power import must_bind
from iha_conformance.power.honest import HONEST
from iha_conformance.power.measure import Problem, corpus, excess, mutant_ratio, stages, verdict
from iha_conformance.power.mutants import MUTANTS, Mutant
from iha_conformance.power.port import ROUNDINGS
from iha_conformance.protocol import DTYPES

HALF, CAUGHT, SEPARATION = 0.5, 2.0, 4.0
FEWEST_HONEST, FEWEST_MUTANTS = 12, 80

BEYOND_DOUBT = 100.0
"""A mutant so far beyond a limit is not run on the rest of the family; its maxima are lower bounds then."""

Digests = Mapping[str, bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What was found of one implementation in one dtype, over some cases.

    Attributes:
        ratios: largest error divided by its limit, by family.
        digests: of the output's bits, by case, for honest implementations.
    """

    ratios: Mapping[str, float]
    digests: Digests = dataclasses.field(default_factory=dict)

    @property
    def largest(self) -> float:
        """Over all families."""
        return max(self.ratios.values(), default=0.0)

    def with_more(self, other: Measured) -> Measured:
        """Both, of different cases."""
        keys = {*self.ratios, *other.ratios}
        ratios = {key: max(self.ratios.get(key, 0.0), other.ratios.get(key, 0.0)) for key in keys}
        return Measured(ratios=ratios, digests={**self.digests, **other.digests})


Table = Mapping[str, Mapping[str, Measured]]
"""By name of the implementation, then by dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that a self-test finds.

    Attributes:
        dtypes: those that were run, in the order of reports.
        honest, mutants: what was measured. A mutant's ratio in a family is that of the kinder rounding, if
            both reach `CAUGHT`, else of one that does not.
        must_bind: by dtype.
    """

    dtypes: tuple[str, ...]
    honest: Table
    mutants: Table
    must_bind: Mapping[str, must_bind.Bound]

    def honest_max(self, dtype: str) -> float:
        """The largest ratio of an honest implementation."""
        return max((of[dtype].largest for of in self.honest.values() if dtype in of), default=math.inf)

    def mutant_min(self, dtype: str) -> float:
        """The smallest of the mutants' largest ratios."""
        return min((of[dtype].largest for of in self.mutants.values() if dtype in of), default=0.0)

    def separation(self, dtype: str) -> float:
        """Smallest mutant maximum divided by largest honest maximum."""
        honest = self.honest_max(dtype)
        return self.mutant_min(dtype) / honest if honest else math.inf

    def survivors(self, dtype: str) -> list[str]:
        """Mutants that no case catches."""
        return [name for name, of in self.mutants.items() if dtype in of and not of[dtype].largest >= CAUGHT]

    def distinct(self, dtype: str) -> int:
        """How many honest implementations differ from all before them in the bits of some output."""
        kept: list[Digests] = []
        for of in self.honest.values():
            if dtype in of and all(_differ(of[dtype].digests, other) for other in kept):
                kept.append(of[dtype].digests)
        return len(kept)

    def faults(self) -> Iterator[str]:
        """What speaks against the suite, a line each; nothing if it is as it should be."""
        for dtype in self.dtypes:
            for name, of in self.honest.items():
                if dtype in of and not of[dtype].largest <= HALF:
                    largest = of[dtype].largest
                    yield f"{dtype}: honest {name!r} reaches {largest:.3g} of a limit, over {HALF:g}"
            for name in self.survivors(dtype):
                largest = self.mutants[name][dtype].largest
                yield f"{dtype}: mutant {name!r} survives, {largest:.3g} of a limit at most, under {CAUGHT:g}"
            if not self.separation(dtype) >= SEPARATION:
                yield f"{dtype}: separation {self.separation(dtype):.3g}, expected at least {SEPARATION:g}"
            if self.distinct(dtype) < FEWEST_HONEST:
                yield (
                    f"{dtype}: expected at least {FEWEST_HONEST} honest implementations with different bits,"
                    f" found {self.distinct(dtype)}"
                )
            for item in self.must_bind[dtype].unbound:
                yield f"{dtype}: {item} moves no output by {must_bind.FACTOR:g} limits"
        if len(self.mutants) < FEWEST_MUTANTS:
            yield f"expected at least {FEWEST_MUTANTS} mutants, found {len(self.mutants)}"


def _differ(ours: Digests, theirs: Digests) -> bool:
    return any(digest != theirs[key] for key, digest in ours.items() if key in theirs)


def examine(family: str, dtype: str) -> tuple[dict[str, Measured], dict[str, Measured]]:
    """Run all honest implementations and mutants on the cases of a family, in one dtype.

    Returns:
        What was measured, by name: of the honest, of the mutants.
    """
    problems = [
        Problem.of(case, dtype) for case in corpus() if case.family == family and dtype in case.dtypes
    ]
    honest = {name: _measure_honest(name, family, problems) for name in HONEST}
    mutants = {
        name: Measured(ratios={family: _least_caught(mutant, problems)})
        for name, mutant in MUTANTS.items()
        if dtype in mutant.dtypes
    }
    return honest, mutants


def _measure_honest(name: str, family: str, problems: Sequence[Problem]) -> Measured:
    make, rounding = HONEST[name]
    worst, digests = 0.0, {}
    for problem in problems:
        found = stages(make(rounding, stages=True), problem)
        worst = max(worst, excess(verdict(found, problem)))
        digests[problem.case.id] = hashlib.sha256(found["output"].tobytes()).digest()
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
    """
    families = list(dict.fromkeys(case.family for case in corpus()))
    parts = sorted(itertools.product(families, dtypes), key=_cost, reverse=True)
    honest: dict[str, dict[str, Measured]] = defaultdict(dict)
    mutants: dict[str, dict[str, Measured]] = defaultdict(dict)
    bound: dict[str, must_bind.Bound] = {}
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=context, initializer=_quiet) as pool:
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
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
    return Outcome(
        dtypes=tuple(dtypes),
        honest={name: honest[name] for name in HONEST},
        mutants={name: mutants[name] for name in MUTANTS if name in mutants},
        must_bind=bound,
    )


def _cost(part: tuple[str, str]) -> int:
    """Roughly how long a part takes: the logits of its cases, and something for each case."""
    family, dtype = part
    of_family = [case.sizes for case in corpus() if case.family == family and dtype in case.dtypes]
    return sum(10_000 + z["B"] * z["H"] * z["N"] * z["M"] * z["P"] ** 2 for z in of_family)


def _quiet() -> None:
    """In a worker: Ctrl-C, which reaches it too, ends it without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
