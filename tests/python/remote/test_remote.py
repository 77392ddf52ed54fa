"""Workers over connections: their batches, errors, deaths and exits are those of local workers."""

import contextlib
import dataclasses
import gc
import os
import pickle
import random
import signal
import socket
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from remote_support import LoopbackContext, serve_file
from support import config_of, run_script, same
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import rustloader
from rustloader.auto import tuner
from rustloader.errors import WorkerDiedError
from rustloader.remote import handshake
from rustloader.remote.handshake import PROTOCOL
from rustloader.system.cleanup import forget_frames
from rustloader.tools.probe.side import Side
from rustloader.workers import group, remote


class Noisy(Dataset):
    """Samples that show the seeds of a worker, and its number."""

    def __init__(self, size=60, numel=40):
        self.size, self.numel = size, numel
        self.data = np.arange(size)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        info = get_worker_info()
        self.data[index] += 1  # writable, as in a local worker
        return {
            "x": torch.full((self.numel,), float(index)) + torch.rand(self.numel),
            "y": np.random.rand(3) + random.random(),
            "who": (index, info.id, info.num_workers, info.seed),
            "text": f"sample {index}",
        }


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for at in range(info.id, 31, info.num_workers):
            yield torch.tensor(at), torch.rand(2)


class FaultyAt13(Noisy):
    """Sample 13 fails, ends the process, cannot be sent to another machine, or never comes."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def __getitem__(self, index):
        if index == 13:
            match self.what:
                case "error":
                    raise KeyError("no sample 13")
                case "exit":
                    os._exit(7)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "leave":
                    raise SystemExit(7)
                case "pipe":
                    return os.dup(0), socket.socket()
                case "sleep":
                    time.sleep(1000)
        return torch.tensor(index)


def init(worker_id):
    random.seed(worker_id)


def epochs(dataset, context, count=2, **options):
    torch.manual_seed(5)
    loader = rustloader.DataLoader(
        dataset, batch_size=4, num_workers=2, multiprocessing_context=context, persistent_workers=True, **options
    )
    return [list(loader) for _ in range(count)]


def forget_workers(batches):
    """Removes the worker from batches, because it depends on which worker is free."""
    for batch in batches:
        del batch["who"]


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Noisy(), {}),
        (Noisy(), {"shuffle": True, "worker_init_fn": init, "prefetch_factor": 5}),
        (Noisy(), {"seed_by": "sample", "dispatch": "shared_queue", "reorder_window": 16}),
        (Noisy(), {"seed_by": "batch", "shuffle": True, "drop_last": True}),
        (Noisy(), {"seed_by": "sample", "in_order": False}),
        (Noisy(12, 500_000), {"timeout": 60}),
        (Stream(), {}),
    ],
)
def test_batches_are_those_of_local_workers(tmp_path, dataset, options):
    def run(context):
        both = epochs(dataset, context, **options)
        if "dispatch" in options or "in_order" in options:
            forget_workers(batch for batches in both for batch in batches)
        if not options.get("in_order", True):
            [batches.sort(key=lambda batch: batch["text"]) for batches in both]
        return both

    assert same(run(LoopbackContext(tmp_path)), run("fork"))


def test_an_error_of_the_dataset_has_the_same_text(tmp_path):
    texts = []
    for context in (LoopbackContext(tmp_path), "fork"):
        with pytest.raises(KeyError, match="no sample 13") as caught:
            epochs(FaultyAt13("error"), context)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


class Counting(IterableDataset):
    """Continues from its state, and counts the samples that this copy has read."""

    at, reads = 0, 0

    def __iter__(self):
        while self.at < 60:
            self.at += 1
            self.reads += 1
            yield self.at - 1, self.reads

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize(("saved", "resumed"), [("there", "there"), ("there", "here"), ("here", "there")])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dataset", [Noisy(), Counting()], ids=["map-style", "iterable"])
def test_an_epoch_is_resumed_by_workers_here_and_there(tmp_path, dataset, workers, saved, resumed):
    shuffles = {"shuffle": True, "seed_by": "sample"} if isinstance(dataset, Noisy) else {}

    def loader(where):
        torch.manual_seed(5)
        return rustloader.StatefulDataLoader(
            dataset,
            batch_size=4,
            num_workers=workers,
            multiprocessing_context=LoopbackContext(tmp_path) if where == "there" else "fork",
            **shuffles,
        )

    whole = list(loader("here"))
    first = loader(saved)
    iterator = iter(first)
    batches = [next(iterator) for _ in range(6)]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    del iterator
    second = loader(resumed)
    second.load_state_dict(state)
    batches += second
    if isinstance(dataset, Noisy):
        forget_workers([*batches, *whole])
    else:
        # The new process had read nothing before.
        assert batches[6][1].tolist() == [1, 2, 3, 4]
        batches, whole = ([indices for indices, _ in each] for each in (batches, whole))
    assert same(batches, whole)


def test_an_object_of_one_machine_is_an_error_in_its_place(tmp_path):
    with pytest.raises(RuntimeError, match="only processes on the same machine can share"):
        epochs(FaultyAt13("pipe"), LoopbackContext(tmp_path), collate_fn=list)


def test_a_death_names_the_worker_and_the_connection(tmp_path):
    with pytest.raises(WorkerDiedError, match="exited unexpectedly") as caught:
        epochs(FaultyAt13("exit"), LoopbackContext(tmp_path))
    notes = "\n".join(caught.value.__notes__)
    assert caught.value.worker_id == 1
    # Its finished batches may be lost with it; those of a local worker would count.
    assert "Worker 1 was assigned the batch with index" in notes
    # The kernel resets a connection if the end that is closed has not read everything.
    reasons = ("its process ended with exit code 7", "was closed", "Connection reset by peer")
    assert "It ran on another machine: " in notes and any(reason in notes for reason in reasons), notes


def test_a_worker_that_an_error_ends_is_named_with_what_the_cluster_says(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "STATUS_AFTER", 60.0)
    with pytest.raises(WorkerDiedError, match="exited unexpectedly") as caught:
        epochs(FaultyAt13("leave"), LoopbackContext(tmp_path))
    assert "It ran on another machine: its process ended with exit code 7" in caught.value.__notes__


def test_an_ordinary_end_has_no_reason(tmp_path, monkeypatch):
    # A slow worker would be killed.
    monkeypatch.setattr(group, "REMOTE_GRACE", 60.0)
    context = LoopbackContext(tmp_path)
    iterator = iter(rustloader.DataLoader(Noisy(), num_workers=2, multiprocessing_context=context))
    workers = list(iterator._workers)
    assert len(list(iterator)) == 60
    for worker, started in zip(workers, context.workers, strict=True):
        started.process.join(20)
        assert not worker.is_alive() and worker.end is None


@pytest.mark.warns
@pytest.mark.parametrize("how", ["kill", "exit"])
@pytest.mark.parametrize("dispatch", ["round_robin", "shared_queue"])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_sample_that_kills_three_workers_is_passed_over(tmp_path, on_error, dispatch, how):
    loader = rustloader.DataLoader(
        FaultyAt13(how),
        batch_size=4,
        num_workers=2,
        multiprocessing_context=LoopbackContext(tmp_path),
        on_error=on_error,
        dispatch=dispatch,
        max_restarts=3,
    )
    samples = torch.cat(list(loader)).tolist()
    expected = [at for at in range(60) if at != 13]
    if on_error == "replace":
        assert samples.pop(13) != 13
    assert samples == expected
    faults = rustloader.stats(loader).faults
    assert (faults.restarts, faults.skipped + faults.replaced) == (3, 1)


def dies_twice(path, call):
    """The first replacement ends before it connects, the second one in the handshake."""
    if call.generation == 0:
        return serve_file(path, call)
    mark = path.with_suffix(".starts")
    with open(mark, "a") as file:
        file.write("x")
    match len(mark.read_text()):
        case 1:
            raise SystemExit(3)
        case 2:
            handshake.connect(call.address, call.port, call.token, call.worker_id, os.getpid(), 1e9).close()
        case _:
            serve_file(path, call)


@pytest.mark.warns
@pytest.mark.parametrize("limit", [2, 3])
def test_a_replacement_that_ends_in_its_start_is_replaced(tmp_path, limit):
    (expected,) = epochs(Noisy(), "fork", 1, seed_by="sample")
    torch.manual_seed(5)
    context, batches = LoopbackContext(tmp_path, dies_twice), []
    options = {"seed_by": "sample", "max_restarts": limit}
    with contextlib.nullcontext() if limit == 3 else pytest.raises(WorkerDiedError) as caught:
        for batch in rustloader.DataLoader(
            Noisy(), batch_size=4, num_workers=2, multiprocessing_context=context, **options
        ):
            batches.append(batch)
            if len(batches) == 3:
                context.workers[0].process.kill()
    if limit == 3:
        assert same(batches, expected)
        assert len(context.calls) == len({call.token for call in context.calls}) == 5
    else:
        assert "could not be restarted: worker 0 of a DataLoader cannot start" in "\n".join(caught.value.__notes__)


@pytest.mark.warns
@pytest.mark.parametrize("dispatch", ["round_robin", "shared_queue"])
def test_a_stuck_worker_is_killed(tmp_path, caplog, dispatch):
    with pytest.raises(rustloader.WorkerStalledError):
        epochs(FaultyAt13("sleep"), LoopbackContext(tmp_path), stall_timeout=4.0, dispatch=dispatch, in_order=False)
    # It holds the next task as well.
    assert "; the batch has index [12, 13, 14, 15]. " in caplog.text
    assert "Stack unavailable: it runs on another machine." in caplog.text


class OneAtATime(LoopbackContext):
    """Has room for one worker."""

    def launch(self, blob, call):
        assert not any(worker.process.is_alive() for worker in self.workers)
        return super().launch(blob, call)


@pytest.mark.warns
def test_a_worker_that_is_stopped_ends_before_its_replacement_starts(tmp_path):
    context = OneAtATime(tmp_path)
    loader = rustloader.DataLoader(
        range(20), num_workers=1, multiprocessing_context=context, stall_timeout=4.0, max_restarts=1
    )
    numbers = []
    for batch in loader:
        numbers.append(int(batch))
        if len(numbers) == 3:
            os.kill(context.workers[0].process.pid, signal.SIGSTOP)
    assert numbers == [*range(20)]
    assert rustloader.stats(loader).faults.stalls == 1


class WithHelper(Noisy):
    """Starts a child process that outlives the worker."""

    def __init__(self, folder):
        super().__init__()
        self.file = folder / "helper"

    def __getitem__(self, index):
        if index == 13:
            helper = os.fork()
            if helper == 0:
                time.sleep(1000)
                os._exit(0)
            self.file.write_text(str(helper))
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


def test_a_child_of_the_dataset_does_not_hide_the_death_of_its_worker(tmp_path):
    dataset = WithHelper(tmp_path)
    try:
        with pytest.raises(WorkerDiedError):
            epochs(dataset, LoopbackContext(tmp_path))
    finally:
        os.kill(int(dataset.file.read_text()), signal.SIGKILL)


def test_the_memory_of_a_worker_elsewhere_is_unknown(tmp_path):
    loader = rustloader.DataLoader(
        Noisy(), num_workers=1, multiprocessing_context=LoopbackContext(tmp_path), persistent_workers=True
    )
    list(loader)
    [worker] = rustloader.stats(loader).workers
    # In this test, its process runs on this machine.
    assert worker.alive and os.path.exists(f"/proc/{worker.pid}")
    assert (worker.rss_bytes, worker.private_bytes) == (0, None)


@pytest.mark.parametrize("persistent", [False, True])
def test_pids_of_workers_elsewhere_are_no_pids_here(tmp_path, monkeypatch, persistent):
    asked = []
    monkeypatch.setattr(tuner, "private_bytes", asked.append)
    side = Side("loaders:make", "rustloader")
    side.send_note = lambda name, value: asked.append(value)
    side.loader = rustloader.DataLoader(
        Noisy(),
        num_workers="auto",
        multiprocessing_context=LoopbackContext(tmp_path),
        persistent_workers=persistent,
    )
    for _ in range(2):
        iterator = iter(side.loader)
        side.on_start(iterator)
        assert len(list(iterator)) == 60
    assert asked == []


@pytest.mark.parametrize("stopped", [False, True])
def test_a_worker_at_a_long_sample_ends_soon_after_the_loader(tmp_path, stopped, monkeypatch):
    context = LoopbackContext(tmp_path)
    iterator = iter(rustloader.DataLoader(FaultyAt13("sleep"), num_workers=2, multiprocessing_context=context))
    for _ in range(11):
        next(iterator)
    if stopped:
        for worker in context.workers:
            os.kill(worker.process.pid, signal.SIGSTOP)
    graces, end = [], group._end
    monkeypatch.setattr(group, "_end", lambda groups, *limits: (graces.append(limits), end(groups, *limits)))
    del iterator
    assert graces == [(group.REMOTE_GRACE, group.REMOTE_KILL_AFTER)]
    for worker in context.workers:
        worker.process.join(60)
        # The sample takes 1000 s.
        assert worker.process.exitcode is not None


# Starts


def fails(path, call):
    raise SystemExit(3)


def strange(path, call):
    """Strangers connect first: they do not delay the worker, and they learn nothing."""
    for first in (b"", b"GET / HTTP/1.1\r\n\r\n", b"rustload" + bytes(64), os.urandom(200)):
        with socket.create_connection((call.address, call.port)) as stranger:
            try:
                stranger.sendall(first)
                stranger.shutdown(socket.SHUT_WR)
                # A magic number and a nonce.
                assert len(stranger.recv(1000)) in (0, 40) and stranger.recv(1000) == b""
            except OSError:
                pass  # reset
    wrong = dataclasses.replace(call, token=bytes(32))
    with pytest.raises((handshake.HandshakeError, OSError)):
        remote.serve(path.read_bytes, wrong, 10.0)
    serve_file(path, call)


def silent_strangers(path, call):
    """Strangers keep their connections open and say nothing."""
    strangers = [socket.create_connection((call.address, call.port)) for _ in range(3)]
    serve_file(path, call)
    del strangers


def other_protocol(path, call):
    handshake.PROTOCOL += 98
    serve_file(path, call)


def other_version(path, call):
    handshake.versions = lambda: {"rustloader": "9.9.9", "Python": "3.11"}
    serve_file(path, call)


def silent(path, call):
    time.sleep(1000)


def test_a_silent_stranger_does_not_hold_a_start_up(tmp_path, monkeypatch):
    monkeypatch.setattr(handshake, "_HELLO_SECONDS", 1000.0)
    (batches,) = epochs(Noisy(), LoopbackContext(tmp_path, silent_strangers), 1)
    assert len(batches) == 15


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_an_address_may_be_one_of_ipv6(tmp_path):
    (batches,) = epochs(Noisy(), LoopbackContext(tmp_path, host="::1"), 1)
    assert len(batches) == 15


def test_a_stranger_is_no_worker(tmp_path):
    (batches,) = epochs(Noisy(), LoopbackContext(tmp_path, strange), 1)
    assert len(batches) == 15


@pytest.mark.parametrize(
    ("serve", "text", "seconds"),
    [
        (fails, "its process ended with exit code 3", 60.0),
        (other_version, "the versions differ: rustloader 9.9.9 there and", 60.0),
        (other_protocol, f"versions differ: protocol {PROTOCOL + 98} there and {PROTOCOL} here", 60.0),
        (silent, "it has not connected within the time limit of its start; it may be slow", 1.0),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path, serve, text, seconds):
    context = LoopbackContext(tmp_path, serve, seconds)
    with pytest.raises(RuntimeError, match="cannot start on another machine") as caught:
        epochs(Noisy(), context)
    assert text in str(caught.value)
    for worker in context.workers:
        worker.process.join(10)
        assert worker.process.exitcode is not None


class Unreadable(Noisy):
    def __setstate__(self, state):
        raise ImportError("no module named decoders")


def test_a_dataset_that_cannot_be_read_there_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="cannot read the dataset") as caught:
        epochs(Unreadable(), LoopbackContext(tmp_path))
    assert "no module named decoders" in str(caught.value)


def test_functions_keep_what_they_share_with_the_dataset(tmp_path):
    dataset = Noisy()
    (batches,) = epochs(dataset, LoopbackContext(tmp_path), 1, collate_fn=Sharing(dataset))
    assert all(all(batch) for batch in batches)


class Sharing:
    def __init__(self, dataset):
        self.dataset = dataset

    def __call__(self, samples):
        return [self.dataset is get_worker_info().dataset for _ in samples]


# The context


# torch's own iterator raises an AttributeError when it is deleted after a failed construction.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_only_the_engine_can_use_the_context(tmp_path):
    context = LoopbackContext(tmp_path)
    assert context.get_start_method() == "loopback"
    loader = torch.utils.data.DataLoader(Noisy(), num_workers=1, multiprocessing_context=context)
    with pytest.raises(RuntimeError, match=r"use rustloader\.DataLoader"):
        torch.utils.data.dataloader._MultiProcessingDataLoaderIter(loader)


def test_a_loader_that_falls_back_raises(tmp_path):
    class Replaced(torch.utils.data.IterDataPipe):
        def __iter__(self):
            yield 1

    loader = rustloader.DataLoader(Replaced(), num_workers=1, multiprocessing_context=LoopbackContext(tmp_path))
    with pytest.raises(RuntimeError, match="cannot serve it: its dataset is a DataPipe"):
        iter(loader)


def test_versions_that_matter_are_compared_and_builds_are_not():
    versions = handshake.versions()
    assert handshake.version_mismatch(versions | {"other": "1"}) is None
    assert "torch 1.0 there and" in handshake.version_mismatch(versions | {"torch": "1.0"})
    assert "NumPy unknown there" in handshake.version_mismatch({**versions, "NumPy": None} | {"NumPy": "unknown"})
    assert "+" not in versions["torch"]


def test_the_handler_of_ray_is_not_the_programs():
    def handler(number, frame):
        pass

    before = signal.getsignal(signal.SIGTERM)
    try:
        for module, expected in (("ray._private.worker", False), ("train", True), ("rayon", True)):
            handler.__module__ = module
            signal.signal(signal.SIGTERM, handler)
            assert group._handles_sigterm() is expected
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert group._handles_sigterm() is False
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_job_travels_without_what_the_blob_has(tmp_path):
    from rustloader.workers import arguments
    from rustloader.workers.bootstrap import Job

    context = LoopbackContext(tmp_path)
    job = Job(0, True, len, False, 1, init, config_of(num_workers=2), starts=[None, None])
    blob = remote.Blob(context, "dataset", job)
    dataset, shared = arguments.unmarked(pickle.loads(blob.reference.read_bytes()))
    assert (dataset, shared) == ("dataset", {"collate_fn": len, "init_fn": init, "config": job.config})
    sent = pickle.loads(blob.job_of(job, 1))
    assert (sent.collate_fn, sent.init_fn, sent.base_seed, sent.config) == (None, None, 1, None)


def test_an_error_that_only_tells_why_a_worker_ended_keeps_no_variable_of_its_callers():
    class Thing:
        pass

    def raises():
        error = KeyError("its own")
        raise error

    def reason():
        try:
            raises()
        except KeyError as error:
            forget_frames(error)
            return str(error)

    def caller():
        thing = Thing()
        assert reason() == "'its own'"
        return weakref.ref(thing)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


class Cores(Dataset):
    """Samples that show on how many cores their worker may run."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return len(os.sched_getaffinity(0))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="with one core, every affinity is the same")
