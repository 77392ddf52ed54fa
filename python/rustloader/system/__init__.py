"""Access to the operating system and to the internals of Python and torch, for the other modules of the package."""
