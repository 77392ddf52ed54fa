"""Batches live as long as something refers to them, and no longer (T5, T19, T22)."""

import collections
import gc
import os

import pytest
import torch
from sample_data import Images
from support import (
    DataLoader,
    arena_bytes,
    digest,
    epoch,
    gone,
    is_leased,
    mappings,
    run_script,
    trim_pool,
    worker_pids,
)
from torch.utils.data import DataLoader as _TorchDataLoader
from torch.utils.data import default_collate

MB = 1 << 20


def are_intact(images, dataset, batch_size):
    """True if every kept batch has the bytes that the dataset produces for it."""
    for k, x in enumerate(images):
        for j, row in enumerate(x):
            if not torch.equal(row, dataset.image(k * batch_size + j)):
                return False
    return True


def last_images(loader):
    """The images of an epoch's last batch."""
    return collections.deque(loader, maxlen=1)[0][0]


@pytest.mark.parametrize("persistent", [False, True])
def test_kept_batches_stay_untouched_whatever_ends_first(persistent):
    dataset = Images(500, (3, 80, 80))
    loader = DataLoader(dataset, batch_size=1, num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    pids = worker_pids(iterator)
    kept = [x for x, _ in iterator]
    assert all(map(is_leased, kept[::100]))
    for _ in range(3):
        for x, _ in loader:
            x.fill_(255)
    del iterator, loader, x
    gc.collect()
    assert all(map(gone, pids))
    trim_pool()
    for _ in range(2):
        for x, _ in DataLoader(dataset, batch_size=4, num_workers=2):
            x.fill_(7)
    assert are_intact(kept, dataset, 1)


def test_batches_dropped_in_any_order():
    dataset = Images(60, (3, 80, 80))
    loader = DataLoader(dataset, batch_size=1, num_workers=2, persistent_workers=True)
    generator, kept = torch.Generator().manual_seed(0), {}
    for _ in range(4):
        for x, i in loader:
            kept[len(kept), int(i)] = x
            assert is_leased(x)
            for key in list(kept):
                if torch.rand((), generator=generator) < 0.1:
                    assert torch.equal(kept.pop(key)[0], dataset.image(key[1]))
    for key, x in kept.items():
        assert torch.equal(x[0], dataset.image(key[1]))


class Remembering:
    """A collate_fn that keeps its last batches and checks them again at each call."""

    def __init__(self, keep):
        self.keep, self.kept = keep, []

    def __call__(self, samples):
        batch = default_collate(samples)
        good = all(digest(x) == d for x, d in self.kept)
        self.kept = [*self.kept, (batch[0], digest(batch[0]))][-self.keep :]
        return batch[0], good


@pytest.mark.parametrize("keep", [1, 50])
def test_t22_a_batch_that_the_worker_keeps_is_not_overwritten(keep):
    loader = DataLoader(
        Images(60, (3, 80, 80)),
        batch_size=2,
        num_workers=2,
        collate_fn=Remembering(keep),
        persistent_workers=True,
    )
    for _ in range(3):
        for x, good in loader:
            assert good and is_leased(x)
            del x


class Litter:
    """A reference cycle that keeps the memory of a batch alive."""

    alive = 0

    def __init__(self, memory):
        self.memory, self.itself = memory, self
        Litter.alive += 1

    def __del__(self):
        Litter.alive -= 1


@pytest.mark.ours
def test_garbage_of_a_worker_is_collected_before_it_holds_much_of_the_arena():
    def litter(samples):
        Litter(default_collate(samples)[0])
        return Litter.alive

    # About 3.7 MiB each. Python's own collector is disabled, so without rustloader's all of them would remain.
    dataset = Images(160, (3, 400, 400))
    loader = DataLoader(dataset, batch_size=8, num_workers=1, collate_fn=litter, worker_init_fn=lambda _: gc.disable())
    counts = list(loader)
    assert len(counts) == 20 and max(counts) * 8 * 3 * 400 * 400 <= 36 * MB


@pytest.mark.ours
def test_labels_do_not_keep_their_images():
    # A batch has 8 images of 192 KiB. The masks are above the limit below which tensors are copied out.
    dataset = Images(640, (3, 256, 256))

    def collate(samples):
        images, labels = default_collate(samples)
        return {"image": images, "label": labels, "mask": images.reshape(-1)[: 32 * 1024].clone()}

    kept = []
    for batch in DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=collate):
        kept.append((batch["label"], batch["mask"]))
    del batch
    trim_pool()
    assert [int(label[0]) for label, _ in kept] == list(range(0, 640, 8))
    # 80 batches are 120 MiB of images; the masks are 2.5 MiB. A warm pool may hold a few more batches.
    assert arena_bytes() < 40 * MB


@pytest.mark.ours
def test_an_epoch_uses_the_memory_of_its_working_set():
    loader = DataLoader(Images(480, (3, 256, 256)), batch_size=8, num_workers=2, persistent_workers=True)
    most = 0
    for _ in range(2):
        for batch in loader:
            most = max(most, arena_bytes())
            del batch
    assert 0 < most < 45 * MB, f"{most / MB:.0f} MiB of 90"


@pytest.mark.ours
def test_a_further_epoch_has_the_arena_of_the_last_one():
    loader = DataLoader(Images(8), batch_size=4, num_workers=2)
    epoch(loader)
    left = mappings()
    assert left, "the arena must wait in the pool"
    iterator = iter(loader)
    assert mappings() == left
    assert len(list(iterator)) == 2