def test_worker_affinity_does_not_apply_to_workers_elsewhere(tmp_path):
    cores = os.sched_getaffinity(0)
    with rustloader.installed(worker_affinity=[min(cores)]):
        (batches,) = epochs(Cores(), LoopbackContext(tmp_path), 1)
    assert torch.cat(batches).tolist() == [len(cores)] * 12


def slow_start_of_worker_0(worker_id):
    time.sleep(600 * (worker_id == 0))


def test_a_worker_that_starts_takes_no_task_of_a_shared_queue(tmp_path):
    loader = rustloader.DataLoader(
        Noisy(),
        batch_size=4,
        num_workers=2,
        dispatch="shared_queue",
        worker_init_fn=slow_start_of_worker_0,
        multiprocessing_context=LoopbackContext(tmp_path),
        timeout=60,
    )
    batches = list(loader)
    assert len(batches) == 15 and {int(number) for batch in batches for number in batch["who"][1]} == {1}


@pytest.mark.skipif(
    Path("/proc/sys/net/ipv4/ip_nonlocal_bind").read_text() != "0\n", reason="this machine binds to any address"
)
def test_an_address_that_others_translate_to_this_machine():
    with handshake.listen("192.0.2.1") as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_what_the_main_script_defines_travels_back_by_its_name():
    """cloudpickle sent it to the worker by value, so pickle does not find it there."""
    script = """
        import pickle, sys, types
        from rustloader.workers import by_name, by_value, serialize
        source = "class Error(Exception): pass\\nclass Outer:\\n    class Inner: pass\\ndef double(x): return 2 * x"
        by_name.use()
        here = types.ModuleType("main_script")
        exec(source, vars(here))
        values = here.Error(3), here.Outer.Inner(), here.double, here.Outer
        dumped = [by_value.dumps(values), serialize.dumps_alone(values), serialize.dumps(values)[0]]
        # Left to pickle: everything that it finds or reduces itself.
        import copyreg, functools, typing
        class Meta(type): pass
        class Registered(metaclass=Meta): pass
        copyreg.pickle(Meta, lambda cls: (str, ("registered",)))
        nameless = functools.cmp_to_key
        found = type(None), type(...), typing.Optional[int], Registered, nameless
        print(pickle.loads(by_value.dumps(found)) == (*found[:3], "registered", nameless))
        def outer():
            def local(): pass
            return local
        try:
            by_value.dumps(outer())
        except Exception as error:
            print(type(error).__name__)
        # The main process.
        sys.modules["main_script"] = here
        for each in dumped:
            error, inner, double, outer = pickle.loads(each)
            same = type(error) is here.Error, type(inner) is here.Outer.Inner, outer is here.Outer
            print(all(same), error.args, double(4))
        # In the usual way, now that the module exists.
        print(b"by_name" in by_value.dumps(values), b"by_name" in dumped[0])
    """
    status, out, err = run_script(script)
    assert status == 0, err
    failure = "AttributeError" if sys.version_info < (3, 14) else "PicklingError"
    assert out.splitlines() == ["True", failure, *["True (3,) 8"] * 3, "False True"]
