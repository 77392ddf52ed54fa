"""Arrays in the arena behave as elsewhere: from libraries, in threads and children, after the end of their worker."""

import math
import os
import textwrap
import threading

import numpy as np
import pytest
from numpy_arena_support import SIZE, Made, batches_of, fresh, identity
from numpy_handlers import handler_name, set_handler
from support import DataLoader, run_script
from torch.utils.data import default_convert

pytestmark = pytest.mark.ours

# Arrays themselves


def test_arrays_are_what_they_are_elsewhere():
    def make(index):
        zeroes = np.zeros((300, 300))
        assert not zeroes.any() and zeroes.flags.owndata and zeroes.flags.writeable
        zeroes[:] = 1
        del zeroes
        second = np.zeros((300, 300))
        assert not second.any()
        grown = np.arange(20_000)
        for size in (20_100, 40_000, 400_000, 5_000, 10, 30_000):
            expected = np.resize(grown, size) if size <= grown.size else np.append(grown, np.zeros(size - grown.size))
            grown.resize((size,), refcheck=False)
            assert (grown == expected).all(), size
        objects = np.array([str(i) for i in range(20_000)], object)
        assert "".join(np.concatenate([objects, objects])) == "".join(objects) * 2
        return (second + 2).sum()

    batches, _ = batches_of(Made(make))
    assert batches == [180_000.0] * 6


