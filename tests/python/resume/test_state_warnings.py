"""Each mistake that programs have made silently causes one warning, and nothing else causes any."""

import warnings

import pytest
from stateful import datasets
from stateful.datasets import unchanged

from rustloader.stateful_dataloader import StatefulDataLoader

pytestmark = pytest.mark.ours

WORKERS = pytest.mark.parametrize("workers", [0, 2])
STYLE = pytest.mark.parametrize("style", ["map", "iterable"])
EMPTY = "an epoch of 0 batches"


def make(style, workers, **kw):
    dataset = (
        datasets.Records(12) if style == "map" else datasets.Shards((7, 5) if workers else (12,), with_generator=False)
    )
    return StatefulDataLoader(dataset, num_workers=workers, collate_fn=unchanged, **kw)


def state_at(style, workers, steps):
    loader = make(style, workers)
    iterator = iter(loader)
    number = sum(1 for _ in zip(range(steps), iterator, strict=False))
    assert number == min(steps, 12)
    return loader.state_dict()


def warnings_of(function):
    """The warnings of a call, all of which must name a line of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)  # Python's own about forks
        function()
    assert all(warning.filename == __file__ for warning in caught), "a warning does not name the program's line"
    return [str(warning.message) for warning in caught]


@WORKERS
@STYLE
def test_an_epoch_without_batches_out_of_a_state(style, workers):
    state = state_at(style, workers, 12)
    loader = make(style, workers)
    loader.load_state_dict(state)
    iterator = iter(loader)
    (text,) = warnings_of(lambda: list(iterator))
    assert EMPTY in text
    assert warnings_of(lambda: [next(iterator, None) for _ in range(2)]) == []
    # The next epoch has batches.
    assert warnings_of(lambda: list(loader)) == []


@WORKERS
def test_no_word_about_an_empty_dataset(workers):
    assert warnings_of(lambda: list(StatefulDataLoader(datasets.Records(0), num_workers=workers))) == []


@WORKERS
@STYLE
def test_a_load_after_iter_that_has_delivered_nothing(style, workers):
    state = state_at(style, workers, 2)
    loader = make(style, workers)
    iterator = iter(loader)
    (text,) = warnings_of(lambda: loader.load_state_dict(state))
    assert "replaces an iterator that has delivered nothing" in text
    assert len(list(loader)) == 10
    del iterator


@WORKERS
@STYLE
def test_no_word_about_a_load_at_another_time(style, workers):
    """Before iter(), in mid-epoch, and after the end of the epoch."""
    state = state_at(style, workers, 2)
    loader = make(style, workers)
    assert warnings_of(lambda: loader.load_state_dict(state)) == []
    assert warnings_of(lambda: loader.load_state_dict(state)) == []
    iterator = iter(loader)
    next(iterator)
    assert warnings_of(lambda: loader.load_state_dict(state)) == []
    list(loader)
    assert warnings_of(lambda: loader.load_state_dict(state)) == []
    assert warnings_of(lambda: loader.load_state_dict({})) == []


class Frozen(datasets.CountingRecords):
    """Its state never changes, but a map-style dataset resumes at an index."""

    def state_dict(self):
        return {"made": 0}


class FrozenIterator(datasets.Shards):
    def __iter__(self):
        iterator = super().__iter__()
        iterator.state_dict = lambda: {"i": 0}
        return iterator


class ChangingIterator(datasets.Shards):
    """The state changes at every 50th sample."""

    def __iter__(self):
        iterator = super().__iter__()
        iterator.state_dict = lambda: {"i": iterator.i // 50}
        return iterator


def saver_of(loader):
    """Returns a function that takes some batches and then a state."""
    iterator = iter(loader)
    loader.state_dict()

    def save_after(batches):
        for _ in range(batches):
            next(iterator)
        loader.state_dict()

    return save_after


@WORKERS
def test_a_state_that_does_not_change_over_64_batches(workers):
    dataset, number = FrozenIterator((200, 200)), max(workers, 1)
    save_after = saver_of(StatefulDataLoader(dataset, None, num_workers=workers, collate_fn=unchanged))
    assert warnings_of(lambda: save_after(60)) == []
    (text,) = warnings_of(lambda: save_after(70 * number))
    assert "has not changed over 64 batches" in text and "FrozenIterator" in text
    # One warning per loader.
    assert warnings_of(lambda: save_after(30)) == []


@WORKERS
@pytest.mark.parametrize("kind", ["changing", "stateless", "map"])
def test_no_word_about_other_states(kind, workers):
    dataset = {
        "changing": ChangingIterator((140, 140)),
        "stateless": datasets.StatelessShards((140, 140)),
        "map": Frozen(280),
    }[kind]
    save_after = saver_of(StatefulDataLoader(dataset, None, num_workers=workers, collate_fn=unchanged))
    assert warnings_of(lambda: save_after(60)) == warnings_of(lambda: save_after(70)) == []


class Part:
    """A part of a stream of Hugging Face Datasets. Its fields identify a shuffle."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


