"""``top``: what the loaders of a running process do, seen from outside."""
