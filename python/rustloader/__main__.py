"""``python -m rustloader``."""

import sys

from rustloader._cli import main

if __name__ == "__main__":
    sys.exit(main())
