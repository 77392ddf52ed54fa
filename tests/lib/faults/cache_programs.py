"""Random programs that use caches, with a model as the judge: `make stress KIND=cache-programs`.

A program makes several runs over one cache: other start methods, ranks, orders and datasets, ranks that are killed as
they fill the cache, and damage to the file between two runs. Required: every sample delivered is the dataset's own; a
dataset whose samples are not those in the file is refused, and no other; a file that is not a cache stays as it is;
with nothing lost or damaged, each sample is made once; the cache stays within its limit, and no rank waits for another.
"""

import copy
import multiprocessing.forkserver
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field

from support import rustloader, same

from .cache_data import Batches, Scans, as_list, in_a_list
from .trials import ONLY, arguments, drawn, quiet, run_all, status_of

# Seconds after which a rank counts as hung.
LIMIT = 120
LARGE = "64MiB"


@dataclass
class Run:
    """One run over the cache: `damage` happens before it, and its ranks share the indices."""

    dataset: int
    epochs: int
    share: float
    shuffled: bool
    opened_early: bool
    damage: str
    killed: bool
    ranks: int
    seed: int


@dataclass
class Trial:
    place: str
    method: str | None
    options: dict
    batches: bool
    then: bool
    length: int
    large: int
    empty: int
    memory: str
    runs: list[Run] = field(default_factory=list)

    @classmethod
    def random(cls, draws):
        place = draws.choice(["memory", "disk", "disk", "shm"])
        methods, weights = [None, "fork", "forkserver", "spawn"], [44, 47, 7, 2]
        method = draws.choices(methods, weights)[0]
        options = {}
        if method is not None:
            options = {"num_workers": draws.choice([1, 2]), "dispatch": draws.choice(["round_robin", "shared_queue"])}
            options["persistent_workers"] = draws.random() < 0.3
            options["worker_threads"] = draws.choice([None, None, 2])
        length = draws.choice([6, 40, 40, 150])
        return cls(
            place,
            method,
            options,
            batches=draws.random() < 0.3,
            then=draws.random() < 0.3,
            length=length,
            large=draws.choice([10, 300, 9000]),
            empty=draws.choice([0, 0, min(8, length - 1), length // 2]),
            memory=draws.choice([LARGE, LARGE, LARGE, "128KiB"]),
            runs=[cls._run(draws, place, at) for at in range(draws.choice([1, 2, 2, 3, 4]))],
        )

    @staticmethod
    def _run(draws, place, at):
        is_file = place != "memory"
        damages = ["none"] * 6 + (["bytes"] * 2 + ["cut", "zeros", "garbage", "version"] if is_file and at else [])
        return Run(
            dataset=draws.choice([0, 0, 1]) if is_file else 0,
            epochs=draws.choice([1, 1, 2]),
            share=draws.choice([1, 1, 0.5]),
            shuffled=draws.random() < 0.5,
            opened_early=draws.random() < 0.3,
            damage=draws.choice(damages),
            killed=draws.random() < 0.2,
            ranks=draws.choice([1, 1, 2, 3]),
            seed=draws.randrange(1 << 30),
        )

    # Running

    def run(self, folder):
        """Returns the problems found."""
        base = "/dev/shm" if self.place == "shm" else folder
        self.folder = tempfile.mkdtemp(prefix="rustloader-cache-", dir=base)
        try:
            self.path = None if self.place == "memory" else os.path.join(self.folder, "samples.cache")
            return self._run_all()
        finally:
            shutil.rmtree(self.folder)

    def dataset(self, salt):
        return (Batches if self.batches else Scans)(self.length, self.large, salt, self.empty)

    def open(self, salt, version="1"):
        then = in_a_list if self.then else None
        data = self.dataset(salt)
        if self.method is not None:
            data.main = os.getpid()
        return rustloader.cache(data, self.memory, then=then, path=self.path, version=version)

    def _run_all(self):
        model, wrong = Model(self), []
        shared = self.open(0) if self.path is None else None
        early = {at: self.open(run.dataset) for at, run in enumerate(self.runs) if self.path and run.opened_early}
        for at, run in enumerate(self.runs):
            if run.damage != "none" and os.path.exists(self.path or ""):
                if early:  # A handle that is open has checked its records before.
                    continue
                problems, is_over = self._damage(run, model)
                wrong += problems
                if is_over:
                    return wrong
            try:
                cached = shared or early.get(at) or self.open(run.dataset)
            except ValueError as error:
                return [*wrong, f"run {at}: the file is refused: {error}"]
            wrong += [f"run {at}: {problem}" for problem in self._play(run, cached, model)]
        return wrong

    def _play(self, run, cached, model):
        """Runs the ranks of one run. One rank that is not killed runs in this process."""
        orders = [self._order(run, rank) for rank in range(run.ranks)]
        before = cached.usage()
        if run.ranks == 1 and not run.killed:
            results = [self._epochs(run, cached, orders[0])]
        else:
            results = self._in_children(run, cached, orders)
        usage = cached.usage()
        wrong = []
        if usage.samples_bytes + usage.bytes_unused + usage.bytes_left > usage.limit or usage.limit > self.limit():
            wrong.append(f"the cache exceeds its limit: {usage}")
        if usage.damaged and not model.is_damaged:
            wrong.append(f"{usage.damaged} samples are damaged")
        return wrong + model.judge(run, orders, results, before, usage)

    def limit(self):
        return {LARGE: 64 << 20, "128KiB": 128 << 10}[self.memory]

    def _order(self, run, rank):
        order = list(range(rank, self.length, run.ranks))[: max(1, int(self.length * run.share / run.ranks))]
        if run.shuffled:
            random.Random(run.seed + rank).shuffle(order)
        return order

    def _epochs(self, run, cached, order):
        """Returns (problems, samples delivered, the refusal's text or None)."""
        wrong, delivered, pristine = [], 0, self.dataset(run.dataset)
        loader = rustloader.DataLoader(
            cached,
            batch_size=4,
            sampler=order,
            collate_fn=as_list,
            multiprocessing_context=self.method,
            timeout=LIMIT if self.method else 0,
            **self.options,
        )
        try:
            for epoch in range(run.epochs):
                samples = [sample for batch in loader for sample in batch]
                delivered += len(samples)
                expected = [pristine[index] for index in order]
                if self.then:
                    expected = [in_a_list(sample) for sample in copy.deepcopy(expected)]
                if len(samples) != len(expected):
                    wrong.append(f"{len(samples)} samples instead of {len(expected)}")
                wrong += [
                    f"epoch {epoch}: sample {index} is wrong"
                    for index, sample, right in zip(order, samples, expected, strict=False)
                    if not same(sample, right)
                ][:3]
        except ValueError as error:
            if "another dataset" not in str(error):
                raise
            return wrong, delivered, str(error)
        finally:
            del loader
        return wrong, delivered, None

    def _in_children(self, run, cached, orders):
        children = []
        for rank, order in enumerate(orders):
            reader, writer = os.pipe()
            if (pid := os.fork()) == 0:
                status = 1
                try:
                    os.close(reader)
                    own = cached
                    if self.method is not None:
                        cached.dataset.main = os.getpid()
                        # A fork server belongs to the process that has started it.
                        multiprocessing.forkserver._forkserver.__init__()
                    if rank and self.path is not None and not run.opened_early:
                        own = self.open(run.dataset)
                    os.write(writer, pickle.dumps(self._epochs(run, own, order)))
                    status = 0
                except BaseException:
                    os.write(2, traceback.format_exc().encode())
                finally:
                    os._exit(status)
            os.close(writer)
            children.append((pid, reader))
        if run.killed:
            time.sleep(random.Random(run.seed).choice([0, 0.002, 0.01, 0.05]))
            os.kill(children[0][0], signal.SIGKILL)
        return [self._result(pid, reader, run.killed and not at) for at, (pid, reader) in enumerate(children)]

    def _result(self, pid, reader, killed):
        status = status_of(pid, LIMIT)
        with open(reader, "rb") as file:
            report = file.read() if status == 0 else b""
        if status is None:
            return ["a rank hangs"], 0, None
        if report:
            return pickle.loads(report)
        return ([] if killed else [f"a rank ends with status {status}"]), None, None

    # Damage

    def _damage(self, run, model):
        """Returns the problems found, and whether the program ends here."""
        draws, size = random.Random(run.seed), os.path.getsize(self.path)
        if run.damage == "version":
            return self._refused(lambda: self.open(run.dataset, version="2"), "version"), False
        if run.damage in ("zeros", "garbage"):
            content = bytes(9000) if run.damage == "zeros" else draws.randbytes(draws.choice([1, 100, 9000]))
            os.unlink(self.path)
            with open(self.path, "wb") as file:
                file.write(content)
            return self._refused(lambda: self.open(run.dataset), ""), True
        overhead = 8192 + 8 * self.length
        if run.damage == "cut":
            # Half of the cuts are within the index.
            end = draws.choice([16384 + overhead, max(size, 16384 + overhead)])
            os.truncate(self.path, draws.randrange(8192, end))
        else:
            with open(self.path, "r+b") as file:
                for _ in range(draws.choice([1, 8, 200])):
                    # Most of the heap is empty, so most damage is done near its start.
                    file.seek(draws.randrange(16384 + overhead, min(size, 16384 + overhead + self._heap())))
                    file.write(draws.randbytes(draws.choice([1, 8, 300])))
        model.lose()
        return [], False

    def _heap(self):
        """Returns about how many bytes the records take."""
        return self.length * (64 + self.large * 2)

    def _refused(self, action, text):
        def content():
            with open(self.path, "rb") as file:
                return file.read(1 << 20)

        before = content()
        try:
            action()
        except ValueError as error:
            wrong = [] if text in str(error) and self.path in str(error) else [f"the error is unclear: {error}"]
        else:
            wrong = [f"a file is accepted after damage {text or 'of its header'}"]
        return wrong + ["a refused file is changed"] * (content() != before)


class Model:
    """Which datasets may have stored a row: {None} if none has."""

    def __init__(self, trial):
        self.trial = trial
        self.owners = [{None} for _ in range(trial.length)]
        self.is_damaged = False

    def lose(self):
        """Any record may be lost."""
        self.is_damaged = True
        for owners in self.owners:
            owners.add(None)

    def judge(self, run, orders, results, before, after):
        wrong = [problem for problems, _, _ in results for problem in problems]
        is_foreign = [row >= self.trial.empty and {1 - run.dataset} & owners for row, owners in enumerate(self.owners)]
        for order, (_, delivered, refusal) in zip(orders, results, strict=True):
            # What one rank finds, all ranks of its opening refuse.
            searched = orders if run.opened_early else [order]
            may = any(is_foreign[row] for rows in searched for row in rows)
            must = any(self.owners[row] == {1 - run.dataset} and row >= self.trial.empty for row in order)
            if refusal is not None and not may:
                wrong.append(f"a file of this dataset is refused: {refusal}")
            if refusal is None and must and delivered is not None:
                wrong.append("another dataset's samples are not noticed")
        whole = all(delivered is not None and refusal is None for _, delivered, refusal in results)
        if whole:
            wrong += self._counts(orders, run, results, before, after)
        is_certain = whole and self.trial.memory == LARGE
        for row in {row for order in orders for row in order}:
            owners = self.owners[row]
            if None in owners:
                owners.add(run.dataset)
                if is_certain:
                    owners.discard(None)
        return wrong

    def _counts(self, orders, run, results, before, after):
        reads = sum(delivered for _, delivered, _ in results)
        misses = after.lifetime_misses - before.lifetime_misses
        counted = after.lifetime_hits - before.lifetime_hits + misses
        wrong = [] if counted == reads else [f"{reads} reads, but the cache counts {counted}"]
        certain = all(None not in self.owners[row] for order in orders for row in order)
        if certain and misses:
            wrong.append(f"{misses} samples that are in the cache were made")
        if run.epochs == 2 and self.trial.memory == LARGE and len(orders) == 1:
            most = len(orders[0])
            if misses > most:
                wrong.append(f"{misses} misses in two epochs of {most} samples")
        return wrong


def main():
    args = arguments("cache_programs", __doc__, programs=(500, "the number of programs"), only=ONLY)
    quiet()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trials = drawn(Trial, args.programs, args)
        _, failed = run_all(trials, lambda trial, _: trial.run(folder), sep="\n  ")
    print(f"{args.programs} programs, {failed} wrong, {time.monotonic() - start:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
