"""Write the frozen vectors, `iha_conformance/vectors/core`, from the corpus.

python conformance/tools/core_vectors.py [--change-values] [FOLDER]
"""

from __future__ import annotations

import argparse
import sys

from iha_conformance.errors import CommandError
from iha_conformance.vectors import manifest
from iha_conformance.vectors.export import export
from iha_conformance.vectors.frozen import FILTERS, FOLDER, STAGES
from iha_conformance.vectors.verify import verify


def main() -> None:
    """Hold what is frozen to what the corpus says now, and write that where they differ."""
    parser = argparse.ArgumentParser(description="Add new cases to the frozen vectors.")
    parser.add_argument("folder", nargs="?", default=str(FOLDER), help="default: the one of the kit")
    parser.add_argument(
        "--change-values",
        action="store_true",
        help="take over other inputs and expectations; for a new version of the specification",
    )
    options = parser.parse_args()
    try:
        checked = verify(options.folder, FILTERS, STAGES)
    except CommandError:  # there are none yet
        checked = None
    if checked is not None and not checked.differences:
        print(checked.render(), end="")  # not written: on another machine their last bits may be others
        return
    changed = () if checked is None else [d for d in checked.differences if d.file != manifest.NAME]
    if changed and not options.change_values:
        sys.exit(
            f"expected frozen vectors as they were, found {len(changed)} files changed, missing or of"
            f" no case, first {changed[0]}; what they hold belongs to the specification's version"
            " (see --change-values)"
        )
    try:
        print(export(options.folder, FILTERS, STAGES).render(), end="")
    except CommandError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
