"""Workers as Ray actors, against local workers and a bare connection: `make compare KIND=ray`.

A cluster of two nodes on this machine, two workers, two batches of each under way, workers kept. All sides take turns;
a ratio is the median of the rounds' ratios. `bare` is two processes that send the same bytes over TCP, and this one,
which receives them into memory that it reuses: no dataset, no order, no batches.

big    64 images of 3x224x224 uint8, 9.6 MB      mid    one image, 150 KB      small  1 KB
"""

import argparse
import contextlib
import functools
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.data

import rustloader
import rustloader.ray


class Size(NamedTuple):
    """Samples of a batch, the shape of each, and batches per epoch."""

    samples: int
    shape: tuple[int, ...]
    batches: int

    @property
    def bytes(self) -> int:
        return self.samples * torch.Size(self.shape).numel()


SIZES = {
    "big": Size(64, (3, 224, 224), 60),
    "mid": Size(1, (3, 224, 224), 1500),
    "small": Size(1, (1024,), 3000),
}
WORKERS = 2


class Made(torch.utils.data.Dataset):
    """Samples that cost nothing."""

    def __init__(self, size: Size, pause: float = 0.0):
        self.length, self.pause = size.samples * size.batches, pause
        self.sample = torch.arange(torch.Size(size.shape).numel()).to(torch.uint8).reshape(size.shape)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.pause:
            time.sleep(self.pause)
        return self.sample


class Rate(NamedTuple):
    """Batches per second, and seconds of this process's CPU time per batch."""

    rate: float
    cpu: float


def timed(batches: int, work: Callable[[], None]) -> Rate:
    cpu, start = time.process_time(), time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return Rate(batches / seconds, (time.process_time() - cpu) / batches)


def loader(kind: Any, size: Size, context: Any = None, **options: Any) -> Any:
    return kind(
        Made(size),
        batch_size=size.samples,
        num_workers=WORKERS,
        persistent_workers=True,
        multiprocessing_context=context,
        **options,
    )


def epoch(of: Any) -> None:
    for _ in of:
        pass


def send(port: int, size: int, count: int) -> None:
    """A bare sender."""
    data = bytes(size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.recv(1)
        for _ in range(count):
            connection.sendall(data)


def bare(size: Size) -> Rate:
    """The rate of a bare connection."""
    memory = [bytearray(size.bytes) for _ in range(4)]
    count = size.batches // WORKERS
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        fork = multiprocessing.get_context("fork")
        senders = [fork.Process(target=send, args=(port, size.bytes, count)) for _ in range(WORKERS)]
        for sender in senders:
            sender.start()
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(server.accept()[0]) for _ in senders]

            def receive() -> None:
                for at in range(count * WORKERS):
                    buffer, connection = memory[at % len(memory)], connections[at % WORKERS]
                    connection.recv_into(buffer, size.bytes, socket.MSG_WAITALL)

            for connection in connections:
                connection.sendall(b"x")
            found = timed(count * WORKERS, receive)
        for sender in senders:
            sender.join()
    return found


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """A thread of this process computes in Python."""
    over = False

    def spin() -> None:
        while not over:
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        over = True
        thread.join()


def rates(size: Size, rounds: int) -> dict[str, list[Rate]]:
    """The rates of all sides, by round."""
    ours = rustloader.DataLoader
    sides = {
        "torch": loader(torch.utils.data.DataLoader, size),
        "local": loader(ours, size),
        "ray": loader(ours, size, rustloader.ray.RayContext()),
    }
    for side in sides.values():
        epoch(side)
    found: dict[str, list[Rate]] = {name: [] for name in (*sides, "bare", "ray, busy", "local, busy")}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(timed(size.batches, lambda side=sides[name]: epoch(side)))
        found["bare"].append(bare(size))
        with busy_thread():
            # Not torch's: a batch takes it 5 ms and more.
            for name in ("ray", "local"):
                found[f"{name}, busy"].append(timed(size.batches, lambda side=sides[name]: epoch(side)))
    return found


