"""Implements ``rustloader.share``: objects that all processes of a machine share."""
