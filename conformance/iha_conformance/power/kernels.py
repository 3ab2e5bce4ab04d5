"""Each framework's own kernel among the honest implementations: the quick cases on every installed backend.

`iha run` holds backends to all cases; here they stand for kernels that nobody wrote for this test.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

from iha_conformance.corpus import Case
from iha_conformance.judge import Expectation, judge
from iha_conformance.power.measure import corpus, excess
from iha_conformance.power.outcome import Measured
from iha_conformance.protocol import Result, Target, Verdict
from iha_conformance.runner import Suite, run_suite


def measure_targets(targets: Sequence[Target], dtypes: Sequence[str]) -> Mapping[str, Mapping[str, Measured]]:
    """Run targets on the quick cases; what was measured, by the target's name, then by dtype.

    A dtype that a target refuses is left out. The caller closes the targets.
    """
    pairs = [
        (case, dtype)
        for case in corpus()
        if "quick" in case.flags
        for dtype in dtypes
        if dtype in case.dtypes
    ]
    found: dict[str, dict[str, Measured]] = {}
    for target in targets:
        of_target: dict[str, Measured] = defaultdict(lambda: Measured(ratios={}))

        def judge_and_keep(
            case: Case,
            dtype: str,
            expectation: Expectation | None,
            result: Result,
            kept: dict[str, Measured] = of_target,
        ) -> Verdict:
            verdict = judge(case, dtype, expectation, result)
            if verdict.status in ("passed", "failed"):
                digests = {}
                with contextlib.suppress(KeyError):
                    output = result.arrays["output"]
                    digests[case.id] = hashlib.sha256(output.tobytes()).digest()
                more = Measured(ratios={case.family: excess(verdict)}, digests=digests)
                kept[dtype] = kept[dtype].with_more(more)
            return verdict

        run_suite([target], pairs, suite=Suite(judge=judge_and_keep))
        found[target.info.name] = dict(of_target)
    return found
