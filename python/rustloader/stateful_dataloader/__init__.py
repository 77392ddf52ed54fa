"""Loaders whose position can be saved, under the names of ``torchdata.stateful_dataloader``."""
