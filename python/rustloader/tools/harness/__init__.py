"""Measurement tools: rounds, medians and intervals, CPU time and memory, aligned columns.

``bench``, the programs in benches/ and the demo use them. Importing a module of this package does not import torch.
"""