def paused(resources: dict[str, float] | None = None, **options: Any) -> Any:
    """An iterator whose workers take 10 ms per batch."""
    context = rustloader.ray.RayContext(resources=resources)
    dataset = Made(Size(1, (1024,), 100_000), pause=0.01)
    iterator = iter(rustloader.DataLoader(dataset, num_workers=WORKERS, multiprocessing_context=context, **options))
    for _ in range(4):
        next(iterator)
    return iterator


def until_death(iterator: Any, end: Callable[[], None]) -> float:
    """Seconds from the call that ends workers to the loader's error."""
    start = time.perf_counter()
    ending = threading.Thread(target=end)
    ending.start()
    try:
        for _ in iterator:
            pass
    except rustloader.WorkerDiedError:
        seconds = time.perf_counter() - start
        ending.join()
        return seconds
    raise AssertionError("the death was not noticed")


def until_gone(pids: list[int]) -> float:
    """Seconds until processes have ended."""
    start = time.perf_counter()
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.005)
    return time.perf_counter() - start


def after_loader() -> float:
    """Seconds from the end of a loader, whose workers are within a sample of a minute, to that of its actors."""
    context = rustloader.ray.RayContext()
    dataset = Made(Size(1, (1024,), 100), pause=60)
    iterator = iter(rustloader.DataLoader(dataset, num_workers=WORKERS, multiprocessing_context=context))
    pids = [worker.pid for worker in iterator._workers]
    time.sleep(0.5)
    start = time.perf_counter()
    del iterator
    until_gone(pids)
    return time.perf_counter() - start


DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
import ray, remote, rustloader, rustloader.ray
ray.init(address=sys.argv[2], log_to_driver=False, logging_level="ERROR")
ray.cloudpickle.register_pickle_by_value(remote)
iterator = remote.paused()
print(*[worker.pid for worker in iterator._workers], flush=True)
for _ in iterator:
    pass
"""


def after_driver() -> float:
    """Seconds from a kill of the program to the end of its actors."""
    import ray

    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", DRIVER, os.path.dirname(os.path.abspath(__file__)), address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == WORKERS, "the program has not started"
        driver.kill()
        return until_gone(pids)


class Plain:
    """An actor with a worker's imports."""

    def ready(self) -> None:
        import rustloader.workers.remote  # noqa: F401


def restart() -> tuple[float, float]:
    """Seconds that a restart takes, and those of an actor alone that imports the same."""
    import ray

    start = time.perf_counter()
    actor = ray.remote(Plain).remote()
    ray.get(actor.ready.remote())
    alone = time.perf_counter() - start
    ray.kill(actor)
    iterator = paused(max_restarts=1, seed_by="batch")
    victim = iterator._workers[0].pid
    os.kill(victim, signal.SIGKILL)
    start = time.perf_counter()
    while iterator._workers[0].pid == victim:
        next(iterator)
    return time.perf_counter() - start, alone


class Table:
    """Prints figures beside their goals."""

    def __init__(self) -> None:
        self.missed = 0
        print("| what | found | goal | |\n|---|---|---|---|", flush=True)

    def add(self, what: str, found: float, goal: float | None = None, most: bool = False, unit: str = "x") -> None:
        held = goal is None or (found <= goal if most else found >= goal)
        self.missed += not held
        text = "" if goal is None else f"{'<=' if most else '>='} {goal}{unit}"
        print(f"| {what} | {found:.3g}{unit} | {text} | {'' if held else 'missed'} |", flush=True)


def of_rounds(one: list[Rate], other: list[Rate], field: str = "rate") -> float:
    return statistics.median(getattr(a, field) / max(getattr(b, field), 1e-9) for a, b in zip(one, other, strict=True))


