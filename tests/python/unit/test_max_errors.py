"""`max_errors`: the number or share of an epoch's samples that may fail."""

import pickle

import pytest
from failing_samples import Broken, Endless, InBatches, Stream, failed, index_batches, left, numbers
from pairwise import pairs
from support import SOON, DataLoader, gone, rustloader, wait_until, worker_pids
from torch.utils.data import DistributedSampler

from rustloader import ErrorLimitExceeded
from rustloader.fetch.failures import Failure
from rustloader.iterator.failures import FEWEST_SAMPLES, FailureCount
from rustloader.metrics.faults import KEPT_FAILURES, Faults
from rustloader.stateful_dataloader import StatefulDataLoader

pytestmark = pytest.mark.ours

WORKERS = pytest.mark.parametrize("workers", [0, 1, 2])
KINDS = pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader], ids=["plain", "stateful"])


def taken(iterator):
    """The numbers of the batches before the error, and the error or None."""
    delivered = []
    while True:
        try:
            delivered += numbers([next(iterator)])
        except StopIteration:
            return delivered, None
        except ErrorLimitExceeded as error:
            return delivered, error


@pairs(
    allowed=[(3, (1, 6, 9)), (0, ()), (0.25, (1, 6, 9)), (1, (9,)), (0.29, (1, 6, 9))],
    dataset=[Broken, InBatches],
    kind=[DataLoader, StatefulDataLoader],
    workers=[0, 1, 2],
)
def test_the_limit_is_allowed_and_one_more_is_not(allowed, dataset, kind, workers):
    limit, places = allowed
    settings = dict(batch_size=4, num_workers=workers, on_error="skip", max_errors=limit)
    delivered, error = taken(iter(kind(dataset(12, places), **settings)))
    assert error is None and delivered == left(index_batches(12), places)
    delivered, error = taken(iter(kind(dataset(12, (*places, 10)), **settings)))
    assert delivered == left(index_batches(8), places)
    assert [it.index for it in error.failures] == [*places, 10]
    count = "1 sample has" if not places else f"{len(places) + 1} samples have"
    first = (*places, 10)[0]
    assert str(error).startswith(
        f"{count} failed in this epoch, which is more than max_errors={limit} allows (sample {first}: "
    )


@pytest.mark.parametrize(
    "kw", [dict(), dict(in_order=False), dict(dispatch="shared_queue"), dict(worker_threads=2)], ids=str
)
@pytest.mark.parametrize("persistent", [False, True])
def test_the_error_stays_and_the_workers_leave(persistent, kw):
    settings = dict(batch_size=4, num_workers=2, on_error="skip", persistent_workers=persistent)
    loader = DataLoader(Broken(40, [5, 30]), max_errors=0, **settings | kw)
    iterator = iter(loader)
    pids = worker_pids(iterator)
    _, error = taken(iterator)
    for _ in range(2):
        with pytest.raises(ErrorLimitExceeded) as repeated:
            next(iterator)
        assert str(repeated.value) == str(error) and repeated.value.failures == error.failures
    assert all(wait_until(lambda pid=pid: gone(pid), SOON) for pid in pids)
    # Another epoch counts from zero.
    assert str(taken(iter(loader))[1]).startswith("1 sample has")


@KINDS
def test_the_error_stays_without_workers(kind):
    loader = kind(Broken(12, [1]), batch_size=4, on_error="skip", max_errors=0)
    iterator = iter(loader)
    for _ in range(5):
        with pytest.raises(
            ErrorLimitExceeded, match=r"^1 sample has .*max_errors=0 allows \(sample 1: ValueError: bad 1\)"
        ):
            next(iterator)
    assert failed(rustloader.stats(loader)) == [(1, "skipped")]


@WORKERS
def test_samples_of_all_workers_count(workers):
    loader = DataLoader(Stream(8, [3]), batch_size=4, num_workers=workers, on_error="skip", max_errors=1)
    delivered, error = taken(iter(loader))
    assert (error is not None) == (workers == 2)
    assert delivered == ([[0, 1, 2, 4]] if workers == 2 else [[0, 1, 2, 4], [5, 6, 7]])


