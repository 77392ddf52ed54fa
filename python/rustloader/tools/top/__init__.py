"""``top``: shows the loaders of another process while it runs."""
