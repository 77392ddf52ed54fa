"""Every single system call of an epoch fails in turn, or ends its process there: `make stress KIND=failures`.

For each kind of call, in main or in the workers, the n-th call is chosen, for n = 1, 2, 3, ... until the epoch makes
no n-th call of that kind. Each run has to end in the right batches or in an error that names the call or the death,
with no process, descriptor, mapping, thread or page left. test_refusals.py asks more of fewer calls.
"""

import argparse
import gc
import json
import random
import re
import signal
import sys
import time
from collections import Counter
from typing import NamedTuple

from refusals import load_core, run

PROGRAMS = ["twice", "persistent", "pinned", "pinned_persistent", "doomed", "restarted", "forking", "shared"]
# Its workers are fresh interpreters: of each kind only the first call.
SLOW = "spawned"
# Kinds that only one program is there for.
SPECIAL = {
    "burst": ["remove"],
    "many": ["epoll_create", "epoll_ctl", "epoll_wait"],
    "growing": ["populate"],
    "warm": ["map_in"],
    "stubborn": ["pidfd_send_signal"],
    "handled": ["timer", "sigaction"],
    "stuck": ["peek"],
}
# Kinds that the loader calls only where another one is refused as well (test_refusals.py).
UNUSED = {"kill", "pidfd_get_info"}
ERRNO = {
    "memfd_create": "EMFILE",
    "ftruncate": "ENOSPC",
    "mmap": "ENOMEM",
    "mprotect": "EACCES",
    "dontdump": "EINVAL",
    "populate": "ENOMEM",
    "map_in": "ENOMEM",
    "remove": "EINVAL",
    "eventfd": "EMFILE",
    "pidfd_open": "EMFILE",
    "pidfd_get_info": "EINVAL",
    "waitid": "ECHILD",
    "epoll_create": "EMFILE",
    "epoll_ctl": "ENOSPC",
    "atfork": "ENOMEM",
    "thread": "EAGAIN",
    "timer": "EAGAIN",
    "peek": "EACCES",
    "proc": "EMFILE",
}
EFFECTS = ["errno", "EINTR", "kill", "exit=3"]
# Kinds that a signal may interrupt.
INTERRUPTED = {
    "ftruncate",
    "populate",
    "map_in",
    "remove",
    "eventfd_write",
    "eventfd_read",
    "pidfd_poll",
    "waitid",
    "futex_wait",
}
INTERRUPTED |= {"ppoll", "epoll_wait"}
# Kinds whose refusal in main hands a loader over to torch's iterator.
HANDING_OVER = {"memfd_create", "ftruncate", "seal", "mmap", "mprotect", "populate", "eventfd", "fstat", "atfork"}
# Seconds in which a program has to end; a spawned worker imports torch.
LIMIT = 60
# At most this many calls of a kind are tried where the program makes more of them the longer it waits.
MOST = 60

CLEAR = [
    r"\w*Error: (Caught \w+ in .*)?\[Errno \d+\] .*failed: .*",
    r"MemoryError: .*(failed: |cannot get \d+ bytes of shared memory).*",
    r"RuntimeError: DataLoader worker \(pid N\) (is killed by signal: Killed\. |exited unexpectedly).*",
    r"RuntimeError: Pin memory thread exited unexpectedly .*failed: .*",
    r"again, for good",
    r"DataLoader worker 0 \(pid N\) has been working on one batch for .*",
]
HANDED_OVER = "WARNING a DataLoader runs on torch's own iterator: cannot create the engine: "
RESTARTED = "WARNING DataLoader worker "


class Failure(NamedTuple):
    program: str
    where: str
    kind: str
    nth: int
    effect: str

    @property
    def points(self):
        return f"{self.kind}:{self.nth}:{ERRNO.get(self.kind, 'EPERM') if self.effect == 'errno' else self.effect}"

    def __str__(self):
        return f"{self.program} {self.where} {self.points}"


def made(program, where):
    """How many calls of each kind a program makes when none of them fails."""
    from isolation import in_child

    report = in_child(run, program, "", where, seconds=LIMIT)
    assert report["status"] == 0 and len(report["value"]) == {"doomed": 2, "stuck": 1}.get(program, 0), report
    calls = report["calls"]
    return {kind: calls[kind] for kind in sorted(calls) if kind in SPECIAL.get(program, calls)}


def effects_of(kind, program, where):
    """What may happen at a call. Not where torch's own iterator would meet the death: it may hang, or continue."""
    handed_over = program in ("doomed", "restarted") and where == "main" and kind in HANDING_OVER
    return [e for e in EFFECTS if (e != "EINTR" or kind in INTERRUPTED) and not (e == "errno" and handed_over)]


def is_clear(text):
    return any(re.fullmatch(pattern, text, re.DOTALL) for pattern in CLEAR)


def says_why(failure, output):
    """Whether what was written are tracebacks of workers, each with a named error, that could not be told otherwise:
    a spawned worker has no arena to send its error through before it has joined it."""
    ends = [line for line in output.splitlines() if not line.startswith((" ", "Traceback (most recent call last):"))]
    return failure.program == SLOW and failure.where == "worker" and all(map(is_clear, filter(None, ends)))


