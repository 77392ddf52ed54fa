"""Errors at their place, timeouts, and what follows them (P17, P19, S6)."""

import time

import numpy as np
import pytest
import sample_data as data
import torch
from sample_data import Failing, FailingSampler, Held, Numbers, Slow, WhoAmI, as_list
from support import BOTH, DataLoader, epoch, in_time, outcome, outcomes, outcomes_of, within, worker_pids
from torch._utils import ExceptionWrapper

ERRORS = {3: data.key_error, 5: data.runtime_error}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_p17_errors_come_at_their_place_and_next_goes_on(workers, batched):
    def trace(cls):
        kind = dict(batch_size=1, collate_fn=as_list) if batched else dict(batch_size=None)
        iterator = iter(cls(Failing(8, ERRORS), num_workers=workers, **kind))
        return outcomes(iterator, 11)

    theirs, ours = map(trace, BOTH)
    assert ours == theirs
    assert [o[0] for o in ours] == ["value"] * 3 + ["error", "value", "error", "value", "value"] + ["end"] * 3


@pytest.mark.parametrize(
    "name", ["key_error", "runtime_error", "stop_iteration", "two_arguments", "with_message", "os_error"]
)
def test_p17_the_class_of_an_error(name):
    def trace(cls):
        iterator = iter(cls(Failing(5, {2: getattr(data, name)}), num_workers=2, batch_size=None))
        return outcomes(iterator, 7)

    theirs, ours = map(trace, BOTH)
    assert ours == theirs


def test_p17_the_text_of_an_error():
    iterator = iter(DataLoader(Failing(3, {1: data.key_error}), num_workers=2, batch_size=None))
    next(iterator)
    with pytest.raises(KeyError) as caught:
        next(iterator)
    lines = str(caught.value).splitlines()
    assert lines[0] == "Caught KeyError in DataLoader worker process 1."
    assert lines[1] == "Original Traceback (most recent call last):"
    assert any("__getitem__" in line for line in lines)
    assert lines[-1] == "KeyError: 'no such key'"


def test_p17_an_error_of_the_collate_function():
    def broken(samples):
        if samples[0] == 2:
            raise IndexError("collate")
        return samples

    def trace(cls):
        return outcomes(iter(cls(Failing(6, {}), num_workers=2, batch_size=2, collate_fn=broken)), 5)

    theirs, ours = map(trace, BOTH)
    assert ours == theirs
    assert ours[1][0] == "error"


def test_p17_an_error_of_default_convert_has_torchs_frames():
    def lines_of_convert(cls):
        with pytest.raises(TypeError) as caught:
            next(iter(cls([[np.datetime64(1, "D")]], batch_size=None, num_workers=1)))
        return [line for line in str(caught.value).splitlines() if "collate.py" in line]

    theirs, ours = map(lines_of_convert, BOTH)
    assert ours == theirs and len(theirs) > 3


def test_p17_an_error_in_each_batch():
    iterator = iter(DataLoader(Failing(20, dict.fromkeys(range(20), data.runtime_error)), num_workers=2))
    assert [o[0] for o in outcomes(iterator, 22)] == ["error"] * 20 + ["end"] * 2


@pytest.mark.parametrize("persistent", [False, True])
def test_p15_p17_out_of_order_errors_are_not_lost(persistent):
    loader = DataLoader(
        Failing(20, ERRORS), num_workers=2, batch_size=None, in_order=False, persistent_workers=persistent
    )
    for _ in range(2):
        got = outcomes(iter(loader), 21)
        assert sorted(o[1] for o in got if o[0] == "value") == [i for i in range(20) if i not in ERRORS]
        assert {o[1] for o in got if o[0] == "error"} == {KeyError, RuntimeError}
        assert got[-1] == ("end",)


def test_s6_an_error_leaves_the_workers_alone():
    loader = DataLoader(Failing(8, ERRORS), num_workers=2, batch_size=None, persistent_workers=True)
    iterator = iter(loader)
    pids = worker_pids(iterator)
    for _ in range(3):
        assert [o[0] for o in outcomes(iter(loader), 9)].count("error") == 2
    assert worker_pids(iterator) == pids and all(w.is_alive() for w in iterator._workers)


def test_p17_a_new_epoch_after_an_error():
    loader = DataLoader(Failing(8, ERRORS), num_workers=2, batch_size=None, persistent_workers=True)
    for _ in range(3):
        with pytest.raises(KeyError):
            list(loader)


def test_p12_an_error_of_the_sampler_in_iter():
    for at in (0, 1, 3):
        with pytest.raises(KeyError, match="sampler"):
            iter(DataLoader(Numbers(9), sampler=FailingSampler(9, at), num_workers=2, batch_size=None))


def test_p12_an_error_of_the_sampler_in_next():
    iterator = iter(DataLoader(Numbers(9), sampler=FailingSampler(9, 5), num_workers=2, batch_size=None))
    got = outcomes(iterator, 10)
    assert ("error", KeyError, "sampler") in got[:3]


@pytest.mark.ours
def test_t24_an_error_of_the_sampler_costs_no_batch():
    iterator = iter(DataLoader(Numbers(9), sampler=FailingSampler(9, 5), num_workers=2, batch_size=None))
    got = outcomes(iterator, 11)
    assert [o[1] for o in got if o[0] == "value"] == [0, 1, 2, 3, 4, 6, 7, 8]
    assert [o for o in got if o[0] == "error"] == [("error", KeyError, "sampler")]
    assert got[-1] == ("end",)


