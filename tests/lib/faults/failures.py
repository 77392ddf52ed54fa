"""Every system call of an epoch fails in turn, or ends its process: `make stress KIND=failures`.

For each kind of call, in main or in the workers, the n-th call is chosen, for n = 1, 2, 3, ... until the epoch makes
no n-th call of that kind. Each run must end with the right batches or with an error that names the call or the death,
and leave no process, descriptor, mapping, thread or page. test_refusals.py checks more about fewer calls.
"""

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

from .trials import arguments, quiet

PROGRAMS = ["twice", "persistent", "pinned", "pinned_persistent", "doomed", "restarted", "forking", "shared"]
# Its workers are fresh interpreters, which are slow: only the first call of each kind fails.
SLOW = "spawned"
# Kinds of calls that are tried in one program only.
SPECIAL = {
    "burst": ["remove"],
    "many": ["epoll_create", "epoll_ctl", "epoll_wait"],
    "growing": ["populate"],
    "warm": ["map_in"],
    "stubborn": ["pidfd_send_signal"],
    "handled": ["timer", "sigaction"],
    "stuck": ["peek"],
}
# Kinds that the loader calls only if another kind fails too (test_refusals.py).
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
# Kinds whose failure in main makes the loader a fallback.
HANDING_OVER = {"memfd_create", "ftruncate", "seal", "mmap", "mprotect", "populate", "eventfd", "fstat", "atfork"}
# Seconds within which a program must end; a spawned worker imports torch.
LIMIT = 60
# The most calls of a kind that are tried: a program may make more of them the longer it waits.
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


def count_calls(program, where):
    """Returns how many calls of each kind a program makes if none of them fails."""
    from isolation import in_child

    report = in_child(run, program, "", where, seconds=LIMIT)
    assert report["status"] == 0 and len(report["value"]) == {"doomed": 2, "stuck": 1}.get(program, 0), report
    calls = report["calls"]
    return {kind: calls[kind] for kind in sorted(calls) if kind in SPECIAL.get(program, calls)}


def effects_of(kind, program, where):
    """The effects to try at a call. Not an error that leads to a fallback in a program whose workers die: torch's
    iterator may hang after a death, or continue."""
    handed_over = program in ("doomed", "restarted") and where == "main" and kind in HANDING_OVER
    return [e for e in EFFECTS if (e != "EINTR" or kind in INTERRUPTED) and not (e == "errno" and handed_over)]


def is_clear(text):
    return any(re.fullmatch(pattern, text, re.DOTALL) for pattern in CLEAR)


def is_explained(failure, output):
    """Whether the output consists of workers' tracebacks with clear errors, which could not be reported otherwise: a
    spawned worker cannot send an error before it has mapped the arena."""
    ends = [line for line in output.splitlines() if not line.startswith((" ", "Traceback (most recent call last):"))]
    return failure.program == SLOW and failure.where == "worker" and all(map(is_clear, filter(None, ends)))


def try_failure(failure):
    """Runs a program with a failure. Returns (problems found, whether the call was reached, the program's errors)."""
    from isolation import in_child

    report = in_child(run, failure.program, failure.points, failure.where, seconds=LIMIT)
    ends_main = failure.where == "main" and failure.effect in ("kill", "exit=3")
    wrong = []
    if report["hangs"]:
        wrong.append("it hangs")
    if report["processes"]:
        wrong.append(f"{report['processes']} processes are left behind")
    if ends_main and report["status"] == (signal.SIGKILL if failure.effect == "kill" else 3 << 8):
        return wrong, True, []
    if "value" not in report:
        return [*wrong, f"status {report['status']}: {report['output']}"], True, []
    if report["output"] and not is_explained(failure, report["output"]):
        wrong.append(f"unexpected output: {report['output']}")
    if report["left"]:
        wrong.append(f"left behind: {report['left']}")
    if report["bytes"]:
        wrong.append(f"{report['bytes']} bytes of shared memory are left behind")
    expected = (HANDED_OVER, RESTARTED) if failure.program == "restarted" else HANDED_OVER
    wrong += [f"logged: {line}" for line in report["log"] if not line.startswith(expected)]
    errors = [text.removeprefix("iter: ") for text in report["value"]]
    for text in errors:
        if not is_clear(text):
            wrong.append(f"not clear: {text}")
    # A worker's counts are lost with it.
    reached = failure.where == "worker" or report["calls"].get(failure.kind, 0) >= failure.nth
    if ends_main and reached:
        wrong.append("it continues although the call should have ended it")
    return wrong, reached, errors


def try_all(programs, kinds, report):
    """Tries call after call of each kind until none is left. Returns the kinds of calls that the programs made."""
    kinds_seen = set()
    for program in programs:
        for where in ("main", "worker"):
            for kind, calls in count_calls(program, where).items():
                kinds_seen.add(kind)
                if kinds and kind not in kinds:
                    continue
                for effect in effects_of(kind, program, where):
                    for nth in range(1, 2 if program == SLOW else MOST + 1):
                        # Both end the process: the calls alternate between them.
                        if effect == ("exit=3" if nth % 2 else "kill"):
                            continue
                        failure = Failure(program, where, kind, nth, effect)
                        # The number of main's calls depends on how long it waits.
                        if not report(failure, *try_failure(failure)) or (nth >= calls and where == "worker"):
                            break
    return kinds_seen


def draw_failures(count, seed):
    """Draws `count` failures from the calls that the programs make if nothing fails."""
    places = [
        (program, where, kind, number)
        for program in [*PROGRAMS, *SPECIAL]
        for where in ("main", "worker")
        for kind, number in count_calls(program, where).items()
    ]

    def chance(what, place):
        """Depends on the place alone, because the numbers and kinds of calls vary between runs."""
        return random.Random(f"{seed} {what} {place[:3]}")

    chosen = []
    for place in sorted(places, key=lambda place: chance("order", place).random())[:count]:
        program, where, kind, number = place
        rng = chance("call", place)
        effect = rng.choice(effects_of(kind, program, where))
        chosen.append(Failure(program, where, kind, 1 + int(rng.random() * min(number, MOST)), effect))
    return chosen


def prepare():
    """Call this before rustloader is used."""
    load_core()
    import multiprocessing.resource_tracker

    import programs  # noqa: F401

    # Started here, the resource tracker does not count as left behind by a trial.
    multiprocessing.resource_tracker.ensure_running()
    quiet()
    gc.freeze()


def main():
    args = arguments(
        "failures",
        __doc__,
        some=(int, "try only this many failures, drawn at random"),
        seed=(0, "seed of --some"),
        program=([], "try only this program"),
        kind=([], "try only this kind of call"),
        show=(False, "print a line for each run"),
    )
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
        for failure in draw_failures(args.some, args.seed):
            report(failure, *try_failure(failure))
    else:
        kinds_seen = try_all(args.program or [*PROGRAMS, *SPECIAL, SLOW], args.kind, report)
        if not args.program and not args.kind:
            from rustloader import _core

            missing = set(_core._failpoint_calls()) - kinds_seen - UNUSED
            assert not missing, f"no program makes these calls: {missing}"
    summary = {**counts, "seconds": round(time.monotonic() - start)}
    print(f"{counts['runs']} failures, {counts['wrong']} wrong, {counts['with an error']} ended with a clear error")
    print(json.dumps(summary))
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a spawned worker
    load_core()
