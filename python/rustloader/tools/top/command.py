"""``top``: shows the loaders of another process while it runs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import rustloader.system.local_ranks as local_ranks
import rustloader.system.procfs as procfs
from rustloader.tools.top import processes
from rustloader.tools.top.model import Loader, Observation, observe
from rustloader.tools.top.view import frame, plain

# Maximum seconds that the verdict of the live view covers.
_VERDICT_SECONDS = 60.0


def main(options: Any) -> int:
    """Shows the loaders of a process. Returns 0, or 2 if there is nothing to show."""
    once = options.once or options.json or not sys.stdout.isatty()
    if not once and not _has_rich():
        return _refuse("the live view needs rich: pip install 'rustloader[cli]', or use --once or --json")
    try:
        pid = _choose(options.json) if options.pid is None else _main_process(options.pid, waits=not once)
        if pid is None:
            return 2
        return _print_once(pid, options) if once else _live(pid, options.interval)
    except processes.NothingToSee as reason:
        return _refuse(str(reason))
    except KeyboardInterrupt:
        if once:
            raise
        return 0


def _refuse(reason: str) -> int:
    print(f"rustloader top: {reason}", file=sys.stderr)
    return 2


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def _choose(as_json: bool) -> int | None:
    """Returns the only process of this user with running loaders. If there are several, lists them and returns None."""
    main_processes = processes.main_processes()
    if not main_processes:
        whose = "" if processes.user() == "root" else f" of user {processes.user()}"
        raise processes.NothingToSee(
            f"no process{whose} has a loader running on rustloader's engine now. Loaders with num_workers=0, and those "
            "that run on torch's own iterator, are not shown"
        )
    if len(main_processes) == 1:
        return next(iter(main_processes))
    listed = [_process_row(pid, len(own)) for pid, own in main_processes.items()]
    if as_json:
        print(json.dumps({"processes": listed}, indent=2))
    else:
        print(f"{'pid':>8}  {'rank':>4}  {'loaders':>7}  {'batches':>9}  {'in next':>7}  {'verdict':12}  command")
        for it in listed:
            cells = it | {"rank": "-" if it["local_rank"] is None else it["local_rank"]}
            line = "{pid:>8}  {rank:>4}  {loaders:>7}  {batches:>9,}  {next_share:>7.0%}  {verdict:12}  {command}"
            print(line.format(**cells))
    _refuse("several processes have running loaders; choose one: rustloader top PID")
    return None


def _process_row(pid: int, count: int) -> dict[str, Any]:
    """Returns a row of the list of processes. ``count`` is the number of loaders of the process.

    The other values describe the loader with the most batches, and cover the time since its creation. The share of time
    in `next` shows which of several ranks waits for its loader.
    """
    rank = local_ranks.rank_variable_of(pid)
    identity = {"pid": pid, "local_rank": None if rank is None else rank[1], "loaders": count}
    figures: dict[str, Any] = {"name": "", "batches": 0, "next_share": 0.0, "verdict": "unknown"}
    with contextlib.suppress(processes.NothingToSee):  # the process may have ended since
        loaders = [Loader(pid, None, observation) for observation in observe(pid)]
        busiest = max(loaders, key=lambda loader: loader.total.batches, default=None)
        if busiest is not None:
            total = busiest.total
            loop = total.next_seconds + total.step_seconds
            share = total.next_seconds / loop if loop else 0.0
            kind = busiest.verdict[0].kind
            figures = {"name": total.name, "batches": total.batches, "next_share": share, "verdict": kind}
    return identity | figures | {"command": processes.command(pid)}


def _main_process(pid: int, waits: bool) -> int:
    """Returns the process whose loaders to show: ``pid``, or its main process if ``pid`` is a worker.

    If ``waits`` is True, accepts a process that uses the engine but has no running loader at present.

    Raises:
        NothingToSee: There is nothing to show about the process.
    """
    loaders = processes.loaders(pid)
    if procfs.has_ended(pid):
        raise processes.NothingToSee(f"process {pid} has ended")
    inner = processes.inner_pid(pid)
    if any(it.figures.pid == inner for it in loaders):
        return pid
    if loaders:
        return _parent_of(pid, inner, loaders[-1])
    if not processes.has_extension(pid):
        raise processes.NothingToSee(
            f"process {pid} does not use rustloader's engine. Its loaders, if it has any, run on torch's own iterator: "
            "see rustloader.install() and `rustloader run`"
        )
    if not waits:
        raise processes.NothingToSee(
            f"process {pid} uses rustloader, but none of its loaders is running on the engine now: it is between two "
            "epochs, its loaders have num_workers=0, or they run on torch's own iterator"
        )
    return pid


def _parent_of(pid: int, inner: int, loader: processes.LoaderArena) -> int:
    outer = processes.outer_pids(pid)
    main = loader.figures.pid if outer is None else outer.get(loader.figures.pid)
    if main is None or procfs.has_ended(main):
        raise processes.NothingToSee(f"process {pid} is a worker, or another child, of a process that has ended")
    numbers = [number for number, worker in enumerate(loader.figures.totals.workers) if worker.pid == inner]
    what = f"worker {numbers[0]} of a loader" if numbers else "a child"
    print(f"Process {pid} is {what} of process {main}. Showing process {main}.", file=sys.stderr)
    return int(main)


class _History:
    """The latest observations of a process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # Each observation has the state of each iterator, by `Observation.key`. The latest comes last.
        self._observations: list[dict[Any, Observation]] = []

    def observe(self) -> None:
        """Adds an observation. Raises ``NothingToSee`` if the process has ended."""
        self._observations.append({it.key: it for it in observe(self.pid)})
        now = time.monotonic()
        # The last two are always kept, because the interval may be longer than the time that a verdict covers.
        recent = [observation for observation in self._observations[:-2] if _age(observation, now) <= _VERDICT_SECONDS]
        self._observations = (recent + self._observations[-2:])[-1000:]

    def loaders(self) -> list[Loader]:
        """Returns the loaders in the latest observation, oldest first."""
        before = self._observations[-2] if len(self._observations) > 1 else {}

        def period(key: Any) -> list[Observation]:
            return [observation[key] for observation in self._observations[:-1] if key in observation]

        return [Loader(self.pid, before.get(key), now, period(key)) for key, now in self._observations[-1].items()]


