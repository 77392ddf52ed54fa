"""Measures: rounds, medians and intervals, processes, processor time and memory, tables and JSON.

``bench``, the programs in benches/ and the demo use it. No module here imports torch when it is imported.
"""
