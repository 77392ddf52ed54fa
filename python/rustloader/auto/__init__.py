"""``num_workers="auto"``: the initial number of workers, and its changes by the figures of each epoch."""
