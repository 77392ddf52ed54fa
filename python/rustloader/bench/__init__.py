"""``bench``: measures a loader of the user's on torch's iterator and on the engine."""