@WORKERS
@pytest.mark.parametrize("policy", ["replace", lambda index, error: 0])
def test_replaced_samples_count(policy, workers):
    loader = DataLoader(Stream(8, [3]), batch_size=4, num_workers=workers, on_error=policy, max_errors=0)
    assert taken(iter(loader))[1].failures[0].error_text == "ValueError: bad 3"


@WORKERS
@KINDS
def test_batches_without_samples_count(kind, workers):
    loader = kind(Broken(12, range(12)), batch_size=4, num_workers=workers, on_error="skip", max_errors=8)
    delivered, error = taken(iter(loader))
    assert delivered == [] and len(error.failures) == 12
    loader = kind(Broken(12, range(12)), batch_size=4, num_workers=workers, on_error="skip", max_errors=12)
    assert taken(iter(loader)) == ([], None)


@WORKERS
def test_failures_behind_the_last_sample_of_an_iterable_dataset_count(workers):
    loader = DataLoader(Stream(8, [7]), batch_size=None, num_workers=workers, on_error="skip", max_errors=0)
    iterator = iter(loader)
    for _ in range(7 * max(workers, 1)):
        next(iterator)
    with pytest.raises(ErrorLimitExceeded):
        next(iterator)


@WORKERS
@pytest.mark.parametrize("limit", [0, 5])
def test_an_iterator_that_fails_without_end_ends_at_the_limit(limit, workers):
    loader = DataLoader(Endless(6), batch_size=4, num_workers=workers, on_error="skip", max_errors=limit)
    iterator = iter(loader)
    with pytest.raises(ErrorLimitExceeded) as caught:
        for _ in range(3):
            next(iterator)
    assert len(caught.value.failures) == limit + 1


def test_a_share_is_one_of_the_samplers_length():
    dataset = Broken(40, range(10, 18))
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=False)
    for share, ends in ((0.2, True), (0.15, False)):
        loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1, on_error="skip", max_errors=share)
        assert (taken(iter(loader))[1] is None) == ends
    for kw in (dict(batch_size=None), dict(batch_sampler=index_batches(40))):
        loader = DataLoader(dataset, num_workers=1, on_error="skip", max_errors=0.2, **kw)
        assert len(list(loader)) == (32 if "batch_size" in kw else 9)


def test_a_share_of_an_unknown_number_of_samples():
    count = FailureCount(Faults(), 0.01, None, 100)
    assert count.allowed is None
    limit = FEWEST_SAMPLES // 100
    assert count.add([Failure(None, "", "skipped")] * limit, 1) is None
    assert count.add([Failure(None, "", "skipped")], 10) is not None
    count.begin_epoch()
    assert count.error is None and count.add([Failure(None, "", "skipped")] * (limit + 1), 11) is None
    assert count.add([Failure(None, "", "skipped")], 11) is not None
    assert FailureCount(Faults(), 0.0, None, 100).add([Failure(None, "", "skipped")], 99) is not None


def test_the_error_keeps_the_first_failures():
    failures = [Failure(i, "ValueError", "skipped") for i in range(KEPT_FAILURES + 3)]
    count = FailureCount(Faults(), KEPT_FAILURES + 2, None, 1)
    error = count.add(failures, 1)()
    assert len(error.failures) == KEPT_FAILURES and not failures
    assert str(error).startswith("1003 samples have failed") and "sample 2: ValueError; ...)" in str(error)
    unpickled = pickle.loads(pickle.dumps(error))
    assert str(unpickled) == str(error) and unpickled.failures == error.failures


def test_without_on_error_the_limit_has_no_effect():
    loader = DataLoader(Broken(12, [1]), batch_size=4, num_workers=1, max_errors=12)
    with pytest.raises(ValueError, match="bad 1"):
        next(iter(loader))