@pytest.mark.ours
def test_a_batch_held_through_epochs_costs_its_memory_once():
    dataset = Images(8, (3, 256, 256))
    other = DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=True)
    loader = DataLoader(dataset, batch_size=4, num_workers=1)
    early = None
    for i in range(30):
        x = last_images(loader)
        if i % 5 == 0:
            y = last_images(other)
        if i == 6:
            early = arena_bytes()
    late = arena_bytes()
    assert torch.equal(x[3], dataset.image(7)) and torch.equal(y[3], dataset.image(7))
    assert late < early + 8 * MB, f"{early / MB:.0f} MiB after 7 epochs, {late / MB:.0f} MiB after 30"


@pytest.mark.parametrize("closes_all", [False, True])
def test_a_child_that_lives_on_reads_the_right_values(closes_all):
    dataset = Images(40, (3, 100, 100))
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    held = [next(iterator)[0] for _ in range(3)]
    (go_read, go_write), (ready_read, ready_write) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if closes_all:
                # As daemons do, and programs that do not know the descriptors that they inherit.
                os.closerange(3, go_read), os.closerange(go_read + 1, 1024)
            else:
                os.close(ready_write)
            os.read(go_read, 1)
            status = 0 if are_intact(held, dataset, 4) else 2
        finally:
            os._exit(status)
    os.close(ready_write)
    assert os.read(ready_read, 1) == b""
    del held
    for _ in range(4):
        trim_pool()
        for x, _ in loader:
            x.fill_(9)
    del x
    os.write(go_write, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(go_read), os.close(go_write), os.close(ready_read)
    assert are_intact([x for x, _ in loader], dataset, 4)


class Keeping(Images):
    """Holds batches of an earlier epoch, and closes all descriptors of its worker. A sample says whether the batches
    are as they were before the worker started."""

    def __init__(self, n, shape, kept):
        super().__init__(n, shape)
        self.kept, self.digests = kept, [digest(x) for x in kept]

    def __getitem__(self, i):
        os.closerange(3, 1024)
        return *super().__getitem__(i), [digest(x) for x in self.kept] == self.digests


@pytest.mark.ours
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_has_closed_all_descriptors_reads_what_its_dataset_holds(workers):
    shape = (3, 100, 100)
    kept = [x for x, _ in DataLoader(Images(8, shape), batch_size=2, num_workers=workers)]
    dataset = Keeping(40, shape, kept)
    iterator = iter(DataLoader(dataset, batch_size=2, num_workers=workers))
    good = [next(iterator)[2]]
    # The main process drops them and continues. Their blocks must neither be reused nor lose their pages.
    kept.clear()
    for _, _, same in iterator:
        trim_pool()
        for x, _ in DataLoader(Images(4, shape), batch_size=2, num_workers=workers):
            x.fill_(7)
        good.append(same)
    assert len(good) == 20 and all(map(torch.all, good))


@pytest.mark.ours
@pytest.mark.forks
def test_t14_a_child_may_drop_all_and_load_anew(capfd):
    dataset = Images(40, (3, 64, 64))
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    held = [next(iterator)[0] for _ in range(3)]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            held.clear()
            del iterator, loader  # with torch's loader, this ends the parent's workers
            gc.collect()
            fresh = [x for x, _ in DataLoader(dataset, batch_size=4, num_workers=2)]
            status = 0 if are_intact(fresh, dataset, 4) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held += [x for x, _ in iterator]
    assert are_intact(held, dataset, 4) and len(held) == 10
    assert all(w.is_alive() for w in iterator._workers)
    assert capfd.readouterr() == ("", "")  # the child takes no part in the shutdown, so it prints no error


@pytest.mark.ours
def test_memory_that_a_child_held_comes_back():
    dataset = Images(40, (3, 256, 256))
    loader = DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=True)
    for _ in range(10):
        x = last_images(loader)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(x[3], dataset.image(39)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    x = last_images(loader)
    assert arena_bytes() < 25 * MB


def test_batches_held_at_exit():
    status, out, err = run_script("""
        import atexit, threading
        from sample_data import Images
        loader = DataLoader(Images(40, (3, 80, 80)), batch_size=2, num_workers=2, persistent_workers=True)
        kept = list(loader)
        class Holder: pass
        holder = Holder(); holder.me = holder; holder.batch = kept[3]; holder.array = kept[4][0].numpy()
        sys.modules["__main__"].keep = kept[5]
        atexit.register(lambda x: x[0].sum(), kept[6])
        def forever(x):
            while True:
                time.sleep(0.01); x.sum()
        # An array: a thread that returns from torch's C++ code at exit ends the process, with any tensor.
        threading.Thread(target=forever, args=(kept[7][0].numpy(),), daemon=True).start()
        def dropping(many):
            while many:
                many.pop(); time.sleep(0.005)
        threading.Thread(target=dropping, args=(kept[8:],), daemon=True).start()
        local = next(iter(loader))
        print("done")
    """)
    assert (status, out) == (0, "done\n"), err
    assert "Error" not in err and "panicked" not in err, err


def test_a_delivered_tensor_goes_through_another_loader():
    first = [x for x, _ in epoch(DataLoader(Images(8, (3, 80, 80)), batch_size=1, num_workers=2))]
    assert all(map(is_leased, first))
    second = epoch(DataLoader(first, batch_size=None, num_workers=2))
    third = list(_TorchDataLoader(second, batch_size=None, num_workers=1))
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
