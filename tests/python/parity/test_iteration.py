"""Order, epochs, the sampler's calls, several iterators at the same time (P10 to P12, P15, P16, P18, P21)."""

import time

import pytest
from sample_data import Held, Numbers
from support import (
    DataLoader,
    from_engine,
    run_script,
    values,
)


@pytest.mark.parametrize("persistent", [False, True])
def test_p15_out_of_order_loses_and_doubles_nothing(persistent, tmp_path):
    """Nor does a slow sample hold the others up."""
    go = tmp_path / "go"
    loader = DataLoader(Held(40, 0, go), num_workers=2, batch_size=None, in_order=False, persistent_workers=persistent)
    for _ in range(3):
        go.unlink(missing_ok=True)
        iterator = iter(loader)
        with from_engine(40):
            samples = [next(iterator).item()]
            go.touch()
            samples += values(iterator)
        assert sorted(samples) == list(range(40))


def test_p21_the_profilers_label():
    # In a process of its own: the profiler leaves a thread behind.
    status, out, err = run_script("""
        from sample_data import Numbers
        iterator = iter(DataLoader(Numbers(3), num_workers=1))
        with torch.autograd.profiler.profile() as profile:
            next(iterator)
        print(*{event.name for event in profile.function_events}, sep="\\n")
    """)
    assert status == 0, err
    assert "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__" in out.splitlines()


def test_a_sleeping_worker_is_woken_for_a_task():
    loader = DataLoader(Numbers(1), num_workers=1, batch_size=None, persistent_workers=True)
    list(loader)
    waits = []
    for _ in range(5):
        # Without the wake, a worker that has been idle for 0.7 s would find the task at its next check, 0.6 s later.
        time.sleep(0.7)
        start = time.monotonic()
        assert list(loader) == [0]
        waits.append(time.monotonic() - start)
    # On a busy machine one or two may be late.
    assert sorted(waits)[2] < 0.3, waits
