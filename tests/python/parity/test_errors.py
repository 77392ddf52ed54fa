"""Errors at their places, timeouts, and what follows them (P17, P19, S6)."""

import time

import pytest
import torch
from sample_data import FailingSampler, Held, Numbers, Slow
from support import DataLoader, in_time, outcomes


class FailsOften(torch.utils.data.Sampler):
    """Raises KeyError instead of each index from 4 to 9."""

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
def test_t24_errors_of_the_sampler_cost_no_batch():
    iterator = iter(DataLoader(Numbers(12), sampler=FailsOften(), num_workers=2, batch_size=None))
    results = outcomes(iterator, 13)
    assert [o[1] for o in results if o[0] == "value"] == [0, 1, 2, 3, 10, 11]
    assert [o[0] for o in results].count("error") == 6 and results[-1] == ("end",)


@pytest.mark.ours
def test_t24_an_error_of_the_sampler_that_nobody_has_seen_goes_with_its_epoch():
    sampler = FailingSampler(9, 4)
    loader = DataLoader(Numbers(9), sampler=sampler, num_workers=2, batch_size=None, persistent_workers=True)
    for _ in range(3):
        iterator = iter(loader)
        # The sampler fails when the first batch's place in the window is filled again.
        assert next(iterator).item() == 0
    with pytest.raises(KeyError, match="sampler"):
        next(iterator)


# Runs alone: a worker that gets no CPU time for 5 s would be a timeout.
@pytest.mark.alone
def test_p19_the_clock_starts_again_at_each_result():
    # Worker 0 needs 6.5 s for its first item; the other worker's batches arrive every 0.75 s until then.
    dataset = Slow(12, {0: 6.5} | {i: 0.75 for i in range(1, 12, 2)})
    start = time.monotonic()
    iterator = iter(DataLoader(dataset, num_workers=2, batch_size=None, timeout=5, prefetch_factor=6))
    assert next(iterator).item() == 0
    assert time.monotonic() - start > 5.5
    assert [b.item() for b in iterator] == list(range(1, 12))


@pytest.mark.ours
def test_p19_timeouts_of_the_resume_handshake_lose_nothing(tmp_path):
    dataset = Held(4, 1, tmp_path / "go")
    loader = DataLoader(dataset, num_workers=2, batch_size=None, timeout=0.1, persistent_workers=True)
    assert in_time(next, iter(loader)) == ("value", 0)
    for _ in range(5):
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.1 seconds"):
            iter(loader)
    (tmp_path / "go").touch()
    _, iterator = in_time(iter, loader)
    assert [in_time(next, iterator) for _ in range(5)] == [*[("value", i) for i in range(4)], ("end",)]
