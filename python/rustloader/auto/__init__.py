"""``num_workers="auto"``: chooses the initial number of workers, and adapts it to the measurements of each epoch."""
