"""Changes to torch's fetchers, in workers and in the main process: seeds, threads, tables, failures."""
