"""The location of this package."""

import os

# The folder of the package. `sys.path` contains its parent folder.
FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
