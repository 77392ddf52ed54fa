"""The processes of `check` and `bench` as forks of this one, since each import of torch takes seconds.

Not covered: the start of the interpreter, PYTHONHASHSEED and PYTHONWARNINGS.
"""

import logging
import multiprocessing
import os
import subprocess
import sys
import types
import warnings
from multiprocessing import popen_fork

from support import open_files

from rustloader.tools.probe import process
from rustloader.tools.probe.side import serve


class Forked(popen_fork.Popen):
    """Takes the place of `subprocess.Popen` in `Probe`."""

    def __init__(self, command, *, pass_fds, env, **_):
        (descriptor,) = pass_fds
        super().__init__(multiprocessing.get_context("fork").Process(target=_serve, args=(descriptor, env)))
        os.setpgid(self.pid, self.pid)  # the child does so as well: one of the two is first


def fork_probes(monkeypatch):
    """Forks the processes that probes start. A process that is not waited for fails the test (conftest.py)."""
    names = {"Popen": Forked, "DEVNULL": subprocess.DEVNULL, "_args_from_interpreter_flags": list}
    monkeypatch.setattr(process, "subprocess", types.SimpleNamespace(**names))


def _serve(descriptor, environment):
    os.setpgid(0, 0)
    for number, target in open_files().items():
        if number != descriptor and target.startswith("socket:"):  # the parent's ends of the probes' connections
            os.close(number)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(2, 1)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)
    sys.unraisablehook = sys.__unraisablehook__
    sys.path.insert(0, "")
    logging.getLogger().handlers.clear()
    logging.getLogger("rustloader").handlers.clear()
    _show_warnings()
    multiprocessing.set_start_method("fork", force=True)
    serve(descriptor, os.getppid())


def _show_warnings():
    """As Python does without options."""
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = lambda *warning: print(warnings.formatwarning(*warning[:4]), file=sys.stderr)
