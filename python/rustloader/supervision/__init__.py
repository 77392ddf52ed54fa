"""Deaths and stalls of workers: what they mean, what follows, and what is said of them."""
