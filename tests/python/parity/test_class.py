"""The class itself: signature, attributes, guards, constructor errors, length (P1 to P9)."""

import copy
import inspect
import pickle
import typing
from collections.abc import Iterable

import pytest
import torch
from parity_table import Raised, attempt, drain, rows
from sample_data import LazySampler, Numbers, Shards
from support import DataLoader, TorchDataLoader, rustloader


def test_p1_is_a_pure_python_subclass():
    loader = DataLoader(Numbers(3))
    assert isinstance(loader, TorchDataLoader)
    assert issubclass(DataLoader, TorchDataLoader)
    assert DataLoader.__name__ == "DataLoader"
    assert type(DataLoader) is type(TorchDataLoader)
    assert "__slots__" not in vars(DataLoader)
    assert loader.__dict__ is vars(loader)
    # torch imports this name for type checkers only.
    assert "dataset" in typing.get_type_hints(DataLoader, localns={"Iterable": Iterable})


def test_p2_signature_is_torchs():
    """Options that torch does not have follow torch's parameters; see test_options.py."""
    own, expected = (list(inspect.signature(cls).parameters.values()) for cls in (DataLoader, TorchDataLoader))
    assert [(p.name, p.kind) for p in own[: len(expected)]] == [(p.name, p.kind) for p in expected]
    assert all(actual.default is original.default for actual, original in zip(own, expected, strict=False))
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in own[len(expected) :])


SETTINGS = {
    "plain": dict(),
    "batched": dict(batch_size=4, shuffle=True, drop_last=True),
    "another batch_size": dict(batch_size=3),
    "workers": dict(num_workers=2, prefetch_factor=3, persistent_workers=True, timeout=5, in_order=False),
    "batch_sampler": dict(batch_sampler=[[0, 1], [2]]),
    "unbatched": dict(batch_size=None, sampler=[3, 1, 2]),
    "a sampler with a length": dict(sampler=LazySampler(7, [])),
    "no samples": dict(sampler=[]),
    "generator": dict(shuffle=True, generator=torch.Generator()),
    "context": dict(num_workers=1, multiprocessing_context="fork"),
}
ITERABLE_SETTINGS = {
    "batches": dict(batch_size=2),
    "drop_last": dict(batch_size=2, drop_last=True),
    "unbatched": dict(batch_size=None),
    "workers": dict(batch_size=3, num_workers=2),
}


def looks(loader):
    """Everything that a program sees of a new loader."""
    yield loader
    yield (
        loader.collate_fn,
        loader._index_sampler is (loader.batch_sampler if loader._auto_collation else loader.sampler),
    )
    yield getattr(loader.batch_sampler, "batch_size", None), loader._iterator
    yield getattr(loader.sampler, "generator", None) is loader.generator, loader.generator is None
    yield type(loader.multiprocessing_context), isinstance(type(loader).multiprocessing_context, property)
    yield attempt(len, loader), loader._IterableDataset_len_called


@rows(settings=SETTINGS, size=[8, 10])
def test_p3_p4_p8_p9_attributes_defaults_and_lengths(DataLoader, settings, size):
    yield from looks(DataLoader(Numbers(size), **settings))


@rows(settings=ITERABLE_SETTINGS, reported=[None, 5])
def test_p8_p9_defaults_and_lengths_for_iterable(DataLoader, settings, reported):
    yield from looks(DataLoader(Shards([5], reported), **settings))


@rows()
def test_p4_attributes_stay_the_same_after_an_epoch(DataLoader):
    loader = DataLoader(Numbers(4), num_workers=1)
    yield from drain(loader)
    yield loader
    yield loader._iterator, callable(loader._get_iterator), loader.check_worker_number_rationality()


@rows(attribute=["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"])
def test_p5_guarded_attributes(DataLoader, attribute):
    class Mine(DataLoader):
        pass

    for cls in (DataLoader, Mine):
        loader = cls(Numbers(4))
        error = attempt(setattr, loader, attribute, getattr(loader, attribute))
        assert isinstance(error, Raised)
        yield error


@rows()
def test_p6_generic_pickle_and_copies(DataLoader):
    assert DataLoader[int] is not None
    loader = DataLoader(Numbers(4), batch_size=3, num_workers=1)
    for twin in (loader, pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader), copy.copy(loader)):
        assert type(twin) is DataLoader
        yield twin
        yield from drain(twin)


@rows(copied=[pickle.dumps, copy.deepcopy])
def test_p6_a_live_persistent_iterator_is_not_picklable(DataLoader, copied):
    loader = DataLoader(Numbers(4), num_workers=1, persistent_workers=True)
    yield from drain(loader)
    error = attempt(copied, loader)
    assert isinstance(error, Raised)
    yield error


BAD = [
    dict(num_workers=-1),
    dict(num_workers=-1, timeout=-1),
    dict(timeout=-1),
    dict(prefetch_factor=2),
    dict(prefetch_factor=-1),
    dict(num_workers=1, prefetch_factor=-1),
    dict(num_workers=1, prefetch_factor=-1, sampler=[1], shuffle=True),
    dict(persistent_workers=True),
    dict(sampler=[0], shuffle=True),
    dict(batch_sampler=[[0]], batch_size=2),
    dict(batch_sampler=[[0]], shuffle=True),
    dict(batch_sampler=[[0]], sampler=[0]),
    dict(batch_sampler=[[0]], drop_last=True),
    dict(batch_size=None, drop_last=True),
    dict(batch_size=0),
    dict(batch_size=2.5),
    dict(batch_size=True),
    dict(drop_last="yes"),
    dict(num_workers=1, multiprocessing_context="thread"),
    dict(num_workers=1, multiprocessing_context=3),
    dict(multiprocessing_context="fork"),
    dict(unknown=1),
    dict(num_workers=None),
]
BAD_ITERABLE = [
    dict(shuffle=True),
    dict(shuffle=None, sampler=[0]),
    dict(batch_sampler=[[0]]),
    dict(batch_size=None, drop_last=True),
]


