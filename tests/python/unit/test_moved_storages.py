"""Views of a delivered tensor keep their bytes when torch moves the tensor's storage to other memory (T5)."""

import gc
import pickle
import threading
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch.multiprocessing
from support import DataLoader, is_leased, run_script
from torch.utils.data import Dataset

SIZES = [100, 10_000, 250_000]  # numbers of float32: inline, in a block, in a large block


class Rows(Dataset):
    """Row i is `size` times i."""

    def __init__(self, size, count=24):
        self.size, self.count = size, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.full((self.size,), float(i))


def by_queue(tensor):
    """A thread of the queue pickles the tensor, which moves its storage."""
    queue = torch.multiprocessing.get_context("spawn").Queue()
    queue.put(tensor)
    assert torch.equal(queue.get(), tensor)
    queue.close()
    queue.join_thread()
    resource_sharer.stop()


def by_pipe(tensor):
    assert torch.equal(pickle.loads(ForkingPickler.dumps(tensor)), tensor)
    resource_sharer.stop()


MOVES = {
    "share_memory_": torch.Tensor.share_memory_,
    "a queue": by_queue,
    "a pipe": by_pipe,
    "a storage": lambda tensor: tensor.untyped_storage().share_memory_(),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False).share_memory_(),
}
VIEWS = {
    "numpy": torch.Tensor.numpy,
    "a slice": lambda tensor: tensor[:, 1:].numpy(),
    "memoryview": lambda tensor: memoryview(tensor.numpy()),
    "dlpack": np.from_dlpack,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("size", SIZES)
def test_a_view_outlives_the_move_of_its_tensor(size, move):
    loader = DataLoader(Rows(size), batch_size=2, num_workers=2)
    views = {name: [] for name in VIEWS}
    for k, batch in enumerate(loader):
        name = list(VIEWS)[k % len(VIEWS)]
        views[name].append((2 * k, VIEWS[name](batch)))
        address = batch.data_ptr()
        move(batch)
        assert batch.data_ptr() != address
        assert batch.is_shared()
        del batch
        gc.collect()
    # Other batches reuse the memory that is free.
    for other in loader:
        other.fill_(-1)
    for name, kept in views.items():
        assert len(kept) == 3, name
        for first, view in kept:
            rows = np.asarray(view)
            assert np.array_equal(rows, np.broadcast_to([[first], [first + 1]], rows.shape)), name


def test_a_view_outlives_the_move_to_a_named_file():
    """This needs its own process: torch leaves a process behind that manages the files."""
    run = run_script(
        """
        import numpy as np
        import torch
        from sample_data import Images
        torch.multiprocessing.set_sharing_strategy("file_system")
        views = []
        loader = DataLoader(Images(24, (3, 60, 60)), batch_size=2, num_workers=2)
        for batch, _ in loader:
            views.append((batch.numpy(), batch.numpy().copy()))
            batch.share_memory_()
            del batch
        for batch, _ in loader:
            batch.fill_(7)
        assert all(np.array_equal(view, copy) for view, copy in views)
        """
    )
    assert run == (0, "", "")


def test_the_memory_goes_with_the_last_view():
    iterator = iter(DataLoader(Rows(250_000), batch_size=1, num_workers=1))
    batch = next(iterator)
    assert is_leased(batch)
    view = batch.numpy()
    tensor = torch.from_numpy(view)
    assert is_leased(tensor)
    batch.share_memory_()
    storage = batch.untyped_storage()
    assert is_leased(tensor)
    assert hasattr(storage, "_rustloader_memory")
    del storage, batch, view, tensor
    gc.collect()
    # The next batches reuse the memory.
    seen = {batch.data_ptr() for batch in iterator}
    assert len(seen) < 8


def test_a_storage_that_is_not_the_loaders_keeps_nothing():
    list(DataLoader(Rows(100), num_workers=1))
    tensor = torch.arange(1000)
    tensor.share_memory_()
    assert not hasattr(tensor.untyped_storage(), "_rustloader_memory")
    assert tensor.share_memory_() is tensor
    assert torch.equal(tensor, torch.arange(1000))


def test_an_error_or_interrupt_of_the_move_is_raised_and_the_memory_kept(monkeypatch):
    """A signal handler may raise after torch has moved the storage."""
    from rustloader.system import moved_storages

    (batch,) = DataLoader(Rows(250_000, 1), num_workers=1)
    view = batch.numpy()
    original = torch.UntypedStorage._share_fd_cpu_.__wrapped__

    def interrupted(storage, *args, **kwargs):
        original(storage, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", moved_storages._watched(interrupted))
    with pytest.raises(KeyboardInterrupt):
        batch.share_memory_()
    monkeypatch.undo()
    assert batch.is_shared()
    del batch
    for other in DataLoader(Rows(250_000), num_workers=1):
        other.fill_(-1)
    assert np.all(view == 0)


def test_what_cannot_be_moved_has_torchs_error():
    list(DataLoader(Rows(100, 2), num_workers=1))
    storage = torch.empty(4, device="meta").untyped_storage()
    function = torch.UntypedStorage._share_fd_cpu_
    texts = []
    for move in function.__wrapped__, function:
        with pytest.raises(RuntimeError) as caught:
            move(storage)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


class Moving(Dataset):
    """Another thread of the worker moves each sample while the worker sends it."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        sample = [torch.full((1 << 20,), float(i)) for _ in range(4)]
        threading.Thread(target=lambda: [tensor.share_memory_() for tensor in sample], daemon=True).start()
        return sample


@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_sample_that_another_thread_moves_arrives_whole(batch_size):
    for i, sample in enumerate(DataLoader(Moving(), batch_size=batch_size, num_workers=2)):
        assert all(torch.all(tensor == i) for tensor in sample)