def tried(failure):
    """Runs a program with a failure: (what is wrong, in words; whether there was such a call; the errors)."""
    from isolation import in_child

    report = in_child(run, failure.program, failure.points, failure.where, seconds=LIMIT)
    ends_main = failure.where == "main" and failure.effect in ("kill", "exit=3")
    wrong = []
    if report["hangs"]:
        wrong.append("it hangs")
    if report["processes"]:
        wrong.append(f"{report['processes']} processes are left")
    if ends_main and report["status"] == (signal.SIGKILL if failure.effect == "kill" else 3 << 8):
        return wrong, True, []
    if "value" not in report:
        return [*wrong, f"status {report['status']}: {report['output']}"], True, []
    if report["output"] and not says_why(failure, report["output"]):
        wrong.append(f"it wrote: {report['output']}")
    if report["left"]:
        wrong.append(f"left behind: {report['left']}")
    if report["bytes"]:
        wrong.append(f"{report['bytes']} bytes of shared memory are left")
    expected = (HANDED_OVER, RESTARTED) if failure.program == "restarted" else HANDED_OVER
    wrong += [f"logged: {line}" for line in report["log"] if not line.startswith(expected)]
    errors = [text.removeprefix("iter: ") for text in report["value"]]
    for text in errors:
        if not is_clear(text):
            wrong.append(f"not clear: {text}")
    # What a worker has counted is lost with it.
    reached = failure.where == "worker" or report["calls"].get(failure.kind, 0) >= failure.nth
    if ends_main and reached:
        wrong.append("it goes on behind its end")
    return wrong, reached, errors


def walk(programs, kinds, report):
    """Tries call after call of each kind until none is left; returns the kinds that were called."""
    found = set()
    for program in programs:
        for where in ("main", "worker"):
            for kind, calls in made(program, where).items():
                found.add(kind)
                if kinds and kind not in kinds:
                    continue
                for effect in effects_of(kind, program, where):
                    for nth in range(1, 2 if program == SLOW else MOST + 1):
                        # Both are the end of the process; one of them at each call is enough.
                        if effect == ("exit=3" if nth % 2 else "kill"):
                            continue
                        failure = Failure(program, where, kind, nth, effect)
                        # Main's calls vary with the time that it waits.
                        if not report(failure, *tried(failure)) or (nth >= calls and where == "worker"):
                            break
    return found


def some(count, seed):
    """`count` failures, drawn from the calls that the programs make when nothing fails."""
    places = [
        (program, where, kind, number)
        for program in [*PROGRAMS, *SPECIAL]
        for where in ("main", "worker")
        for kind, number in made(program, where).items()
    ]

    def chance(what, place):
        """By the place alone: how many calls there are, and of which kinds, is not the same in each run."""
        return random.Random(f"{seed} {what} {place[:3]}")

    chosen = []
    for place in sorted(places, key=lambda place: chance("order", place).random())[:count]:
        program, where, kind, number = place
        rng = chance("call", place)
        effect = rng.choice(effects_of(kind, program, where))
        chosen.append(Failure(program, where, kind, 1 + int(rng.random() * min(number, MOST)), effect))
    return chosen


def prepare():
    """To be called before anything of rustloader is used."""
    load_core()
    import multiprocessing.resource_tracker

    import programs  # noqa: F401

    from .trials import quiet

    # Not a helper that a trial leaves behind.
    multiprocessing.resource_tracker.ensure_running()
    quiet()
    gc.freeze()


def main():
    parser = argparse.ArgumentParser(prog="python -m faults.failures", description=__doc__.partition("\n")[0])
    parser.add_argument("--some", type=int, metavar="N", help="try only N of them, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of --some")
    parser.add_argument("--program", action="append", default=[], help="only this program")
    parser.add_argument("--kind", action="append", default=[], help="only this kind of call")
    parser.add_argument("--show", action="store_true", help="a line for each run")
    args = parser.parse_args()
    prepare()
    counts, start = Counter(), time.monotonic()

    def report(failure, wrong, reached, errors):
        if not reached and not wrong:
            return False
        counts["runs"] += 1
        counts["wrong"] += bool(wrong)
        counts["with an error"] += bool(errors)
        if wrong or args.show:
            print(f"{failure}: {'WRONG ' + '; '.join(wrong) if wrong else errors or 'right'}", flush=True)
        return reached

    if args.some is not None:
        for failure in some(args.some, args.seed):
            report(failure, *tried(failure))
    else:
        found = walk(args.program or [*PROGRAMS, *SPECIAL, SLOW], args.kind, report)
        if not args.program and not args.kind:
            from rustloader import _core

            missing = set(_core._failpoint_calls()) - found - UNUSED
            assert not missing, f"no program makes these calls: {missing}"
    summary = {**counts, "seconds": round(time.monotonic() - start)}
    print(f"{counts['runs']} failures, {counts['wrong']} wrong, {counts['with an error']} ended in a named error")
    print(json.dumps(summary))
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a spawned worker
    load_core()
