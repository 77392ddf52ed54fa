"""Compares workers as Ray actors with local workers and a bare connection: `make compare KIND=ray`.

The cluster has two nodes on this machine. Each side has two persistent workers with two outstanding batches each. All
sides take turns; a ratio is the median of the rounds' ratios. `bare` means two processes that send the same bytes over
TCP, and this process, which receives them into memory that it reuses: no dataset, no order, no batches.

big    64 images of 3x224x224 uint8, 9.6 MB      mid    one image, 150 KB      small  1 KB
"""

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
from harness.program import Program, missed

import rustloader
import rustloader.ray
from rustloader.tools.harness.rounds import Rounds, interleave, spread


class Size(NamedTuple):
    """A size of batches: samples per batch, the shape of a sample, and batches per epoch."""

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


class Ready(torch.utils.data.Dataset):
    """A dataset whose samples are ready; each access sleeps for ``pause`` seconds."""

    def __init__(self, size: Size, pause: float = 0.0):
        self.length, self.pause = size.samples * size.batches, pause
        self.sample = torch.arange(torch.Size(size.shape).numel()).to(torch.uint8).reshape(size.shape)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.pause:
            time.sleep(self.pause)
        return self.sample


def timed(batches: int, work: Callable[[], object]) -> dict[str, float]:
    """Returns the batches per second, and this process's CPU time per batch in seconds."""
    cpu, start = time.process_time(), time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return {"rate": batches / seconds, "cpu": (time.process_time() - cpu) / batches}


def loader(kind: Any, size: Size, context: Any = None, **options: Any) -> Any:
    return kind(
        Ready(size),
        batch_size=size.samples,
        num_workers=WORKERS,
        persistent_workers=True,
        multiprocessing_context=context,
        **options,
    )


def epoch(batches: Any) -> None:
    for _ in batches:
        pass


def send(port: int, size: int, count: int) -> None:
    """Sends ``count`` messages of ``size`` bytes over a bare connection."""
    data = bytes(size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.recv(1)
        for _ in range(count):
            connection.sendall(data)


def bare(size: Size) -> dict[str, float]:
    """Returns the rate and the CPU time of bare connections that carry the same bytes as an epoch."""
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
            figures = timed(count * WORKERS, receive)
        for sender in senders:
            sender.join()
    return figures


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """Runs a thread in this process that computes in Python."""
    is_done = False

    def spin() -> None:
        while not is_done:
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        is_done = True
        thread.join()


def rates(name: str) -> Rounds:
    """Returns the rates and CPU times of all sides, by round."""
    size, ours = SIZES[name], rustloader.DataLoader
    loaders = {
        "torch": loader(torch.utils.data.DataLoader, size),
        "local": loader(ours, size),
        "ray": loader(ours, size, rustloader.ray.RayContext()),
    }
    for side in loaders.values():
        epoch(side)

    def with_busy_thread(side: str) -> dict[str, float]:
        with busy_thread():
            return timed(size.batches, lambda: epoch(loaders[side]))

    sides = {side: lambda it=it: timed(size.batches, lambda: epoch(it)) for side, it in loaders.items()}
    # torch's loader is left out, because it takes 5 ms or more per batch next to a busy thread.
    busy = {f"{side}, busy": lambda side=side: with_busy_thread(side) for side in ("ray", "local")}
    return program.interleave(sides, name, references={"bare": lambda: bare(size)} | busy)


def paused(resources: dict[str, float] | None = None, **options: Any) -> Any:
    """Returns an iterator after four batches. Its workers take 10 ms per batch."""
    context = rustloader.ray.RayContext(resources=resources)
    dataset = Ready(Size(1, (1024,), 100_000), pause=0.01)
    iterator = iter(rustloader.DataLoader(dataset, num_workers=WORKERS, multiprocessing_context=context, **options))
    for _ in range(4):
        next(iterator)
    return iterator


def until_death(iterator: Any, end: Callable[[], None]) -> float:
    """Returns the seconds from the call of ``end``, which kills a worker or its node, to the loader's error."""
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
    """Returns the seconds until all processes have exited."""
    start = time.perf_counter()
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.005)
    return time.perf_counter() - start


