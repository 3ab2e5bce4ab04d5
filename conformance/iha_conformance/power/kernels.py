"""Each framework's own kernel among the honest implementations: the quick cases on every installed backend.

`iha run` holds backends to all cases; here they stand for kernels that nobody wrote for this test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from iha_conformance.power.measure import all_cases
from iha_conformance.power.outcome import Measured, digest
from iha_conformance.protocol import Job, Result, Target, TargetInfo
from iha_conformance.runner import Row, run_suite
from iha_conformance.selection import Filters, select


class _Noting:
    """A target, with the digests of its outputs noted by case and dtype."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.digests: dict[tuple[str, str], bytes] = {}

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
        for result in self._target.evaluate(jobs):
            if "output" in result.arrays:
                self.digests[result.case_id, result.dtype] = digest(result.arrays["output"])
            yield result

    def close(self) -> None:
        self._target.close()


def measure_targets(targets: Sequence[Target], dtypes: Sequence[str]) -> Mapping[str, Mapping[str, Measured]]:
    """Run targets on the quick cases; what was measured, by the target's name, then by dtype.

    A dtype that a target refuses is left out. The caller closes the targets.
    """
    noting = [_Noting(target) for target in targets]
    pairs = select(all_cases(), Filters(dtype=tuple(dtypes), quick=True))
    found: dict[str, dict[str, Measured]] = {}
    for target, report in zip(noting, run_suite(noting, pairs), strict=True):
        of_target = found.setdefault(report.info.name, {})
        for row in report.rows:
            if row.status in ("passed", "failed"):
                before = of_target.get(row.dtype, Measured(ratios={}))
                of_target[row.dtype] = before.with_more(_measured(row, target.digests))
    return found


def _measured(row: Row, digests: Mapping[tuple[str, str], bytes]) -> Measured:
    """What a row of a report says; a failure without a ratio is beyond any number."""
    without = math.inf if row.status == "failed" else 0.0
    key = row.id, row.dtype
    return Measured(
        ratios={row.family: without if row.ratio is None else row.ratio},
        digests={row.id: digests[key]} if key in digests else {},
    )
