"""`python -m kvd`."""

from __future__ import annotations

import sys

from kvd.cli import main

if __name__ == "__main__":
    sys.exit(main())
