"""Users' reducers are honored, and what they send may need its worker until it is unpickled (P25, T27)."""

import contextlib
import copyreg
import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing.reduction import DupFd, ForkingPickler

import numpy as np
import pytest
import torch
from sample_data import Given, Labelled, Record, untouched
from support import DataLoader, epoch, gone, open_files, outcomes, run_script, send, wait_until, worker_pids
from torch.multiprocessing import reductions
from torch.utils.data import Dataset, IterableDataset, get_worker_info

REDUCERS = ForkingPickler._extra_reducers


@contextlib.contextmanager
def registered(kind, reducer):
    before = REDUCERS.get(kind)
    ForkingPickler.register(kind, reducer)
    try:
        yield
    finally:
        del REDUCERS[kind]
        if before is not None:
            ForkingPickler.register(kind, before)


# Reducers and their owners


def as_text(obj):
    return str, (f"reduced {obj.sum().item()}",)


KINDS = {
    torch.Tensor: lambda n: torch.ones(n),
    torch.nn.Parameter: lambda n: torch.nn.Parameter(torch.ones(n)),
    Labelled: lambda n: torch.ones(n).as_subclass(Labelled),
    np.ndarray: lambda n: np.ones(n),
}


@pytest.mark.parametrize("n", [3, 100_000])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_p25_reducers_that_users_registered_are_honored(kind, n):
    sample = KINDS[kind](n)
    with registered(kind, as_text):
        got = send(sample, [sample, 1], {"a": (sample,)}, Record("r", sample))
        (others,) = send([torch.ones(50_000, dtype=torch.int64), {1}, torch.ones(2, requires_grad=True)])
    text = f"reduced {float(n)}"
    assert got == [text, [text, 1], {"a": (text,)}, Record("r", text)]
    assert type(send(sample)[0]) is kind
    if kind is not torch.Tensor:  # other types are sent as before
        assert torch.equal(others[0], torch.ones(50_000, dtype=torch.int64)) and others[2].requires_grad


def register_in_worker(worker_id):
    ForkingPickler.register(torch.Tensor, as_text)


@pytest.mark.forks
def test_p25_reducers_may_be_registered_in_copyregs_table_or_in_a_worker():
    copyreg.pickle(np.ndarray, as_text)
    try:
        assert send([np.ones(2)], {"x": np.ones(50_000)}) == [["reduced 2.0"], {"x": "reduced 50000.0"}]
    finally:
        del copyreg.dispatch_table[np.ndarray]
    assert send([torch.ones(4)], worker_init_fn=register_in_worker) == [["reduced 4.0"]]
    assert REDUCERS[torch.Tensor] is reductions.reduce_tensor
    with registered(torch.Tensor, as_text):  # the batch that default_collate returns
        assert epoch(DataLoader([torch.ones(5000)] * 4, batch_size=2, num_workers=1)) == ["reduced 10000.0"] * 2


def bytes_as_text(storage):
    return bytes_to_storage, (bytes(storage.tolist()).hex(),)


def bytes_to_storage(text):
    return torch.UntypedStorage(list(bytes.fromhex(text))[::-1])


@pytest.mark.parametrize("wrap", [list, lambda tensors: Record("r", tensors)], ids=["plain", "pickled"])
def test_p25_a_reducer_of_storages_is_honored(wrap):
    sent = [torch.arange(4, dtype=torch.uint8), torch.nn.Parameter(torch.tensor([1, 2], dtype=torch.uint8), False)]
    with registered(torch.UntypedStorage, bytes_as_text):
        (got,) = send(wrap(sent))
    got = got if isinstance(got, list) else got.data
    assert [t.tolist() for t in got] == [[3, 2, 1, 0], [2, 1]] and type(got[1]) is torch.nn.Parameter


# Descriptors


class OpenFile:
    """An open file, which the user's own reducer sends. Dropping it closes it."""

    def __init__(self, fd):
        self.fd = fd

    def __del__(self):
        os.close(self.fd)

    def read(self):
        return os.read(self.fd, 100)


def reduce_file(file):
    return rebuild_file, (DupFd(file.fd),)


def rebuild_file(fd):
    return OpenFile(fd.detach())


class SelfReducing(OpenFile):
    """The same, without a registered reducer."""

    def __reduce__(self):
        return rebuild_file, (DupFd(self.fd),)


def pipe(text):
    reading, writing = os.pipe()
    os.write(writing, text)
    os.close(writing)
    return reading


def connection(text):
    receiving, sending = multiprocessing.Pipe()
    sending.send_bytes(text)
    return receiving


def socket_pair(text):
    receiving, sending = socket.socketpair()
    sending.sendall(text)
    sending.close()
    return receiving


def read_connection(receiving):
    with receiving:
        return receiving.recv_bytes()


def read_socket(receiving):
    with receiving:
        return receiving.recv(100)


def tensor_of(text):
    return torch.tensor(list(text), dtype=torch.uint8)


def read_tensor(tensor):
    return bytes(tensor.tolist())


def reduce_storage(storage):
    return reductions.reduce_storage(storage)


# Functions that create a sample, and functions that read it.
CARRIERS = {
    "user's reducer": (lambda text: OpenFile(pipe(text)), OpenFile.read),
    "own __reduce__": (lambda text: SelfReducing(pipe(text)), OpenFile.read),
    "connection": (connection, read_connection),
    "socket": (socket_pair, read_socket),
    "tensor": (tensor_of, read_tensor),
}
CARRIER = pytest.mark.parametrize("carrier", CARRIERS)


@pytest.fixture
def reducers_with_descriptors():
    with registered(OpenFile, reduce_file), registered(torch.UntypedStorage, reduce_storage):
        yield


