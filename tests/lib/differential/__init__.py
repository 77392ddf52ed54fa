"""The differential tester: runs one program through both loaders and compares everything observable.

``python -m differential --help`` (in ``tests/lib``) describes how to run it. The parts:

* ``program.py`` defines a program: a plain record of values, printed as JSON, from which a difference is reproduced.
  ``generate.py`` generates programs so that all pairs of values occur.
* ``parts.py``, ``samplers.py`` and ``samples.py`` define what a program uses: datasets, functions, samplers. These
  record their calls through ``recorder.py``, in the main process and in the workers.
* ``play.py`` runs a program with one of the loaders, in a process that ``processes.py`` has forked for it, and returns
  a record; ``patterns.py`` defines the patterns of use, ``describe.py`` turns everything that a user can observe into
  plain values.
* ``compare.py`` compares the records; ``intended.py`` and ``intended_options.py`` list the intended differences, with
  their reasons. ``seeded.py`` compares runs whose random numbers ``seed_by`` decides.
* ``shrink.py`` shrinks a program that shows a difference; ``coverage.py`` counts what was tried.
"""

import os

# NumPy's OpenBLAS would start threads, and the process from which all runs are forked must have none.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
