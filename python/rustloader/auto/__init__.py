"""``num_workers="auto"``: the initial number of workers, and later numbers by the figures of the last epoch."""
