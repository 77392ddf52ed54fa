"""`python -m rustloader check`: what it compares, where it stops, what it prints, and that it leaves nothing behind."""

import os
import re
import signal
import textwrap
from pathlib import Path

import ending_commands
import pytest
from support import SOON, rustloader

pytestmark = [pytest.mark.ours, pytest.mark.timeout(600)]

if rustloader is not None:
    from forked_probes import fork_probes

    from rustloader.tools import cli
    from rustloader.tools.cli.check import _CheckProbe
    from rustloader.tools.probe import deaths

# Time limit of tests whose processes import torch, on a busy machine.
LONG = 400.0
# `--timeout`, except in tests of hangs.
PATIENT = "300"

# A file of shared memory that these loaders create. Each run of the tests has its own.
SHM = f"check-test-{os.getpid()}"

LOADERS = """
    import ctypes, multiprocessing.shared_memory, os, random, signal, sys, time
    import numpy as np
    import torch
    import rustloader
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    def on_us():
        return rustloader.system.torch_side.IterType.stand_in is not None

    class Draws(Dataset):
        def __init__(self, at=None, act=None):
            self.at, self.act = at, act
        def __len__(self):
            return 12
        def __getitem__(self, i):
            if i == self.at:
                self.act(i)
            sample = {"i": i, "x": torch.rand(3), "n": np.random.rand(2), "p": random.random()}
            if self.at is None and self.act is not None:
                self.act(i, sample)
            return sample

    def loader(at=None, act=None, **kw):
        return DataLoader(Draws(at, act), **{"batch_size": 4, "num_workers": 2} | kw)

    def hangs(i):
        open("working", "w").close()
        time.sleep(10000)

    def raises_object(i):
        raise KeyError(object())

    def raises(i):
        raise KeyError(f"no sample {i}")

    def shuffled():
        return loader(shuffle=True)
    def ours():
        return rustloader.DataLoader(Draws(), batch_size=4, shuffle=True, num_workers=1)
    def installing():
        rustloader.install()
        return loader()
    generator = torch.Generator()
    def with_state_of_the_module():
        return loader(shuffle=True, generator=generator)
    def sets():
        return DataLoader(range(3), num_workers=1, collate_fn=lambda x: list({"a", "b", "c", "d", "e", "f"}))
    class Odd:
        __slots__ = ("x",)
        def __init__(self, x):
            self.x = x
        def __eq__(self, other):
            raise TypeError("no comparison")
        __hash__ = None
    def odd():
        samples = [[Odd(i), float("nan"), torch.tensor([float("nan"), i])] for i in range(4)]
        return DataLoader(samples, batch_size=2, num_workers=1, collate_fn=list)
    class Count(IterableDataset):
        def __iter__(self):
            while True:
                yield 1
    def endless():
        return DataLoader(Count(), batch_size=2, num_workers=2)

    def failing():
        return loader(at=5, act=raises)
    def failing_with_an_address():
        return loader(at=5, act=raises_object)
    def failing_at_once():
        return loader(at=0, act=raises)
    def failing_worker_init():
        return loader(worker_init_fn=raises)
    def failing_on_us_at_once():
        return loader(at=0, act=lambda i: raises(i) if on_us() else None)
    def failing_otherwise():
        return loader(at=5, act=lambda i: raises(5 if on_us() else 6))
    def empty():
        return DataLoader([], num_workers=1)
    class Own(DataLoader):
        def __iter__(self):
            yield from range(3)
    def own():
        return Own(Draws(), num_workers=1)
    def stateful():
        return rustloader.StatefulDataLoader(Draws(), batch_size=4, num_workers=1)
    def iterated():
        persistent = rustloader.DataLoader(Draws(), batch_size=4, num_workers=1, persistent_workers=True)
        list(persistent)
        return persistent

    def change(i, sample):
        if i == 7 and on_us():
            sample["x"][1] = 5.0
    def seeded_by_sample():
        return rustloader.DataLoader(Draws(), batch_size=4, num_workers=2, seed_by="sample")
    def skipping():
        return rustloader.DataLoader(Draws(5, raises), batch_size=4, num_workers=2, on_error="skip")
    def different():
        return loader(act=change)
    def random_anyhow():
        return loader(act=lambda i, sample: sample.update(x=torch.tensor(list(os.urandom(8)))))
    def out_of_order():
        return loader(in_order=False, act=change)
    class Shorter:
        def __iter__(self):
            return iter(range(8 if on_us() else 12))
    class DrawsAtTheEnd:
        def __iter__(self):
            yield from range(12)
            if on_us():
                torch.rand(1)
    def random_state():
        return loader(sampler=DrawsAtTheEnd())
    def shorter():
        return loader(sampler=Shorter())
    def handed_over():
        def refused(*args, **kw):
            raise PermissionError(1, "Operation not permitted")
        rustloader.iterator.fallback.Engine = refused
        return loader()

    def exiting():
        return loader(at=5, act=lambda i: os._exit(3))
    def killed_on_us():
        return loader(at=5, act=lambda i: os.kill(os.getpid(), signal.SIGKILL) if on_us() else None)
    def dying_in_init():
        return loader(worker_init_fn=lambda i: os._exit(4))
    def unpicklable():
        return loader(collate_fn=lambda samples: lambda: samples, multiprocessing_context="fork")
    def hanging():
        return loader(at=5, act=hangs)
    def hangs_in_c(i):
        open("working", "w").close()
        ctypes.PyDLL(None).sleep(10000)
    def hanging_in_c_on_us():
        return loader(at=5, act=lambda i: hangs_in_c(i) if on_us() else None)
    def hanging_in_a_sampler():
        def sampler():
            yield from range(8)
            hangs(0)
        return loader(sampler=sampler(), prefetch_factor=1)
    def hanging_factory():
        hangs(0)
    def swallowing():
        open("working", "w").close()
        while True:
            try:
                time.sleep(1)
            except BaseException:
                pass
    def hanging_with_spawn():
        shared = multiprocessing.shared_memory.SharedMemory(create=True, size=100, name=os.environ["CHECK_TEST_SHM"])
        return loader(at=5, act=hangs, multiprocessing_context="spawn")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHECK_TEST_SHM", SHM)
    (tmp_path / "loaders_of_mine.py").write_text(textwrap.dedent(LOADERS))
    return tmp_path


@pytest.fixture
def check(folder, capfd, monkeypatch):
    """A function that runs the command on a loader and returns (exit status, stdout, stderr). By default, its processes
    are forks of this one."""

    def run(name, *arguments, timeout=PATIENT, fork=True):
        target = name if ":" in name else f"loaders_of_mine.py:{name}"
        with monkeypatch.context() as patch:
            if fork:
                fork_probes(patch)
            status = cli.main(["check", target, *arguments, "--timeout", timeout])
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return run


# Same


def assert_agree(status, out, err, batches=3):
    assert (status, err) == (0, "")
    assert out.splitlines()[-2:] == [
        f"same: {batches} batches compared, bit for bit; the main process's random state is also the same",
        f"{batches} batches came from the Rust engine",
    ]


@pytest.mark.parametrize("name", ["shuffled", "ours", "installing", "with_state_of_the_module", "odd"])
def test_loaders_that_agree(name, check):
    assert_agree(*check(name), batches=2 if name == "odd" else 3)


def test_both_sides_iterate_over_sets_in_one_order(check):
    """It depends on the seed of hashes, which each process gets from the command."""
    assert_agree(*check("sets", fork=False))


def test_a_part_of_an_endless_epoch_out_of_a_module(check, folder):
    (folder / "sub").mkdir()
    (folder / "loaders_of_mine.py").rename(folder / "sub" / "my-loaders.py")
    status, out, _ = check("sub/my-loaders.py:endless", "--batches", "1", "--seed", "7")
    assert status == 0 and out.endswith("\n1 batch came from the Rust engine\n")


@pytest.mark.parametrize(
    ("name", "error", "function"),
    [
        ("failing", "'no sample 5'", "raises"),
        ("failing_with_an_address", r"<object object at 0x\w+>", "raises_object"),
    ],
)
def test_errors_in_the_midst_are_listed(name, error, function, check):
    status, out, err = check(name)
    assert (status, err) == (0, "")
    where = rf"\(loaders_of_mine.py:\d+ in {function}, worker 1\)"
    assert re.search(rf"^batch 1: both raise KeyError: {error} {where}$", out, re.M)
    assert "same: 2 batches and 1 error compared, bit for bit" in out
    assert out.endswith("\n2 batches came from the Rust engine\n")


# Nothing to compare


@pytest.mark.parametrize(
    "name, cause",
    [
        ("failing_at_once", "at the first batch, both engines raise KeyError: 'no sample 0' (loaders_of_mine.py:"),
        ("failing_worker_init", "at the first batch, both engines raise KeyError: 'no sample 0' (loaders_of_mine.py:"),
        ("empty", "the loader of loaders_of_mine.py:empty yielded no batches"),
        ("own", "none of the batches came from the Rust engine; the loader has its own iterator"),
        ("stateful", "a rustloader.StatefulDataLoader has no torch iterator to compare with; let the factory return a"),
        ("iterated", "torch's side used the Rust engine; the factory must not iterate its loader, nor call "),
    ],
)
def test_nothing_to_compare(name, cause, check):
    status, out, err = check(name)
    assert status == 2 and "same" not in out
    assert err.startswith(f"rustloader check: nothing to compare: {cause}") and err.count(cause) == 1
    assert "Traceback" not in err
    if name == "failing_at_once":
        assert "\nOriginal Traceback (most recent call last):\n" in check(name, "--verbose")[2]


@pytest.mark.handover
def test_a_loader_that_is_handed_over_is_no_comparison(check):
    status, out, err = check("handed_over")
    assert status == 2 and "same" not in out
    assert err.startswith("rustloader check: nothing to compare: ") and err.count("Operation not permitted") == 1


# Different


@pytest.mark.parametrize(
    "name, expected",
    [
        ("different", r"different at batch 1: batch\['x'\] \(torch.Tensor float32 \[4, 3\]\): 1 of 12 elements differ"),
        ("random_anyhow", "different at batch 0, but two runs on torch's iterator differ there as well"),
        ("out_of_order", r"different at batch \d, but with in_order=False batches arrive as workers finish them; "),
        ("shorter", "different at batch 2: torch gives a batch, rustloader ends the epoch"),
        ("failing_on_us_at_once", "different at batch 0: torch gives a batch, rustloader raises KeyError: 'no sampl"),
        ("random_state", r"different at the end, in the main process's random state$"),
        ("failing_otherwise", r"different at batch 1: torch raises KeyError: 'no sample 6' \(loaders_of_mine.py:"),
    ],
)
def test_a_difference_is_named(name, expected, check):
    status, out, err = check(name)
    assert (status, err) == (1, "")
    assert re.match(expected, out.splitlines()[2]), out


@pytest.mark.parametrize("name, option, at", [("seeded_by_sample", "seed_by", 0), ("skipping", "on_error", 1)])
def test_an_option_that_may_explain_a_difference_is_named(name, option, at, check):
    status, out, err = check(name)
    assert (status, err) == (1, "")
    difference, advice = out.splitlines()[-2:]
    assert difference.startswith(f"different at batch {at}: ")
    assert advice == f"rustloader's options can change batches (here: {option}); check the loader without them."


# Deaths and hangs


@pytest.mark.parametrize(
    "name, expected",
    [
        ("exiting", r"torch: worker 1 \(pid \d+\) ended with exit code 3, detected while .* batch \d\n  its code"),
        ("dying_in_init", r"torch: (a worker|worker \d) \(pid \d+\) ended with exit code 4, detected .* batch 0\n"),
        ("killed_on_us", r"rustloader: worker 1 \(pid \d+\) was killed by SIGKILL, .* batch 1\n  the system may"),
    ],
)
def test_the_first_death_ends_it(name, expected, check):
    status, out, err = check(name)
    assert status == 2 and "same" not in out
    # Before it, a thread of torch's process may print that the worker has closed its connection.
    _, _, message = err.rpartition("rustloader check: ")
    assert re.match(expected, message), err
    assert message.count("\n") == 2


@pytest.mark.parametrize(
    "text, expected",
    [
        ("(pid 7) exited unexpectedly with exit code 3. Details", "a worker (pid 7) ended with exit code 3"),
        (f"(pid 7) is killed by signal: {signal.strsignal(9)}. ", "a worker (pid 7) was killed by SIGKILL"),
        ("(pid(s) 7, 8) exited unexpectedly", "DataLoader worker (pid(s) 7, 8) exited unexpectedly"),
    ],
)
def test_a_worker_that_no_iterator_knows_is_named_by_its_pid(text, expected):
    assert deaths.describe_death([], RuntimeError(f"DataLoader worker {text}")) == expected
    assert deaths.describe_death([], ValueError(f"DataLoader worker {text}")) is None


def test_a_batch_that_cannot_be_pickled_is_named_and_not_the_wait_for_it(check):
    status, out, err = check("unpicklable")
    assert status == 2 and "same" not in out and "Traceback" not in err
    assert re.match(
        r"rustloader check: with torch's iterator, a worker cannot send its batch: [\w.]+Error: Can't ", err
    ), err


@pytest.mark.parametrize(
    ("name", "batch", "text", "place"),
    [
        ("hanging_in_c_on_us", 1, "rustloader: batch 1 did not", r"worker 1 \(pid \d+\) is at loaders_of"),
        ("hanging_in_a_sampler", 0, "torch: batch 0 did not", r"the main process \(pid \d+\) is at .* in hangs\n"),
        ("hanging", 1, "torch: batch 1 did not arrive within 1 s", r"worker 1 \(pid \d+\) is at \S+:\d+ in hangs"),
        ("hanging_with_spawn", 1, "torch: batch 1 did not", ""),
        ("hanging_factory", 0, r"torch: calling \S+:hanging_factory took more than 1 s", "the main process"),
    ],
)
def test_a_hang_is_named_and_ended(name, batch, text, place, check, monkeypatch):
    def limit(self, awaited, limit=_CheckProbe.limit):
        """The time limit holds from the hang on: what comes before it is slow on a busy machine."""
        hangs = self._batch == batch and Path("working").exists()
        return limit(self, awaited) if hangs else 300.0

    monkeypatch.setattr(_CheckProbe, "limit", limit)
    monkeypatch.setattr(deaths, "_STACK_SECONDS", SOON)
    is_real = name in ("hanging", "hanging_with_spawn")
    status, out, err = check(name, timeout="1", fork=not is_real)
    assert status == 2 and "same" not in out
    # In forks, the stack of each process has frames of this file.
    others = "" if is_real else r"(  \w.*\n)*?"
    assert re.match(rf"rustloader check: {text}.*\n{others}  {place}", err), err
    assert err.endswith("\n  if it is slow rather than stuck, pass a larger --timeout\n")
    assert SHM not in os.listdir("/dev/shm")


@pytest.mark.timeout(2 * LONG)
@pytest.mark.parametrize(
    "target, number",
    [
        *(("hanging", number) for number in ending_commands.ENDS),
        ("hanging_factory", signal.SIGINT),
        ("swallowing", signal.SIGKILL),
    ],
)
def test_an_end_leaves_nothing(target, number, folder):
    ending_commands.end(["check", f"loaders_of_mine.py:{target}", "--timeout", PATIENT], number)