def after_loader() -> float:
    """Returns the seconds from `del` of an iterator, whose workers are busy for 60 s, to the exit of its actors."""
    context = rustloader.ray.RayContext()
    dataset = Ready(Size(1, (1024,), 100), pause=60)
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
    """Returns the seconds from the SIGKILL of a program to the exit of its actors."""
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
    """Returns the seconds that a restart takes, and the seconds to start a bare actor with the same imports."""
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


def add(
    row: str, what: str, values: list[float], goal: float | None = None, is_limit: bool = False, unit: str = "x"
) -> None:
    """Prints a line with the values of all rounds and the goal: a maximum if ``is_limit``, otherwise a minimum."""
    median = statistics.median(values)
    held = None if goal is None else median <= goal if is_limit else median >= goal
    text = "" if goal is None else f"{'<=' if is_limit else '>='} {goal}{unit}"
    program.line(row, what, spread(values, f"{{:.3g}}{unit}".format), text, missed(held), held=held, found=values)


def compare(name: str) -> None:
    size, rounds = SIZES[name], rates(name)
    for side in rounds:
        rate, cpu = rounds.median(side, "rate"), rounds.median(side, "cpu")
        what = f"{name}: {side}, {rate * size.bytes / 1e6:,.0f} MB/s, {cpu * 1e6:,.0f} us CPU per batch"
        add(name, what, rounds.of(side, "rate"), unit="/s")
    for what, one, other, figure, goals in RATIOS:
        if name in goals:
            add(name, f"{name}: {what}", rounds.ratios(one, other, figure), goals[name], is_limit=figure == "cpu")


# What is compared, its two sides, the measurement, and the goal for each row.
RATIOS: list[tuple[str, str, str, str, dict[str, float | None]]] = [
    ("rate / rate of a bare connection", "ray", "bare", "rate", {"big": 0.85}),
    ("rate / rate of local workers", "ray", "local", "rate", {"mid": 0.9, "small": 0.7}),
    ("rate / rate of torch's local workers", "ray", "torch", "rate", {"big": 1.2, "mid": 5, "small": 5}),
    ("CPU per batch / that of a bare connection", "ray", "bare", "cpu", {"big": 1.2}),
    ("CPU per batch / that of local workers", "ray", "local", "cpu", {"small": 2}),
    ("rate next to a busy thread / rate without one", "ray, busy", "ray", "rate", dict.fromkeys(SIZES, 0.8)),
    ("the same, local workers", "local, busy", "local", "rate", dict.fromkeys(SIZES)),
]


def killed() -> float:
    iterator = paused()
    return until_death(iterator, functools.partial(os.kill, iterator._workers[0].pid, signal.SIGKILL))


def faults(remove: Callable[[], None]) -> None:
    """Measures deaths and restarts. Finally calls ``remove``, which removes the second node."""
    sides = {"killed": killed, "restart": restart, "loader": after_loader, "driver": after_driver}
    rounds = interleave(sides, max(program.options.rounds // 2, 1), "faults")
    whole, alone = ([it[k] for it in rounds["restart"]] for k in (0, 1))
    add("faults", "from the kill of an actor to the error", rounds["killed"], 0.1, is_limit=True, unit=" s")
    add("faults", "a restart", whole, unit=" s")
    add("faults", "the start of a bare actor with the same imports", alone, unit=" s")
    own = [max(restarted - actor, 0.0) for restarted, actor in rounds["restart"]]
    add("faults", "a restart, less the bare actor", own, 0.2, is_limit=True, unit=" s")
    add("faults", "from `del` of the iterator to its actors' exit", rounds["loader"], 2, is_limit=True, unit=" s")
    add("faults", "from the kill of the program to its actors' exit", rounds["driver"], 2, is_limit=True, unit=" s")
    # If only the raylet exited, its actors would continue, because their machine still exists.
    lost = until_death(paused({"far": 1}), remove)
    add("faults", "from the loss of a node to the error", [lost], 0.5, is_limit=True, unit=" s")


@contextlib.contextmanager
def cluster() -> Iterator[Callable[[], None]]:
    """Starts two nodes, with all files of Ray in a temporary folder. Yields a function that removes the second node."""
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


program = Program(__doc__, [*SIZES, "faults"], rounds=7)

if __name__ == "__main__":
    program.parse()
    with cluster() as remove:
        status = program.run(
            lambda row: faults(remove) if row == "faults" else compare(row), ["what", "measured", "goal", ""]
        )
    sys.exit(status)
