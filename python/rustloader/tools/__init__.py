"""The commands, and the tools that they measure with."""