class OneLeavesEarly(IterableDataset):
    """Worker 0 yields `n` samples and is exhausted; worker 1 yields one, after worker 0's process has ended."""

    def __init__(self, make, n, note):
        self.make, self.n, self.note = make, n, note

    def pid(self):
        return int(self.note.read_text()) if self.note.exists() else None

    def left(self):
        return self.pid() is not None and gone(self.pid())

    def __iter__(self):
        if get_worker_info().id == 0:
            for i in range(self.n):
                yield [i, self.make(b"text %d" % i)]
            self.note.with_suffix(".part").write_text(str(os.getpid()))
            self.note.with_suffix(".part").rename(self.note)
        else:
            yield wait_until(self.left)


@CARRIER
@pytest.mark.parametrize("n, in_order", [(2, True), (20, True), (5, False)])
@pytest.mark.forks
def test_t27_descriptors_outlive_their_worker(carrier, n, in_order, reducers_with_descriptors, tmp_path):
    make, read = CARRIERS[carrier]
    dataset = OneLeavesEarly(make, n, tmp_path / "pid")
    options = {"batch_size": None, "prefetch_factor": n + 1, "collate_fn": untouched, "in_order": in_order}
    got = list(DataLoader(dataset, num_workers=2, **options))
    assert not in_order or got[1] is True
    got.remove(True)  # worker 0 has left before the others are opened
    assert [(i, read(carried)) for i, carried in sorted(got)] == [(i, b"text %d" % i) for i in range(n)]
    assert not in_order or [i for i, _ in got] == list(range(n))


class Files(Dataset):
    """Sample i is (an open file, how many descriptors the worker has)."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return i, SelfReducing(pipe(b"%d" % i)), len(open_files())


def test_t27_epochs_that_were_broken_off_leave_no_descriptor_in_the_worker():
    loader = DataLoader(
        Files(), num_workers=1, batch_size=None, prefetch_factor=4, persistent_workers=True, collate_fn=untouched
    )
    counts = []
    for _ in range(15):
        iterator = iter(loader)
        for i in range(2):
            number, file, count = next(iterator)
            assert number == i and file.read() == b"%d" % i
            counts.append(count)
    # The descriptors of outstanding tasks, and those that sending them takes.
    assert max(counts) < min(counts) + 10, counts


class Dies(Dataset):
    """The worker sends a descriptor and is killed at the next sample."""

    def __len__(self):
        return 2

    def __getitem__(self, i):
        if i == 0:
            return SelfReducing(pipe(b"text"))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ours
def test_t27_descriptors_of_a_worker_that_was_killed_are_an_error_and_no_hang():
    iterator = iter(DataLoader(Dies(), num_workers=1, batch_size=None, collate_fn=untouched))
    assert wait_until(lambda: gone(worker_pids(iterator)[0]))
    (first, kind, _), (second, *_, text) = outcomes(iterator, 2)
    # EOFError if it was killed while it handed over the descriptor.
    assert first == second == "error" and issubclass(kind, OSError | EOFError) and "is killed by signal" in text


class Special:
    """Has a user's reducer, which needs nothing from its process."""


# Errors that opening a sample raises: once, and each time.
FAILURES = {}
LASTING = {}


def rebuild_special(i):
    if i in FAILURES:
        raise FAILURES.pop(i)
    if i in LASTING:
        raise LASTING[i]
    return i


def reduce_special(special):
    return rebuild_special, (special.i,)


def specials(n):
    samples = [Special() for _ in range(n)]
    for i, special in enumerate(samples):
        special.i = i
    return DataLoader(Given(samples), num_workers=2, batch_size=None, collate_fn=untouched, prefetch_factor=5)


@pytest.mark.forks
@pytest.mark.ours
def test_an_interrupt_while_a_result_is_opened_loses_no_batch():
    FAILURES.update({i: KeyboardInterrupt() for i in (0, 3, 8)})
    got, interrupts = [], 0
    with registered(Special, reduce_special):
        iterator = iter(specials(10))
        while len(got) < 10:
            try:
                got.append(next(iterator))
            except KeyboardInterrupt:
                interrupts += 1
        assert list(iterator) == []
    assert got == list(range(10)) and interrupts == 3


@pytest.mark.forks
@pytest.mark.ours
def test_an_error_while_a_result_is_opened_stands_in_its_batchs_place(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "LASTING", {2: ValueError("two"), 5: OSError("five")})
    with registered(Special, reduce_special):
        got = outcomes(iter(specials(7)), 8)
    assert got.pop(5)[1] is OSError and got.pop(2) == ("error", ValueError, "two")
    assert got == [("value", i) for i in (0, 1, 3, 4, 6)] + [("end",)]


# Memory of a device


class OnDevice(Dataset):
    """Sample i is a tensor in the memory of a device."""

    def __init__(self, device):
        self.device = device

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.full((1000, 30), float(i), device=self.device)


def through_spawned_workers(device):
    """This needs its own process: what CUDA starts does not end before it."""
    for batching in (dict(batch_size=2), dict(batch_size=None, collate_fn=untouched)):
        loader = DataLoader(
            OnDevice(device), num_workers=1, multiprocessing_context="spawn", persistent_workers=True, **batching
        )
        for _ in range(2):
            got = []
            for batch in loader:
                assert batch.device.type == device
                got.append(batch.cpu().reshape(-1, 1000, 30))
                del batch
            assert torch.equal(torch.cat(got), torch.arange(6.0).reshape(6, 1, 1).expand(6, 1000, 30))
        loader._iterator._shutdown_workers()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_p25_cuda_tensors_come_from_spawned_workers():
    source = "from test_transport_reducers import through_spawned_workers as run; run('cuda'); print('done')"
    status, out, err = run_script(source, 85)
    assert (status, out) == (0, "done\n"), err
