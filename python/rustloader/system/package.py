"""The location of this package."""

import os

# The folder of the package. Its parent folder is an entry of `sys.path`.
FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
