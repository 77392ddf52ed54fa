"""``rustloader.trace``: writes a timeline of a program's loaders to a file for Perfetto.

`core` begins and ends a trace, and connects the loaders to it. During a trace, the extension writes records to a folder
(`spool`). `slices` converts them to the events of the file. `files` reads, writes and merges such files.
"""
