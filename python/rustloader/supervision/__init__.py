"""Deaths and stalls of workers: their causes, the decisions about restarts, and the error and warning messages."""
