"""``python -m rustloader``."""

import sys

from rustloader.cli import main

if __name__ == "__main__":
    sys.exit(main())