class Stream(datasets.GeneratorShards):
    def __init__(self, *parts):
        super().__init__((20, 20))
        self._ex_iterable = Part(ex_iterable=Part(ex_iterables=[Part(), *parts]))


class Holder(datasets.GeneratorShards):
    """Has a stream as an attribute, as torchtitan's datasets do."""

    def __init__(self, *parts):
        super().__init__((20, 20))
        self.stream, self.itself = Stream(*parts), self


class WithoutState(datasets.StatelessShards):
    def __init__(self, *parts):
        super().__init__((20, 20))
        self._ex_iterable = Part(ex_iterables=[*parts])


class Raising:
    def __getattribute__(self, name):
        raise RuntimeError(f"asked for {name}")


class Hostile(datasets.GeneratorShards):
    """Its parts are malformed and refer to one another."""

    def __init__(self, *parts):
        super().__init__((20, 20))
        self._ex_iterable = Part(ex_iterable=Raising(), ex_iterables=7, buffer_size="100")
        self._ex_iterable._ex_iterable = self


BUFFER = Part(ex_iterable=Part(), buffer_size=100)


@WORKERS
@pytest.mark.parametrize("kind", [Stream, Holder])
@pytest.mark.warns
def test_a_shuffle_buffer_that_the_state_does_not_hold(kind, workers, caplog):
    loader = StatefulDataLoader(kind(BUFFER, Part(buffer_size=10)), None, num_workers=workers, collate_fn=unchanged)
    iterator = iter(loader)
    loader.state_dict()
    assert caplog.messages == []
    next(iterator)
    loader.state_dict()
    (text,) = caplog.messages
    assert text.startswith(
        f"{kind.__name__} has a shuffle buffer of 100 samples, which its state_dict() does not include"
    )
    # One warning per loader.
    loader.state_dict()
    list(iterator)
    next(iter(loader))
    loader.state_dict()
    assert caplog.messages == [text]


@WORKERS
@pytest.mark.parametrize(
    "dataset",
    [Stream(), Stream(Part(buffer_size=1)), WithoutState(BUFFER), Hostile(), datasets.GeneratorShards((20, 20))],
)
@pytest.mark.forks
def test_no_word_about_streams_that_resume(dataset, workers, caplog):
    loader = StatefulDataLoader(dataset, None, num_workers=workers, collate_fn=unchanged)
    next(iter(loader))
    loader.state_dict()
    assert caplog.messages == []


@WORKERS
def test_no_word_about_a_shuffle_buffer_at_the_end_of_an_epoch(workers, caplog):
    loader = StatefulDataLoader(Stream(BUFFER), None, num_workers=workers, collate_fn=unchanged)
    list(loader)
    loader.state_dict()
    assert caplog.messages == []
