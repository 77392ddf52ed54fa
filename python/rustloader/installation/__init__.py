"""Makes all loaders of a program use the engine."""
