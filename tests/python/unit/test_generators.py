"""The states of the global generators are read and restored exactly. In a forked child, their locks are free."""

import ctypes
import random
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import run_script, wait_until

from rustloader.system import generators
from rustloader.system.generators import GeneratorStates

DRAWS = [
    np.random.normal,
    lambda: np.random.rand(3),
    lambda: np.random.randn(3),
    lambda: np.random.randint(9),
    lambda: np.random.seed(random.randrange(3)),
    lambda: np.random.set_state(np.random.get_state()),
    lambda: torch.rand(2),
    random.random,
    lambda: random.gauss(0, 1),
]


def states():
    numpy_state = np.random.get_state(legacy=False)
    words = numpy_state["state"]
    # Without a number left over, the field `gauss` means nothing.
    left_over = numpy_state["gauss"] if numpy_state["has_gauss"] else None
    return words["key"].tolist(), words["pos"], left_over, random.getstate(), torch.get_rng_state().tolist()


@pytest.fixture(autouse=True)
def _restore_generators():
    before = np.random.get_state(legacy=False), random.getstate(), torch.get_rng_state()
    yield
    np.random.set_state(before[0]), random.setstate(before[1]), torch.set_rng_state(before[2])


def test_what_is_drawn_in_between_changes_nothing():
    left_over = 0
    for seed in range(300):
        choice = random.Random(seed)
        for draw in choice.choices(DRAWS, k=choice.randrange(4)):
            draw()
        before = states()
        left_over += before[2] is not None
        saved = GeneratorStates()
        assert states() == before, "reading must change nothing"
        for draw in choice.choices(DRAWS, k=choice.randrange(4)):
            draw()
        saved.restore()
        assert states() == before
    assert 30 < left_over < 270, "both kinds of states must occur"


def test_a_draw_that_takes_the_left_over_number_alone_is_undone():
    np.random.seed(5)
    np.random.normal()
    before = states()
    saved = GeneratorStates()
    np.random.normal()
    assert states()[:2] == before[:2] and states()[2] is None
    saved.restore()
    assert states() == before


def test_a_seed_may_lead_back_to_the_same_words_with_a_number_left_over():
    led_back = 0
    for seed in range(20):
        np.random.seed(seed)
        np.random.rand(2)
        before = states()
        saved = GeneratorStates()
        np.random.seed(seed)
        np.random.normal()
        led_back += states()[:2] == before[:2]
        saved.restore()
        assert states() == before
    assert led_back


def test_other_bit_generators():
    usual = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        expected = np.random.default_rng(3).bit_generator.state["state"]
        saved = GeneratorStates()
        np.random.rand()
        saved.restore()
        assert np.random.get_bit_generator().state["state"] == expected
        # A bit generator of another kind that has replaced it in the meantime is left alone.
        np.random.set_bit_generator(usual)
        words = usual.state["state"]["key"].tolist()
        saved.restore()
        assert usual.state["state"]["key"].tolist() == words
        # A bit generator of the same kind gets the state.
        before, saved = states(), GeneratorStates()
        np.random.set_bit_generator(np.random.MT19937(7))
        saved.restore()
        assert states() == before
    finally:
        np.random.set_bit_generator(usual)


def test_other_threads_lose_and_repeat_no_draw():
    drawn, has_ended = [], threading.Event()

    def draw():
        while not has_ended.is_set():
            drawn.append(np.random.random())

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=draw)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        assert wait_until(lambda: drawn)
        for _ in range(3000):
            GeneratorStates()
    finally:
        has_ended.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert len(set(drawn)) == len(drawn) > 0


def test_a_thread_that_comes_in_between_is_no_matter():
    before = states()
    saved = GeneratorStates()
    np.random.normal()
    waits = threading.Event()
    thread = threading.Thread(target=waits.wait)
    thread.start()
    try:
        saved.restore()
        assert states() == before
    finally:
        waits.set()
        thread.join()


def test_words_that_are_all_zero():
    np.random.set_state(("MT19937", np.zeros(624, np.uint32), 624))
    saved = GeneratorStates()
    np.random.seed(1)
    saved.restore()
    assert np.random.random() == 0


def test_an_import_of_numpy_random_in_another_thread_is_awaited():
    program = """
        import sys, threading, time
        import torch
        from rustloader.system.generators import GeneratorStates

        class Slow:
            def find_spec(self, name, path=None, target=None):
                if name == "numpy.random.mtrand":
                    begun.set()
                    time.sleep(0.3)

        if "numpy.random" in sys.modules:
            sys.exit()  # NumPy 1 imports it with numpy
        begun = threading.Event()
        sys.meta_path.insert(0, Slow())
        thread = threading.Thread(target=__import__, args=("numpy.random",))
        thread.start()
        begun.wait()
        saved = GeneratorStates()
        thread.join()
        import numpy
        drawn = numpy.random.random()
        saved.restore()
        assert numpy.random.random() == drawn
    """
    status, _, err = run_script(program, head="", fresh=True)
    assert (status, err) == (0, "")


