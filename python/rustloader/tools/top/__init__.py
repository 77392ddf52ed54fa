"""``top``: shows the loaders of a running process, from outside."""
