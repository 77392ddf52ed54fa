"""``bench``: measures a user's loader on torch's iterator and on the engine."""
