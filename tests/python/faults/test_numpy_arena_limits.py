"""NumPy arrays when a worker's region, its address space or its memory cgroup is full: they go to ordinary memory, or
their batch is a MemoryError and the next one is delivered."""

import contextlib
import re
import resource

import numpy as np
import pytest
import torch
from cgroups import cgroup_of_400_mb, in_cgroup
from numpy_arena_support import Made, identity
from support import DataLoader, in_arena
from test_cgroups import NO_MEMORY
from test_limits import address_space, limited

pytestmark = pytest.mark.ours

MB = 1 << 20
# Only one has data; the others make its region smaller.
WORKERS = 8
REGION_FULL = re.compile(
    r"MemoryError: MemoryError: cannot get (\d+) bytes of shared memory for a batch: "
    r"each worker's region of the shared memory has (\d+) bytes; in this one, (\d+) bytes are in use "
    r"and (\d+) bytes are idle, at most (\d+) of them in one piece; .*"
)


class OnOneWorker(torch.utils.data.IterableDataset):
    def __init__(self, make, length):
        self.make, self.length = make, length

    def __iter__(self):
        own = range(self.length) if torch.utils.data.get_worker_info().id == 0 else ()
        yield from map(self.make, own)


def array_of(megabytes, index):
    return np.full(megabytes * MB, index, np.uint8)


def is_filled(array, index):
    return bool((array[::4096] == index).all() and array[-1] == index)


def answers(dataset, workers=WORKERS):
    """Yields the batches, and the last line of each error raised in a batch's place."""
    loader = DataLoader(dataset, batch_size=None, collate_fn=identity, num_workers=workers)
    iterator = iter(loader)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except Exception as error:
            yield f"{type(error).__name__}: {str(error).splitlines()[-1]}"


# A full region


def full_region():
    """The loop keeps arrays until four have not fit, and then releases them. Every other array is not sent."""

    def make(index):
        array = array_of(8, index)
        return array if index % 2 == 0 else (in_arena(array.ctypes.data), is_filled(array, index))

    kept, errors, before, after = [], [], [], []
    for index, answer in enumerate(answers(OnOneWorker(make, 80))):
        if isinstance(answer, str):
            errors.append(answer)
        elif isinstance(answer, tuple):
            where, intact = answer
            assert intact
            (before if len(errors) < 4 else after).append(where)
        elif len(errors) < 4:
            kept.append((index, answer))
        else:
            assert is_filled(answer, index)
            after.append("array")
        del answer
        if len(errors) == 4:
            assert all(is_filled(array, index) for index, array in kept)
            kept.clear()
    return errors, before, after


def test_a_full_region_leaves_arrays_to_ordinary_memory_until_blocks_are_free():
    errors, before, after = limited({resource.RLIMIT_AS: address_space() + (3 << 30)}, full_region)["value"]
    for error in errors:
        wanted, size, used, idle, longest = map(int, REGION_FULL.fullmatch(error).groups())
        assert wanted == 8 * MB and longest < wanted < size and longest <= idle and used + idle == size
    # When the loop releases its arrays, up to nine batches are in flight: four arrays, which may fail as well, and five
    # others.
    assert before[0] is True and before[-1] is False and 4 <= len(errors) <= 8
    assert after.count(False) <= 5 and after[-10:] == ["array", True] * 5


def test_arrays_beyond_the_region_and_the_address_space():
    """An array may fit into ordinary memory but not into the region. If it fits into neither, the error is NumPy's."""
    sizes = [1, 300, 2, 5000, 3] + [16] * (3 * WORKERS)

    def body():
        results = answers(Made(lambda index: array_of(sizes[index], index), len(sizes)))
        return [answer if isinstance(answer, str) else len(answer) // MB for answer in results]

    first, region, second, everything, *others = limited({resource.RLIMIT_AS: address_space() + (3 << 30)}, body)[
        "value"
    ]
    assert [first, second, *others] == [1, 2, 3] + [16] * (3 * WORKERS)
    wanted, size, *_ = map(int, REGION_FULL.fullmatch(region).groups())
    assert wanted == 300 * MB > size > 100 * MB
    assert re.fullmatch(
        r"RuntimeError: .*ArrayMemoryError: Unable to allocate 4.88 GiB for an array with shape .*", everything
    )


# A memory cgroup


def zeroes_of(megabytes, index):
    return np.zeros(megabytes * MB, np.uint8) + np.uint8(index)


def in_small_cgroup(make):
    """The loop keeps arrays until four have failed, and then releases them. Returns the limit, the errors, and
    for each answer whether it was a batch."""

    def body():
        kept, errors, delivered = [], [], []
        for index, answer in enumerate(answers(Made(make, 80), workers=2)):
            if isinstance(answer, str):
                errors.append(answer)
            else:
                assert is_filled(answer, index)
                kept.append(answer)
            delivered.append(not isinstance(answer, str))
            del answer
            if len(errors) >= 4:
                kept.clear()
        return errors, delivered

    with cgroup_of_400_mb() as (join, limit, kills):
        errors, delivered = in_cgroup(join, body)
        assert kills() == 0
    return limit, errors, delivered


@pytest.mark.parametrize("make", [array_of, zeroes_of])
@pytest.mark.parametrize("megabytes", [16, 40])
def test_a_full_memory_cgroup_is_an_error_of_the_batch_and_no_kill(make, megabytes):
    limit, errors, delivered = in_small_cgroup(lambda index: make(megabytes, index))
    for error in errors:
        wanted, what, left = NO_MEMORY.fullmatch(error.removeprefix("MemoryError: ")).groups()
        assert int(wanted) == megabytes * MB and limit in what and int(left) < 400 * MB
    # Batches in flight when the loop releases its arrays may fail as well.
    assert 4 <= len(errors) <= 8 and len(delivered) == 80 and all(delivered[-20:])


def test_a_refused_array_is_explained_for_its_own_batch_alone():
    """A refusal that the program catches does not explain a later error."""

    def make(index):
        if index == 0:
            kept = [b"x" * (340 * MB)]
            with contextlib.suppress(MemoryError):
                kept.extend(array_of(16, 1) for _ in range(3))
            assert len(kept) < 4
        if index == 1:
            raise MemoryError("of the program")
        return index

    def body():
        return list(answers(Made(make, 4), workers=1))

    with cgroup_of_400_mb() as (join, _, kills):
        assert in_cgroup(join, body) == [0, "MemoryError: MemoryError: of the program", 2, 3]
        assert kills() == 0
