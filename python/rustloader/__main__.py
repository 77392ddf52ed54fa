"""The entry point of ``python -m rustloader``."""

import sys

from rustloader.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