def test_another_thread_may_free_arrays_and_make_ordinary_ones():
    def make(index):
        handlers = []

        def work(array):
            assert (array == index).all()
            own = np.ones(SIZE)
            handlers.extend([handler_name(), handler_name(own)])

        arrays = [fresh(index) for _ in range(4)]
        threads = [threading.Thread(target=work, args=(arrays.pop(),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return set(handlers) == {"default_allocator"}, fresh(index)

    batches, stats = batches_of(Made(make, 20))
    assert all(ok and (array == index).all() for index, (ok, array) in enumerate(batches))
    assert stats.arena.high_water_bytes < 40 * SIZE


def test_what_is_kept_for_long_goes_to_ordinary_memory_from_a_limit_on():
    size = 1 << 20

    class Caching:
        def __init__(self):
            self.cache = []

        def __len__(self):
            return 150

        def __getitem__(self, index):
            self.cache.append(np.full(size, index % 256, np.uint8))
            return int(self.cache[index // 2][-1])

    batches, stats = batches_of(Caching())
    assert batches == [index // 2 % 256 for index in range(150)]
    assert 60 * size < stats.arena.high_water_bytes < 70 * size


# Libraries that create arrays through NumPy


def same(batches, expected):
    return all(np.array_equal(batch, expected(index)) for index, batch in enumerate(batches))


@pytest.mark.parametrize("mb", [1, 16])
def test_what_opencv_makes_is_sent_without_a_copy(mb):
    cv2 = pytest.importorskip("cv2", reason="opencv-python-headless is not installed")
    cv2.setNumThreads(0)  # its threads would not end
    side = math.isqrt(mb << 20)
    picture = np.random.default_rng(0).integers(256, size=(side // 4, side // 4, 3), dtype=np.uint8)
    _, file = cv2.imencode(".png", picture)

    def resize(index):
        return cv2.resize(cv2.imdecode(file, cv2.IMREAD_GRAYSCALE) // (index + 1), (side, side))

    def convert(index):
        return cv2.cvtColor(cv2.resize(picture, (side, side // 4)) // (index + 1), cv2.COLOR_BGR2RGBA)

    for make in (resize, convert):
        # As arrays, and as tensors by torch's default.
        for collate in (identity, default_convert):
            batches, stats = batches_of(Made(make, 4), collate_fn=collate)
            assert same(batches, make)
            assert stats.copies.count == 0, stats.copies
            assert stats.copies.adopted_bytes >= 4 * side * side
        # In lists of samples, also from threads.
        lists, stats = batches_of(Made(make, 4), batch_size=2, worker_threads=2)
        assert same([picture for batch in lists for picture in batch], make)
        assert stats.copies.count == 0, stats.copies


# Forks and exits


def forking(index):
    array, ready, go = fresh(index), *os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.read(ready, 1)
            assert (array == index).all()  # the parent has written by now
            array[:] = 255
            others = [np.ones(SIZE * n, np.uint8) for n in range(1, 9)]
            others.pop()
            array.resize((4 * SIZE,), refcheck=False)
            assert (array[:SIZE] == 255).all() and not array[SIZE:].any()
            array.resize((SIZE,), refcheck=False)
            del array, others
            grandchild = os.fork()
            if grandchild == 0:
                os._exit(0)
            status = os.waitpid(grandchild, 0)[1]
        finally:
            os._exit(status)
    array += 100
    others = [np.full(SIZE, 7, np.uint8) for _ in range(8)]
    os.write(go, b"x")
    os.close(ready)
    os.close(go)
    assert os.waitpid(pid, 0)[1] == 0
    assert (array == index + 100).all() and all((other == 7).all() for other in others)
    return array


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_of_the_worker_has_its_own_arrays():
    batches, _ = batches_of(Made(forking, 10), workers=2)
    assert all((batch == index + 100).all() for index, batch in enumerate(batches))


def test_a_child_that_lives_on_reads_and_writes_nothing_of_the_worker():
    children = []

    def make(index):
        if index == 0:
            array = fresh(42)
            pid = os.fork()
            if pid == 0:
                try:
                    while (array == 42).all():
                        array[:] = 42
                finally:
                    os._exit(1)
            children.append(pid)
        if index == 39:
            assert os.waitpid(children[0], os.WNOHANG) == (0, 0)
            os.kill(children[0], 9)
            os.waitpid(children[0], 0)
        return fresh(index)

    batches, _ = batches_of(Made(make, 40))
    assert all((batch == index).all() for index, batch in enumerate(batches))


def test_arrays_that_live_until_the_end_of_the_worker_and_beyond_the_loader():
    source = """
    import atexit, numpy as np, rustloader

    kept = []

    class Dataset:
        def __len__(self):
            return 20
        def __getitem__(self, index):
            if not kept:
                atexit.register(self.write)
            kept.append(np.full(1 << 17, index, np.uint8))
            return np.full(1 << 17, index, np.uint8)

        def write(self):
            for array in kept:
                array[:] = 255
                array.resize((1 << 18,), refcheck=False)

    def identity(batch):
        return batch

    def main(**kw):
        loader = rustloader.DataLoader(Dataset(), batch_size=None, num_workers=2, collate_fn=identity, **kw)
        return [batch for _ in range(3) for batch in loader]

    if __name__ == "__main__":
        batches = main() + main(persistent_workers=True)
        assert all((batch == index % 20).all() for index, batch in enumerate(batches))
        print(len(batches))
    """
    assert run_script(textwrap.dedent(source)) == (0, "120\n", "")


@pytest.mark.warns
def test_a_worker_that_dies_with_arrays_is_replaced(tmp_path):
    mark = tmp_path / "died"

    def make(index):
        if index == 5 and not mark.exists():
            mark.touch()
            kept = [fresh(9) for _ in range(20)]
            os.kill(os.getpid(), 9)
            del kept
        return fresh(index)

    batches, stats = batches_of(Made(make, 30), max_restarts=1)
    assert all((batch == index).all() for index, batch in enumerate(batches)) and len(batches) == 30
    assert stats.faults.restarts == 1


# Handlers


def names(index):
    return handler_name(), handler_name(fresh(index)), handler_name(np.ones(3))


def test_the_handler_is_set_in_workers_alone():
    assert batches_of(Made(names, 2))[0] == [("rustloader_arena",) * 3] * 2
    assert names(0) == ("default_allocator",) * 3
    assert [names(0)] * 2 == list(DataLoader(Made(names, 2), batch_size=None, collate_fn=identity))


@pytest.mark.parametrize("value", ["0", "off", "no"])
def test_it_can_be_switched_off(value, monkeypatch):
    monkeypatch.setenv("RUSTLOADER_NUMPY_ARENA", value)
    assert batches_of(Made(names, 2))[0] == [("default_allocator",) * 3] * 2
    batches, stats = batches_of(Made(fresh))
    assert stats.copies.count == 6 and all((batch == index).all() for index, batch in enumerate(batches))


def test_the_switch_is_checked(monkeypatch):
    monkeypatch.setenv("RUSTLOADER_NUMPY_ARENA", "perhaps")
    with pytest.raises(ValueError, match="RUSTLOADER_NUMPY_ARENA must be 1 or 0, got 'perhaps'"):
        iter(DataLoader(Made(fresh), num_workers=1))
    monkeypatch.setenv("RUSTLOADER_NUMPY_ARENA", "1")
    assert batches_of(Made(names, 1))[0] == [("rustloader_arena",) * 3]


def test_a_handler_of_the_program_stays():
    batches, stats = batches_of(
        Made(lambda index: (*names(index), fresh(index)), 6), worker_init_fn=lambda _: set_handler("mine")
    )
    assert [batch[:3] for batch in batches] == [("mine",) * 3] * 6 and stats.copies.count == 6
    assert all((batch[3] == index).all() for index, batch in enumerate(batches))


def test_a_handler_that_the_program_sets_later_replaces_it():
    def make(index):
        before = fresh(index)
        if index == 1:
            set_handler("mine")
        return handler_name(), handler_name(before), before

    batches, _ = batches_of(Made(make, 3))
    arena = "rustloader_arena"
    assert [batch[:2] for batch in batches] == [(arena, arena), ("mine", arena), ("mine", "mine")]
    assert all((batch[2] == index).all() for index, batch in enumerate(batches))