def refused(DataLoader, dataset, arguments):
    error = attempt(DataLoader, dataset, **arguments)
    assert isinstance(error, Raised)
    yield error


@rows(arguments=BAD)
def test_p7_constructor_errors_are_torchs(DataLoader, arguments):
    yield from refused(DataLoader, Numbers(4), arguments)


@rows(arguments=BAD_ITERABLE)
def test_p7_iterable_constructor_errors_are_torchs(DataLoader, arguments):
    yield from refused(DataLoader, Shards([1]), arguments)


class Silent(torch.utils.data.Dataset):
    """A dataset that has no length, and whose other methods must not be called."""

    def __len__(self):
        raise RuntimeError

    __repr__ = __str__ = __eq__ = __hash__ = __bool__ = __getitem__ = __len__


@pytest.mark.ours
@pytest.mark.parametrize(
    "dataset, arguments, text",
    [
        (Numbers(4), {}, "Numbers, 4 samples: batch_size=1, num_workers=0; in this process"),
        (
            Numbers(4),
            dict(batch_size=None, shuffle=True, num_workers=2, prefetch_factor=2, persistent_workers=True),
            "Numbers, 4 samples: batch_size=None, shuffle=True, num_workers=2, persistent_workers=True; on the engine",
        ),
        (
            Shards([1]),
            dict(num_workers="auto", pin_memory=True, multiprocessing_context="spawn", seed_by="worker"),
            "Shards: batch_size=1, num_workers='auto', pin_memory=True, multiprocessing_context=SpawnContext; "
            "on the engine",
        ),
        (
            Silent(),
            dict(sampler=LazySampler(1, []), collate_fn=len, on_error=lambda index, error: 0, name="a"),
            "Silent: batch_size=1, sampler=LazySampler, num_workers=0, collate_fn=builtin_function_or_method, "
            "on_error=<lambda>, name='a'; in this process",
        ),
        (
            Numbers(4),
            dict(batch_sampler=[[0]], num_workers=1, worker_affinity=[0, [1, 2]]),
            "Numbers, 4 samples: batch_sampler=[[0]], num_workers=1, worker_affinity=[0, [1, 2]]; on the engine",
        ),
        (
            torch.utils.data.datapipes.map.SequenceWrapper([1]),
            dict(num_workers=1),
            "_MapDataPipeSerializationWrapper, 1 sample: batch_size=1, num_workers=1; "
            "on torch's iterator: its dataset is a DataPipe",
        ),
    ],
    ids=["default", "torch", "iterable", "objects", "lists", "fallback"],
)
def test_p1_a_repr_describes_the_loader(dataset, arguments, text):
    assert repr(rustloader.DataLoader(dataset, **arguments)) == f"<DataLoader of {text}>"


@pytest.mark.ours
def test_p1_a_repr_follows_what_changes_and_never_raises():
    class Mine(rustloader.StatefulDataLoader):
        pass

    loader = Mine(Numbers(1), num_workers=1, max_restarts=2)
    plain = "Numbers, 1 sample: batch_size=1, num_workers=1, max_restarts=2"
    assert repr(loader).endswith(f"Mine of {plain}; on the engine>")
    with rustloader.installed(dispatch="shared_queue"):
        assert f"{plain.replace(', max', ', dispatch=' + repr('shared_queue') + ', max')}; on the engine" in repr(
            loader
        )
    loader.max_restarts = "many"
    assert repr(loader) == object.__repr__(loader)
    half_built = Mine.__new__(Mine)
    assert repr(half_built) == object.__repr__(half_built)


@pytest.mark.ours
@pytest.mark.parametrize(
    "name, meant",
    [
        ("num_worker", "num_workers"),
        ("prefetch", "prefetch_factor"),
        ("nonsense", None),
        ("max_restart", "max_restarts"),
    ],
)
def test_a_misspelled_argument_has_a_note_and_torchs_text(name, meant):
    with pytest.raises(TypeError) as expected:
        TorchDataLoader(range(2), **{name: 2})
    with pytest.raises(TypeError) as actual:
        DataLoader(range(2), **{name: 2})
    assert str(actual.value) == str(expected.value)
    if "Did you mean" not in str(expected.value):  # Python 3.14 has it in the text
        notes = getattr(actual.value, "__notes__", [])
        assert notes == ([] if meant is None else [f"Did you mean {meant} instead of {name}?"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from torch's half-built iterator
@rows()
def test_p7_a_prefetch_factor_of_zero_fails_in_iter(DataLoader):
    loader = DataLoader(Numbers(4), num_workers=1, prefetch_factor=0)
    yield loader
    yield attempt(iter, loader)


@pytest.mark.ours
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_s8_a_construction_that_failed_cleans_up_in_silence():
    for _ in range(3):
        with pytest.raises(AssertionError):
            iter(DataLoader(Numbers(4), num_workers=1, prefetch_factor=0))