class FailsOften(torch.utils.data.Sampler):
    """Raises KeyError in place of each index from 4 to 9."""

    class Walk:
        def __init__(self):
            self.indices = iter(range(12))

        def __iter__(self):
            return self

        def __next__(self):
            if 4 <= (index := next(self.indices)) < 10:
                raise KeyError("sampler")
            return index

    def __iter__(self):
        return self.Walk()


@pytest.mark.ours
def test_t24_more_errors_of_the_sampler_than_batches_under_way_cost_no_batch():
    iterator = iter(DataLoader(Numbers(12), sampler=FailsOften(), num_workers=2, batch_size=None))
    got = outcomes(iterator, 13)
    assert [o[1] for o in got if o[0] == "value"] == [0, 1, 2, 3, 10, 11]
    assert [o[0] for o in got].count("error") == 6 and got[-1] == ("end",)


@pytest.mark.ours
def test_t24_an_error_of_the_sampler_that_nobody_has_seen_goes_with_its_epoch():
    sampler = FailingSampler(9, 4)
    loader = DataLoader(Numbers(9), sampler=sampler, num_workers=2, batch_size=None, persistent_workers=True)
    for _ in range(3):
        iterator = iter(loader)
        # The error comes while the place of the first batch is filled.
        assert next(iterator).item() == 0
    with pytest.raises(KeyError, match="sampler"):
        next(iterator)


def test_p19_a_timeout_loses_nothing(tmp_path):
    dataset = Held(4, 1, tmp_path / "go")
    iterator = iter(DataLoader(dataset, num_workers=2, batch_size=None, timeout=0.4))
    assert in_time(next, iterator) == ("value", 0)
    for _ in range(2):
        assert outcome(next, iterator) == ("error", RuntimeError, "DataLoader timed out after 0.4 seconds")
    (tmp_path / "go").touch()
    assert [in_time(next, iterator) for _ in range(4)] == [*[("value", i) for i in (1, 2, 3)], ("end",)]


# Alone: a worker that another process keeps from a processor for 5 s would be a timeout.
@pytest.mark.alone
def test_p19_the_clock_starts_again_at_each_result():
    # Worker 0 needs 6.5 s for its first item; the other one's batches come every 0.75 s until then.
    dataset = Slow(12, {0: 6.5} | {i: 0.75 for i in range(1, 12, 2)})
    start = time.monotonic()
    iterator = iter(DataLoader(dataset, num_workers=2, batch_size=None, timeout=5, prefetch_factor=6))
    assert next(iterator).item() == 0
    assert time.monotonic() - start > 5.5
    assert [b.item() for b in iterator] == list(range(1, 12))


def test_p19_shutdown_after_a_timeout(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.3)
    iterator = iter(DataLoader(Slow(4, {0: 60}), num_workers=1, batch_size=None, timeout=0.1))
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.1 seconds"):
        next(iterator)
    with within(10):
        iterator._shutdown_workers()


def test_p19_a_timeout_in_the_resume_handshake(tmp_path):
    dataset = Held(4, 1, tmp_path / "go")
    loader = DataLoader(dataset, num_workers=1, batch_size=None, timeout=0.3, persistent_workers=True)
    assert in_time(next, iter(loader)) == ("value", 0)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.3 seconds"):
        iter(loader)
    (tmp_path / "go").touch()
    loader._iterator._shutdown_workers()


def test_p19_no_workers_no_timeout():
    with pytest.raises(AssertionError):
        iter(DataLoader(Numbers(3), timeout=1))


def test_p19_a_timeout_that_is_not_reached():
    assert len(epoch(DataLoader(Numbers(30), num_workers=2, timeout=30))) == 30


def test_p17_an_error_is_not_pinned_to_the_iterator():
    """After an error the frames that its traceback holds may go: nothing in the iterator keeps them."""
    iterator = iter(DataLoader(Failing(3, {0: data.key_error}), num_workers=1, batch_size=None))
    with pytest.raises(KeyError):
        next(iterator)
    assert outcomes(iterator, 3) == [("value", 1), ("value", 2), ("end",)]


def test_p17_nested_loader_in_a_dataset_is_refused_with_torchs_text():
    class Nested(WhoAmI):
        def __getitem__(self, i):
            return list(DataLoader(Numbers(2), num_workers=1, batch_size=None))

    def trace(cls):
        return outcomes_of(cls(Nested(1), num_workers=1, batch_size=None), 1)

    theirs, ours = map(trace, BOTH)
    assert ours == theirs
    assert ours[0][1] is AssertionError


def test_p17_no_workers_raises_the_original():
    error = ValueError("mine")

    def fail(samples):
        raise error

    with pytest.raises(ValueError) as caught:
        next(iter(DataLoader(Numbers(2), collate_fn=fail)))
    assert caught.value is error


class Wrapping(torch.utils.data.Dataset):
    """Sample 1 is an error that the dataset has wrapped itself."""

    def __len__(self):
        return 3

    def __getitem__(self, i):
        try:
            if i == 1:
                raise KeyError("a reader's")
            return i
        except KeyError:
            return ExceptionWrapper(where="in a reader")


def test_p17_an_error_that_the_dataset_has_wrapped_is_raised():
    def trace(cls):
        return outcomes(iter(cls(Wrapping(), num_workers=1, batch_size=None)), 4)

    theirs, ours = map(trace, BOTH)
    assert ours == theirs and ours[1][0] == "error"
