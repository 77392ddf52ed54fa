"""Puts the engine under the loaders of a whole program."""
