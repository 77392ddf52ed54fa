"""For a batch or an error that cannot be sent, an error is raised in its place (torch hangs on most of them)."""

import functools
import sys

import numpy as np
import pytest
import torch
from sample_data import BadText, Failing, Given, Numbers, Unpicklable, untouched
from support import BOTH, DataLoader, outcomes, worker_pids


@pytest.mark.forks
@pytest.mark.ours
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("what", ["lambda", "reduce", "generator", "nested"])
def test_an_unpicklable_batch_is_an_error_and_the_next_one_is_delivered(what, persistent):
    unpicklable = {
        "lambda": lambda: 0,
        "reduce": Unpicklable(),
        "generator": (i for i in ()),
        "nested": {"tensor": torch.zeros(100_000), "list": [1, {"deep": Unpicklable()}]},
    }[what]
    samples = Given([0, 1, unpicklable, 3, unpicklable, 5])
    loader = DataLoader(samples, num_workers=2, batch_size=None, collate_fn=untouched, persistent_workers=persistent)
    for _ in range(2):
        iterator = iter(loader)
        pid = worker_pids(iterator)[0]
        results = []
        for _ in range(7):
            try:
                results.append(next(iterator))
            except StopIteration:
                results.append("end")
            except Exception as e:
                results.append(str(e))
        for text in (results.pop(4), results.pop(2)):
            assert "worker process 0" in text and str(pid) in text and type(unpicklable).__name__ in text, text
        assert results == [0, 1, 3, 5, "end"]


@pytest.mark.forks
@pytest.mark.ours
def test_a_batch_larger_than_any_memory_is_a_memory_error_and_the_next_one_is_delivered():
    # 64 TiB of one byte.
    endless = np.broadcast_to(np.zeros(1, np.uint8), (1 << 46,))
    loader = DataLoader(Given([0, endless, 2]), num_workers=1, batch_size=None, collate_fn=untouched)
    iterator = iter(loader)
    assert next(iterator) == 0
    with pytest.raises(MemoryError, match=f"cannot get {1 << 46} bytes of shared memory for a batch"):
        next(iterator)
    assert next(iterator) == 2


@pytest.mark.ours
def test_the_traceback_of_an_unpicklable_exception_is_not_lost():
    class Local(Exception):
        pass

    iterator = iter(DataLoader(Failing(1, {0: lambda: Local("mine")}), num_workers=1, batch_size=None))
    with pytest.raises(Exception) as caught:
        next(iterator)
    assert (
        "Original Traceback" in str(caught.value) and "__getitem__" in str(caught.value) and "mine" in str(caught.value)
    )


class HoldsUnpicklable(Exception):
    def __init__(self, text):
        super().__init__(text, lambda: 0)


@pytest.mark.parametrize("error", [functools.partial(HoldsUnpicklable, "x"), BadText], ids=["arguments", "text"])
def test_an_exception_that_cannot_be_sent_as_it_is(error):
    def trace(cls):
        return outcomes(iter(cls(Failing(4, {1: error}), num_workers=2, batch_size=None)), 5)

    expected, actual = map(trace, BOTH)
    assert [o[:2] for o in actual] == [o[:2] for o in expected]
    assert actual[1][0] == "error" and actual[2:] == [("value", 2), ("value", 3), ("end",)]
    assert error is BadText or actual == expected


def test_errors_of_large_text():
    iterator = iter(DataLoader(Failing(2, {0: lambda: ValueError("x" * 5_000_000)}), num_workers=1, batch_size=None))
    with pytest.raises(ValueError) as caught:
        next(iterator)
    assert len(str(caught.value)) > 5_000_000
    assert next(iterator) == 1


class RaisesInDel:
    """Raises in the worker, when it drops a batch that it sent, and in main, when it drops one that it received."""

    def __init__(self, i):
        self.i, self.tensor = i, torch.full((5000,), float(i))

    def __del__(self):
        raise ValueError("in __del__")


class Endings(Numbers):
    def __getitem__(self, i):
        return RaisesInDel(i)


@pytest.mark.ours
@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_whose_del_raises_is_a_batch(workers, monkeypatch):
    complaints = []
    # Inherited by the workers.
    monkeypatch.setattr(sys, "unraisablehook", lambda it: complaints.append(str(it.exc_value)))
    dataset = Endings(12)
    for persistent in (False, True):
        loader = DataLoader(
            dataset, num_workers=workers, batch_size=None, collate_fn=untouched, persistent_workers=persistent
        )
        for _ in range(2):
            iterator = iter(loader)
            for i, batch in enumerate(iterator):
                assert batch.i == i and bool((batch.tensor == i).all())
            assert i == 11
            del batch
        iterator._shutdown_workers()
    del iterator, loader
    assert complaints == ["in __del__"] * 48