@pytest.mark.parametrize("draw", ["torch.empty(N).normal_()", "np.random.random_sample(N)"])
def test_t33_a_child_forked_while_a_thread_draws_can_draw_and_start_workers(draw):
    """The thread holds the generator's lock almost all the time, and without the GIL."""
    program = f"""
        import multiprocessing, os, sys, threading
        import numpy as np
        import torch
        from rustloader import DataLoader

        class Draws(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, i):
                return torch.rand(3), np.random.rand(3)

        def thread():
            while not ended.is_set():
                {draw}
                drawn.release()

        def child():
            torch.rand(3), np.random.rand(3)
            assert len(list(DataLoader(Draws(), num_workers=1, multiprocessing_context="fork"))) == 4

        N = 3_000_000
        ended, drawn = threading.Event(), threading.Semaphore(0)
        # The loader's own draws would wait for the thread's.
        loader = DataLoader(Draws(), num_workers=2, generator=torch.Generator(), multiprocessing_context="fork")
        threading.Thread(target=thread).start()
        try:
            for _ in range(3):
                drawn.acquire()
                assert len(list(loader)) == 4
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            process.join()
            assert process.exitcode == 0
        finally:
            ended.set()
    """
    status, _, err = run_script(program, head="", fresh=True)
    assert (status, err) == (0, "")


# A mutex that is held: lock, count, owner, users, kind.
HELD = (1, 0, 77, 1, 0)


def generator_of(words):
    """A generator of torch in memory, with the words of its mutex between others."""
    memory = (ctypes.c_uint32 * 10)(5, 6, 7, 8, *words, 9)
    return SimpleNamespace(memory=memory, _cdata=ctypes.addressof(memory))


def words_after_a_fork(words, monkeypatch, *, new=(0,) * 5):
    """The words of the default generator's mutex after the child's step. A new generator's are `new`."""
    generator = generator_of(words)
    monkeypatch.setattr(torch, "default_generator", generator)
    monkeypatch.setattr(torch, "Generator", lambda: generator_of(new))
    generators._free_locks()
    *before, after = generator.memory[:4] + generator.memory[9:]
    assert (before, after) == ([5, 6, 7, 8], 9)
    return tuple(generator.memory[4:9])


@pytest.mark.parametrize("words", [HELD, (2, *HELD[1:]), (1, 0, 77, 0, 0), (1, 0, 0, 1, 0), (1, 0, 0, 0, 0)])
def test_a_mutex_that_is_held_is_freed(words, monkeypatch):
    """Also one that a thread was about to lock or unlock."""
    assert words_after_a_fork(words, monkeypatch) == (0,) * 5


@pytest.mark.parametrize("words", [(0,) * 5, (3, *HELD[1:]), (1, 9, 77, 1, 0), (1, 0, 77, 2, 0), (1, 0, 77, 1, 9)])
def test_words_that_are_no_mutex_or_a_free_one_are_kept(words, monkeypatch):
    assert words_after_a_fork(words, monkeypatch) == words


def test_a_generator_whose_mutex_lies_elsewhere_is_left_alone(monkeypatch):
    assert words_after_a_fork(HELD, monkeypatch, new=(1, 0, 0, 0, 0)) == HELD


def test_a_child_forked_while_threads_seed_or_set_up_a_distribution_draws_as_the_parent():
    """The constants that NumPy keeps of the last binomial distribution are then written in part. This test overwrites
    one in memory, in the order flag, p, n, r."""
    program = """
        import contextlib, ctypes, multiprocessing, threading
        import numpy as np
        import torch
        import rustloader
        from rustloader.system import generators

        def draws():
            return np.random.binomial(10, 0.3, 8).tolist(), np.random.rand(3).tolist(), torch.rand(3).tolist()

        def seeded_draws():
            np.random.seed(1), torch.manual_seed(1)
            return draws()

        def state():
            _, key, pos, *_ = np.random.get_state()
            return key.tolist(), pos

        def child():
            assert state() == before
            assert seeded_draws() == expected

        def hold():
            with contextlib.ExitStack() as stack:
                for lock in locks:
                    stack.enter_context(lock)
                held.set()
                ended.wait()

        rustloader.DataLoader
        numpy_generator = np.random.mtrand._rand
        locks = [numpy_generator._bit_generator.lock]
        locks += [getattr(torch, name)._initialization_lock for name in ("cuda", "mtia", "xpu") if hasattr(torch, name)]
        held, ended = threading.Event(), threading.Event()
        expected, n = seeded_draws(), type(numpy_generator).__basicsize__ // 8
        as_float = (ctypes.c_double * n).from_address(id(numpy_generator))
        as_int = (ctypes.c_int64 * n).from_address(id(numpy_generator))
        (r,) = (at + 2 for at in range(n - 2) if as_float[at] == 0.3 and as_int[at + 1] == 10)
        as_float[r] = 0.5
        assert seeded_draws() != expected
        before = state()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        ended.set()
        assert process.exitcode == 0
    """
    status, _, err = run_script(program, head="", fresh=True)
    assert (status, err) == (0, "")


def test_a_thread_that_forks_while_it_holds_numpys_lock_keeps_it():
    lock = np.random.mtrand._rand._bit_generator.lock
    if not hasattr(lock, "_is_owned"):
        pytest.skip("NumPy 1 has a lock without an owner")
    with lock:
        generators._free_locks()
        assert lock._is_owned()


@pytest.mark.parametrize("module", [None, SimpleNamespace()])
def test_a_numpy_that_is_not_imported_or_not_yet_complete_has_no_lock(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy.random.mtrand", module)
    generators._free_locks()
