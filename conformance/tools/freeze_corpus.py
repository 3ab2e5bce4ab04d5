"""Write the frozen corpus, `frozen.toml`, from the case table.

python conformance/tools/freeze_corpus.py [--change-cases] [FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from iha_conformance.corpus.frozen import FROZEN, Hashes, as_toml, load_frozen, made


def main() -> None:
    """Hold what is frozen to what the table says now, and write that."""
    parser = argparse.ArgumentParser(description="Add new cases to the frozen corpus.")
    parser.add_argument("file", nargs="?", type=Path, default=FROZEN, help="default: the one of the kit")
    parser.add_argument(
        "--change-cases",
        action="store_true",
        help="take over changed and missing cases; for a new version of the specification",
    )
    options = parser.parse_args()
    frozen = load_frozen(options.file) if options.file.exists() else Hashes("", {})
    now = made()
    changed = [name for name, digest in frozen.cases.items() if now.cases.get(name) != digest]
    added = [name for name in now.cases if name not in frozen.cases]
    if changed and not options.change_cases:
        sys.exit(
            f"expected frozen cases as they were, found changed or missing: {', '.join(changed)};"
            " what they expect belongs to the specification's version (see --change-cases)"
        )
    options.file.write_text(as_toml(now), encoding="ascii")
    print(f"{options.file.name}: {len(added)} added, {len(changed)} changed; corpus {now.corpus}")


if __name__ == "__main__":
    main()
