"""Write what the commands in PORTING.md print, by running them on the port as it is at each step.

python conformance/tools/porting_page.py [--check] [PORTING.md]

A block that begins with a line `$ command` is run and filled with its output; `<!-- port: STEP -->` before it
says how far the port has come. The steps are changes of the finished one, in `STEPS`. With `--check`
nothing is written; the exit status is 1 if the page says something else than the commands, fractions apart.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORTS = ROOT / "conformance" / "ports"

BLOCK = re.compile(
    r"(?P<head>```text\n\$ (?P<command>[^\n]+)\n)(?P<body>.*?)(?P<end>^```$)", re.DOTALL | re.MULTILINE
)
STEP = re.compile(r"<!-- port: (\w+) -->")
FRACTION = re.compile(r"\d+\.\d+(\.\d+)?(e[+-]?\d+)?")

NOTHING = """def attention(inputs, config):
    raise NotImplementedError("nothing yet")
"""

Changes = list[tuple[str, str]]

PSEUDO_MAJOR: Changes = [
    ('return np.einsum("bnsw,shp->bnphw", x, alpha)', 'return np.einsum("bnsw,shp->bpnhw", x, alpha)'),
]
TOKEN_CAUSAL: Changes = [
    ("        visible &= s <= t\n", "        visible &= m <= n\n"),
]
NARROW: Changes = [
    (
        "(products * np.float64(scale)).astype(accumulator)  # the scale may be no number of float32",
        '(products * np.float64(scale)).astype(inputs["q"].dtype).astype(accumulator)',
    ),
]
STEPS: dict[str, Changes | None] = {
    "nothing": None,
    "mixed": [*PSEUDO_MAJOR, *TOKEN_CAUSAL, *NARROW],
    "ordered": [*TOKEN_CAUSAL, *NARROW],
    "masked": NARROW,
    "finished": [],
}
"""What is still wrong at each step."""


def port(step: str) -> str:
    """The text of the port at a step."""
    changes = STEPS[step]
    if changes is None:
        return NOTHING
    text = (PORTS / "python" / "port.py").read_text(encoding="utf-8")
    for right, wrong in changes:
        if text.count(right) != 1:
            raise SystemExit(f"port.py: expected {right!r} once, found it {text.count(right)} times")
        text = text.replace(right, wrong)
    return text


def output(command: str, step: str) -> str:
    """What a command prints, in a folder with the port as it is at a step."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "port.py").write_text(port(step), encoding="utf-8")
        for name in ("javascript", "cpp"):
            (Path(folder) / name).symlink_to(PORTS / name)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        iha = f'"{sys.executable}" -m iha_conformance'
        done = subprocess.run(
            ["bash", "-c", f'iha() {{ {iha} "$@"; }}\n{command}'],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "\n".join([*lines, f"(exit status {done.returncode})"]) + "\n"


def filled(page: str) -> str:
    """The page with the output of its commands."""

    def fill(block: re.Match[str]) -> str:
        steps = STEP.findall(page[: block.start()])
        return f"{block['head']}{output(block['command'], steps[-1])}{block['end']}"

    return BLOCK.sub(fill, page)


def without_fractions(page: str) -> str:
    """The page without what differs between runs and machines: fractions, versions, the width of columns."""
    return re.sub(r"[ -]+", " ", FRACTION.sub("0.0", page))


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("page", nargs="?", type=Path, default=ROOT / "PORTING.md")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if it would change"
    )
    options = parser.parse_args()
    before = options.page.read_text(encoding="utf-8")
    after = filled(before)
    if not options.check:
        options.page.write_text(after, encoding="utf-8")
        return 0
    return int(without_fractions(after) != without_fractions(before))


if __name__ == "__main__":
    sys.exit(main())
