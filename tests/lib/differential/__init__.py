"""The differential tester: runs one program through both loaders and compares everything observable.

``python -m differential --help`` (in ``tests/lib``) describes how to run it. The parts:

* ``program.py`` defines a program: a plain record of values, printed as JSON, which is also how a difference is
  reproduced. ``generate.py`` makes programs so that all pairs of values occur.
* ``parts.py``, ``samplers.py`` and ``samples.py`` are what it works with: datasets, functions, samplers. Each writes
  down its calls through ``recorder.py``, in the main process and in the workers.
* ``play.py`` runs a program with one of the loaders, in a process of its own that ``processes.py`` has forked, and
  gives a record; ``patterns.py`` is what is done with the loader, ``describe.py`` turns whatever a user can hold in
  hand into plain values.
* ``compare.py`` compares two records; ``intended.py`` is the list of differences that are wanted, with their reasons.
* ``shrink.py`` makes a program with a difference smaller; ``coverage.py`` counts what was tried.
"""

import os

# NumPy's OpenBLAS would start threads, and the process that all runs are forked from is to have none.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
