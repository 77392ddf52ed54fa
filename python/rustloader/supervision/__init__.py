"""Deaths and stalls of workers: their causes, the decision that follows, and the texts of errors and warnings."""
