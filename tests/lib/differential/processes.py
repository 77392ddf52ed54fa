"""A clean process for each run of a program."""

import functools
import os
import shutil
import tempfile
import warnings

import forked_runs
import torch
import torch.utils.data

from . import play, seeded

# The time limit of a run in seconds. torch's loader takes 0.1 to 2 s, or a hundred times that on a very busy machine.
LIMIT = {"fork": 240, "spawn": 400, "forkserver": 400, "remote": 400, "ray": 400}


def run(program, which, folder):
    """Plays a program, in a process of its own; workers note their calls in a folder in `folder`."""
    torch.multiprocessing.set_start_method("fork", force=True)  # of loaders whose program names none
    if program.start_method != "fork":
        # A worker that is asked to exit before it has imported torch gets enough time for that.
        torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 60.0
    calls = os.path.join(folder, "calls")
    os.mkdir(calls)
    return play.play(program, which, calls)


def run_all(programs, jobs):
    """Runs programs, `jobs` processes at the same time; yields (program, record, ...), usually torch's record and
    rustloader's.

    ``seeded.runs`` lists the runs of a program.
    """
    warn_once()
    records = {}
    with tempfile.TemporaryDirectory(prefix="differential-", ignore_cleanup_errors=True) as folder:
        for (program, number, calls), record, stderr in forked_runs.results(runs_of(programs, folder), jobs):
            shutil.rmtree(calls, ignore_errors=True)
            if isinstance(record, forked_runs.Broken):
                record = {"broken": record.text}
            finished = records.setdefault(id(program), {})
            finished[number] = record | {"stderr": stderr}
            if len(finished) == len(seeded.runs(program)):
                del records[id(program)]
                yield program, *(record for _, record in sorted(finished.items()))


def runs_of(programs, folder):
    """The runs of programs, as ``forked_runs`` takes them."""
    for program in programs:
        for number, (which, variant) in enumerate(seeded.runs(program)):
            calls = tempfile.mkdtemp(dir=folder)
            yield (program, number, calls), functools.partial(run, variant, which, calls), LIMIT[program.start_method]


def warn_once():
    """Makes torch emit its once-per-process warnings now. torch's loader unpickles the stale batches of a reset, and
    rustloader skips them, so the warnings would come at different steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_coo_tensor([[0]], [1.0], (2,))
        torch.sparse_csr_tensor([0, 1], [0], [1.0])
        torch.nested.nested_tensor([])
