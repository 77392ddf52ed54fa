"""What programs observe when samples fail: batches, statistics, workers that exit."""

import json

import pytest
from failing_samples import BAD, SIZE, Broken, index_batches, left, minus, numbers
from support import DataLoader, LoaderIter, rustloader

from rustloader.fetch.failures import BatchWithFailures, Failure, failure_of
from rustloader.metrics.faults import KEPT_DEATHS, KEPT_FAILURES, Faults
from rustloader.metrics.fields import FaultStats

pytestmark = pytest.mark.ours


def test_next_data_returns_plain_batches():
    class Mine(LoaderIter):
        def __next__(self):
            data = self._next_data()
            assert not isinstance(data, BatchWithFailures)
            return data

    loader = DataLoader(Broken(), batch_size=4, num_workers=1, on_error="skip")
    assert numbers(Mine(loader)) == left(index_batches())


def test_statistics_show_the_failures():
    loader = DataLoader(Broken(), batch_size=4, num_workers=1, on_error="skip")
    iterator = iter(loader)
    next(iterator)
    assert rustloader.stats(iterator).faults.failures == (Failure(1, "ValueError: bad 1", "skipped", 0),)
    list(iterator)
    stats = rustloader.stats(loader)
    assert stats.faults == rustloader.stats(iterator).faults and stats.faults.skipped == len(BAD)
    assert "faults        9 samples skipped" in str(stats) and "sample 1: ValueError: bad 1" in stats._repr_html_()
    assert stats.verdict().reason.endswith("; 9 samples skipped")
    assert json.loads(json.dumps(stats.as_dict()))["faults"]["failures"][1]["index"] == 4
    flat = stats.as_dict(flat=True)
    assert flat["faults_skipped"] == 9.0 and not any("failures" in name for name in flat)
    replaced = DataLoader(Broken(), batch_size=4, num_workers=1, on_error=minus)
    assert len(list(replaced)) == len(index_batches(SIZE))
    assert "9 samples replaced" in str(rustloader.stats(replaced))


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


def test_a_failure_in_words():
    assert failure_of(3, KeyError("x"), "skipped", 1) == Failure(3, "KeyError: 'x'", "skipped", 1)
    assert failure_of("name", ValueError(), "skipped", None) == Failure("name", "ValueError", "skipped")
    assert failure_of((1, 2), ValueError("two\nlines"), "replaced", 0).index == "(1, 2)"
    assert failure_of((1, 2), ValueError("two\nlines"), "replaced", 0).error_text == "ValueError: two\nlines"
    assert len(failure_of([0] * 1000, ValueError("x" * 5000), "skipped", 0).error_text) == 1000
    assert len(failure_of([0] * 1000, ValueError(), "skipped", 0).index) < 100
    assert "Unprintable" in failure_of(None, Unprintable(), "skipped", 0).error_text


def test_restarts_are_counted_along_with_failures():
    loaders = Faults()
    first, second = Faults(loaders), Faults(loaders)
    first.note_restart("worker 1 died", stalled=True)
    second.note_restart("worker 0 died", out_of_memory=True)
    second.note_failure(Failure(1, "ValueError", "skipped", 0))
    second.note_failure(Failure(2, "ValueError", "replaced", 0))
    assert first.stats() == FaultStats(restarts=1, stalls=1, deaths=("worker 1 died",))
    total = loaders.stats()
    assert (total.restarts, total.stalls, total.out_of_memory) == (2, 1, 1)
    assert (total.skipped, total.replaced, total.unlisted_failures) == (1, 1, 0)
    assert total.deaths == ("worker 1 died", "worker 0 died") and [it.index for it in total.failures] == [1, 2]
    text = str(rustloader.Stats(faults=total))
    assert "  faults        2 restarts (1 stuck, 1 out of memory), 1 sample skipped, 1 sample replaced" in text
    assert "faults" not in str(rustloader.Stats())


def test_texts_are_kept_up_to_a_limit():
    faults = Faults()
    for i in range(KEPT_FAILURES + 5):
        faults.note_failure(Failure(i, "ValueError", "skipped" if i % 2 else "replaced"))
        faults.note_restart(str(i))
    stats = faults.stats()
    assert len(stats.failures) == KEPT_FAILURES and stats.unlisted_failures == 5
    assert len(stats.deaths) == KEPT_DEATHS and stats.restarts == KEPT_FAILURES + 5
    assert (stats.failures[-1].index, stats.deaths[-1]) == (KEPT_FAILURES - 1, str(KEPT_DEATHS - 1))
