"""A folder of results as a target: what a port wrote for the input files of vectors ([EXC-4], [EXC-5])."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from iha_conformance.protocol import UNDECLARED, Job, Result, TargetInfo
from iha_conformance.targets.messages import Launch, one_line
from iha_conformance.vectors.exchange import Awaited, collect
from iha_conformance.vectors.places import check_results

UNKNOWN = "unknown"
"""Version and device of what only its files are known of."""


class FolderTarget:
    """Results that have been written before; there is nothing to start, and nothing to end."""

    capabilities: frozenset[str] = frozenset()
    takes_all = True

    def __init__(self, launch: Launch) -> None:
        self.name = launch.name
        self.launch = launch

    @property
    def info(self) -> TargetInfo:
        """What is known of the port; its precision class is what was declared for it."""
        return files_info(self.launch, "files")

    def evaluate(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """One result for each job, read from its file.

        Raises:
            CommandError: the folder cannot be read, for which no port is at fault.
        """
        check_results(self.launch.name)
        yield from collect(Path(self.launch.name), [Awaited.of(job) for job in jobs])

    def close(self) -> None:
        """Nothing was started."""


def files_info(launch: Launch, framework: str) -> TargetInfo:
    """What a report says of a port that is known by its files only."""
    return TargetInfo(
        name=one_line(launch.name),
        framework=framework,
        version=UNKNOWN,
        device=UNKNOWN,
        precision=launch.precision or UNDECLARED,
    )
