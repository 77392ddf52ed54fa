"""Batches for sequences of different lengths: token budgets and packs."""
