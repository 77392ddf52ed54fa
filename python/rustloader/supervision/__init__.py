"""Deaths and stalls of workers: their causes, the decisions about restarts, and the texts of errors and warnings."""
