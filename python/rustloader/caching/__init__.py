"""``rustloader.cache``: what a dataset makes is made once, for all workers, ranks, epochs and runs."""
