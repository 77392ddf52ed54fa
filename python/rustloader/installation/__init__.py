"""Makes all DataLoaders of a program use the engine."""
