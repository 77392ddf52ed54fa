"""Access to the operating system, to Python and to torch, for the other modules of the package."""
