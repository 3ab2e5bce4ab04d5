"""Standard output and error that survive narrow encodings, missing streams and readers that leave."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 100
"""Columns where nobody says how many there are."""

PIPED_WIDTH = 400
"""Columns where no terminal limits them; tables take only what they need."""


def prepare_streams() -> None:
    """Make standard streams usable: open the missing ones to nowhere, escape what an encoding lacks."""
    with contextlib.suppress(OSError):
        while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
            # 0, 1 and 2 exist now, for child processes too, so that no file or pipe takes their place.
            os.set_inheritable(opened, True)
        os.close(opened)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


class Output:
    """A text stream whose reader may go away (`| head`): the rest is dropped, the run goes on."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.encoding: str = getattr(stream, "encoding", None) or "ascii"

    def write(self, text: str) -> int:
        if self._stream is not None:
            with self._quietly():
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            with self._quietly():
                self._stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("no stream")
        return self._stream.fileno()

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            discard_output(self._stream)


def discard_output(stream: TextIO | None) -> None:
    """Let a stream without reader write to nowhere, so that nothing fails later, at exit either."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)


def console(stream: TextIO | None) -> Console:
    """A rich console for a stream: colours only on a terminal, and no markup in our own texts."""
    from rich.console import Console

    output = Output(stream)
    on_terminal = output.isatty()
    plain = not on_terminal or bool(os.environ.get("NO_COLOR"))
    found = Console(
        file=output,  # type: ignore[arg-type]
        force_terminal=on_terminal,
        color_system=None if plain else "auto",
        width=None if on_terminal else PIPED_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
    )
    if found.width < 1:  # as a terminal without a size says
        found.width = PLAIN_WIDTH
    return found
