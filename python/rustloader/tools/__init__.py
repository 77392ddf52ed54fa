"""Commands and what they measure with."""
