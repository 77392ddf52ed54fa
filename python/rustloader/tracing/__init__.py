"""``rustloader.trace``: a timeline of the loaders of a program, as a file for Perfetto.

`core` begins and ends a trace, and knows the loaders. While it is on, the extension writes records into a folder
(`spool`). `slices` makes the events of the file of them, and `files` reads, writes and merges such files.
"""
