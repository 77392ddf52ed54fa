"""Location of this package."""

import os

# The folder of the package; the one that holds it is an entry of `sys.path`.
FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
