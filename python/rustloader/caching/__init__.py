"""Implements ``rustloader.cache``: each sample of a dataset is made once for all workers, ranks, epochs and runs."""