def _age(observation: dict[Any, Observation], now: float) -> float:
    return max((now - it.figures.now for it in observation.values()), default=0.0)


def _print_once(pid: int, options: Any) -> int:
    """Prints the result of two observations, one interval apart."""
    history = _History(pid)
    history.observe()
    time.sleep(options.interval)
    history.observe()
    loaders, command = history.loaders(), processes.command(pid)
    if options.json:
        result = {
            "pid": pid,
            "user": processes.owner(pid),
            "command": command,
            "memory_bytes": procfs.resident(pid),
            "pss_bytes": procfs.proportional(pid),
            "caches": [asdict(usage) for usage in processes.caches(pid)],
            "loaders": [loader.as_dict() for loader in loaders],
        }
        print(json.dumps(result, indent=2))
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 160
    print(plain(frame(pid, command, loaders, width, caches=processes.caches(pid))))
    return 0


def _live(pid: int, interval: float) -> int:
    """Shows the loaders until the user quits or the process ends."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console, history, command = Console(), _History(pid), processes.command(pid)

    def draw() -> Text:
        width, height = console.size
        lines = frame(pid, command, history.loaders(), width, height - 1, processes.caches(pid))
        lines += [[]] * (height - 1 - len(lines))
        lines.append([(f"updated every {interval:g} s; q quits", "dim")])
        parts = [part for line in lines for part in (*line, ("\n", ""))]
        return Text.assemble(*parts[:-1], no_wrap=True, overflow="crop")

    try:
        history.observe()
        with _keys() as wait_for_key, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(draw(), refresh=True)
                if wait_for_key(interval) == "q":
                    return 0
                history.observe()
    except processes.NothingToSee as reason:
        print(f"{str(reason)[0].upper()}{str(reason)[1:]}.")
        return 0


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits up to the given seconds for a key. It returns the key, or "" if there was none."""
    import termios
    import tty

    def wait_for_key(seconds: float) -> str:
        ready, _, _ = select.select(inputs, [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""

    inputs = [sys.stdin] if sys.stdin is not None and sys.stdin.isatty() else []
    if not inputs:
        yield wait_for_key
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield wait_for_key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
