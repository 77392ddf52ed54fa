"""``num_workers="auto"``: the first guess, the figures of the last epoch, and the decisions that follow from them."""
