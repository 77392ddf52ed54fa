"""Warnings about what was a silent mistake of some program: one each, and none elsewhere."""

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


def told(function):
    """The warnings of a call, and whose line they name."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    assert all(warning.filename == __file__ for warning in found), "the warning names another line than the program's"
    return [str(warning.message) for warning in found]


@WORKERS
@STYLE
def test_an_epoch_without_batches_out_of_a_state(style, workers):
    state = state_at(style, workers, 12)
    loader = make(style, workers)
    loader.load_state_dict(state)
    iterator = iter(loader)
    (text,) = told(lambda: list(iterator))
    assert EMPTY in text
    assert told(lambda: [next(iterator, None) for _ in range(2)]) == []
    # The next one has batches.
    assert told(lambda: list(loader)) == []


@WORKERS
@STYLE
@pytest.mark.parametrize("steps", [0, 11, 13])
def test_no_word_about_an_epoch_with_batches(style, workers, steps):
    state = state_at(style, workers, steps)
    loader = make(style, workers)
    loader.load_state_dict(state)
    assert told(lambda: list(loader)) == []


@WORKERS
def test_no_word_about_an_empty_dataset(workers):
    assert told(lambda: list(StatefulDataLoader(datasets.Records(0), num_workers=workers))) == []


@WORKERS
@STYLE
def test_a_load_after_iter_that_has_delivered_nothing(style, workers):
    state = state_at(style, workers, 2)
    loader = make(style, workers)
    iterator = iter(loader)
    (text,) = told(lambda: loader.load_state_dict(state))
    assert "replaces an iterator that has delivered nothing" in text
    assert len(list(loader)) == 10
    del iterator


@WORKERS
@STYLE
def test_no_word_about_a_load_elsewhere(style, workers):
    """Before iter(), in the midst of an epoch, and after its end."""
    state = state_at(style, workers, 2)
    loader = make(style, workers)
    assert told(lambda: loader.load_state_dict(state)) == []
    assert told(lambda: loader.load_state_dict(state)) == []
    iterator = iter(loader)
    next(iterator)
    assert told(lambda: loader.load_state_dict(state)) == []
    list(loader)
    assert told(lambda: loader.load_state_dict(state)) == []
    assert told(lambda: loader.load_state_dict({})) == []


class Frozen(datasets.CountingRecords):
    """Its state never changes; a map-style dataset goes on at a number."""

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


def saving(loader):
    """A function that takes some batches, and a state."""
    iterator = iter(loader)
    loader.state_dict()

    def saved(batches):
        for _ in range(batches):
            next(iterator)
        loader.state_dict()

    return saved


@WORKERS
def test_a_state_that_does_not_change_over_64_batches(workers):
    dataset, number = FrozenIterator((200, 200)), max(workers, 1)
    saved = saving(StatefulDataLoader(dataset, None, num_workers=workers, collate_fn=unchanged))
    assert told(lambda: saved(60)) == []
    (text,) = told(lambda: saved(70 * number))
    assert "has not changed over 64 batches" in text and "FrozenIterator" in text
    # Once for each loader.
    assert told(lambda: saved(30)) == []


@WORKERS
@pytest.mark.parametrize("kind", ["changing", "stateless", "map"])
def test_no_word_about_other_states(kind, workers):
    dataset = {
        "changing": ChangingIterator((140, 140)),
        "stateless": datasets.StatelessShards((140, 140)),
        "map": Frozen(280),
    }[kind]
    saved = saving(StatefulDataLoader(dataset, None, num_workers=workers, collate_fn=unchanged))
    assert told(lambda: saved(60)) == told(lambda: saved(70)) == []


class Part:
    """A part of a stream of Hugging Face's datasets: its fields are what a shuffle is known by."""

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
    """Its parts are strange, and name one another."""

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
    # Once for each loader.
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
