"""``num_workers="auto"``: the first guess, the figures of the last epoch, and what follows from them."""
