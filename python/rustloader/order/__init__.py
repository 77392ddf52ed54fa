"""torch's samplers: whether one is torch's own, how its order starts, and how it is drawn, skipped and predicted."""