def compare(table: Table, name: str, rounds: int) -> None:
    size = SIZES[name]
    found = rates(size, rounds)
    for side, each in found.items():
        rate, cpu = (statistics.median(getattr(it, field) for it in each) for field in ("rate", "cpu"))
        table.add(
            f"{name}: {side}, {rate * size.bytes / 1e6:,.0f} MB/s, {cpu * 1e6:,.0f} us CPU a batch", rate, unit="/s"
        )
    ray, local, bare, torchs = (found[it] for it in ("ray", "local", "bare", "torch"))
    if name == "big":
        table.add("big: rate, of a bare connection's", of_rounds(ray, bare), 0.85)
        table.add("big: rate, of torch's local workers'", of_rounds(ray, torchs), 1.2)
        table.add("big: CPU a batch, of a bare connection's", of_rounds(ray, bare, "cpu"), 1.2, most=True)
    else:
        table.add(f"{name}: rate, of our local workers'", of_rounds(ray, local), 0.9 if name == "mid" else 0.7)
        table.add(f"{name}: rate, of torch's local workers'", of_rounds(ray, torchs), 5)
    if name == "small":
        table.add("small: CPU a batch, of our local workers'", of_rounds(ray, local, "cpu"), 2, most=True)
    table.add(f"{name}: rate beside a busy thread, of that without", of_rounds(found["ray, busy"], ray), 0.8)
    table.add(f"{name}: the same with our local workers", of_rounds(found["local, busy"], local))


def faults(table: Table, remove: Callable[[], None], rounds: int) -> None:
    """The times of deaths and restarts. Ends the second node."""
    deaths = []
    for _ in range(rounds):
        iterator = paused()
        deaths.append(until_death(iterator, functools.partial(os.kill, iterator._workers[0].pid, signal.SIGKILL)))
    table.add("a killed actor is seen after", statistics.median(deaths), 0.1, most=True, unit=" s")
    times = [restart() for _ in range(rounds)]
    whole, alone = (statistics.median(it) for it in zip(*times, strict=True))
    table.add("a restart takes", whole, unit=" s")
    table.add("an actor with its imports", alone, unit=" s")
    own = statistics.median(max(restarted - actor, 0.0) for restarted, actor in times)
    table.add("a restart's own part", own, 0.2, most=True, unit=" s")
    gone = statistics.median(after_loader() for _ in range(rounds))
    table.add("actors are gone after their loader", gone, 2, most=True, unit=" s")
    gone = statistics.median(after_driver() for _ in range(rounds))
    table.add("actors are gone after a kill of the program", gone, 2, most=True, unit=" s")
    # Actors of a raylet that ends alone go on: their machine is there.
    lost = until_death(paused({"far": 1}), remove)
    table.add("a lost node is seen after", lost, 0.5, most=True, unit=" s")


@contextlib.contextmanager
def cluster() -> Iterator[Callable[[], None]]:
    """Two nodes, with all files of Ray in a folder that goes. Gives what removes the second one."""
    folder = tempfile.mkdtemp(prefix="rl-ray-")
    token = os.path.join(folder, "token")
    with open(token, "w") as file:
        file.write(os.urandom(32).hex())
    os.environ.update(RAY_TMPDIR=folder, RAY_AUTH_TOKEN_PATH=token, RAY_USAGE_STATS_ENABLED="0")
    import ray
    from ray.cluster_utils import Cluster

    options = {"object_store_memory": 80 << 20, "include_dashboard": False}
    both = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **options})
    try:
        second = both.add_node(num_cpus=2, resources={"far": WORKERS}, **options)
        ray.init(address=both.address, log_to_driver=False, logging_level=logging.ERROR)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield functools.partial(both.remove_node, second)
    finally:
        ray.shutdown()
        both.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="big,mid,small,faults", help="rows to measure, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rows = options.rows.split(",")
    with cluster() as remove:
        table = Table()
        for name in SIZES:
            if name in rows:
                compare(table, name, options.rounds)
        if "faults" in rows:
            faults(table, remove, max(options.rounds // 2, 1))
    return 1 if table.missed else 0


if __name__ == "__main__":
    sys.exit(main())
