"""The states of the global generators are read and restored exactly."""

import random

import numpy as np
import pytest
import torch
from support import run_script

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
    for seed in range(100):
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
    assert 10 < left_over < 90, "both kinds of states must occur"


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
