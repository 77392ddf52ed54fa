"""Measurement tools: rounds, medians and intervals, processes, CPU time and memory, tables and JSON.

``bench``, the programs in benches/ and the demo use them. Importing a module of this package does not import torch.
"""
