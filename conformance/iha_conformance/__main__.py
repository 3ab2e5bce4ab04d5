"""`python -m iha_conformance` is the `iha` command."""

import sys

from iha_conformance.cli import main

if __name__ == "__main__":
    sys.exit(main())
