"""The class itself: signature, attributes, guards, constructor errors, length (P1 to P9)."""

import copy
import inspect
import pickle
import typing
from collections.abc import Iterable

import pytest
import torch
from sample_data import LazySampler, Numbers, Shards, as_list
from support import BOTH, DataLoader, TorchDataLoader, epoch, outcome, values
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, default_collate, default_convert

PUBLIC = {
    "batch_sampler",
    "batch_size",
    "collate_fn",
    "dataset",
    "drop_last",
    "generator",
    "in_order",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "sampler",
    "timeout",
    "worker_init_fn",
}
PRIVATE = {
    "_dataset_kind",
    "_iterator",
    "_IterableDataset_len_called",
    "_DataLoader__initialized",
    "_DataLoader__multiprocessing_context",
}

ARGUMENTS = {
    "plain": dict(),
    "batched": dict(batch_size=4, shuffle=True, drop_last=True),
    "workers": dict(num_workers=2, prefetch_factor=3, persistent_workers=True, timeout=5, in_order=False),
    "batch_sampler": dict(batch_sampler=[[0, 1], [2]]),
    "unbatched": dict(batch_size=None, sampler=[3, 1, 2]),
    "context": dict(num_workers=1, multiprocessing_context="fork"),
}


def test_p1_is_a_pure_python_subclass():
    loader = DataLoader(Numbers(3))
    assert isinstance(loader, TorchDataLoader)
    assert issubclass(DataLoader, TorchDataLoader)
    assert DataLoader.__name__ == "DataLoader"
    assert type(DataLoader) is type(TorchDataLoader)
    assert "__slots__" not in vars(DataLoader)
    assert loader.__dict__ is vars(loader)


def test_p1_says_of_its_attributes_what_torchs_class_says():
    assert TorchDataLoader.__annotations__ and DataLoader.__annotations__ == TorchDataLoader.__annotations__
    assert DataLoader.__parameters__ == TorchDataLoader.__parameters__
    if DataLoader is not TorchDataLoader:
        assert DataLoader.__annotations__ is not TorchDataLoader.__annotations__

    def hints(cls, names):
        return outcome(lambda: typing.get_type_hints(cls, localns=names))

    # torch imports some of the names for type checkers alone.
    for names in ({}, {"Iterable": Iterable}):
        assert hints(DataLoader, names) == hints(TorchDataLoader, names)
    assert "dataset" in typing.get_type_hints(DataLoader, localns=names)


def test_p1_libraries_may_wrap_the_methods_of_a_subclass():
    calls = []

    class Mine(DataLoader):
        pass

    init = Mine.__init__

    def wrapped(self, *args, **kw):
        calls.append(args)
        init(self, *args, **kw)

    Mine.__init__ = wrapped
    Mine.__setattr__ = lambda self, name, value: (calls.append(name), object.__setattr__(self, name, value))[1]
    Mine.__delattr__ = lambda self, name: object.__delattr__(self, name)
    loader = Mine(Numbers(2))
    object.__setattr__(loader, "__pl_saved_args", (1, 2))
    assert "dataset" in calls and getattr(loader, "__pl_saved_args") == (1, 2)
    loader.anything = 3
    del loader.anything
    other = Mine(Numbers(9))
    other.__dict__.update(loader.__dict__)
    assert values(epoch(other)) == [[0], [1]]


def test_p2_signature_is_torchs():
    """With options behind them that torch does not have: test_options.py."""
    ours, theirs = (list(inspect.signature(cls).parameters.values()) for cls in (DataLoader, TorchDataLoader))
    assert [(p.name, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.kind) for p in theirs]
    assert all(mine.default is torchs.default for mine, torchs in zip(ours, theirs, strict=False))
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in ours[len(theirs) :])


@pytest.mark.parametrize("name", ARGUMENTS)
def test_p3_p4_attributes_are_exactly_torchs(name):
    ours, theirs = (cls(Numbers(8), **ARGUMENTS[name]) for cls in reversed(BOTH))
    assert set(vars(ours)) == PUBLIC | PRIVATE
    assert set(vars(ours)) == set(vars(theirs))
    for key in PUBLIC - {"dataset", "sampler", "batch_sampler"}:
        assert getattr(ours, key) == getattr(theirs, key), key
    for key in ("sampler", "batch_sampler", "dataset"):
        assert type(getattr(ours, key)) is type(getattr(theirs, key))
    assert not hasattr(ours, "shuffle")
    assert ours._auto_collation == theirs._auto_collation
    assert ours._index_sampler is (ours.batch_sampler if ours._auto_collation else ours.sampler)
    assert ours._dataset_kind == theirs._dataset_kind
    assert ours._iterator is None
    assert type(ours.multiprocessing_context) is type(theirs.multiprocessing_context)
    assert isinstance(DataLoader.multiprocessing_context, property)


def test_p4_attributes_stay_the_same_after_an_epoch():
    loader = DataLoader(Numbers(4), num_workers=1)
    before = set(vars(loader))
    epoch(loader)
    assert set(vars(loader)) == before and loader._iterator is None
    assert callable(loader._get_iterator) and loader.check_worker_number_rationality() is None


@pytest.mark.parametrize(
    "attribute", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_p5_guarded_attributes(attribute):
    class Mine(DataLoader):
        pass

    for cls in (DataLoader, Mine):
        loader = cls(Numbers(4))
        with pytest.raises(ValueError) as caught:
            setattr(loader, attribute, getattr(loader, attribute))
        assert str(caught.value) == f"{attribute} attribute should not be set after {cls.__name__} is initialized"


def test_p5_escape_hatches():
    loader = DataLoader(Numbers(4))
    object.__setattr__(loader, "batch_sampler", [[3, 2]])
    assert values(epoch(loader)) == [[3, 2]]
    loader._DataLoader__initialized = False
    loader.batch_sampler = [[1], [0]]
    loader._DataLoader__initialized = True
    assert values(epoch(loader)) == [[1], [0]]


def test_p5_other_attributes_are_read_at_the_next_iter():
    loader = DataLoader(Numbers(4), num_workers=1)
    epoch(loader)
    loader.collate_fn = as_list
    loader.num_workers = 2
    loader.prefetch_factor = 3
    loader.timeout = 70
    iterator = iter(loader)
    assert len(iterator._workers) == 2
    assert (iterator._prefetch_factor, iterator._timeout) == (3, 70)
    assert next(iterator) == [torch.tensor(0)]
    loader.num_workers, loader.prefetch_factor, loader.timeout = 0, None, 0
    assert len(epoch(loader)) == 4


def test_p6_generic_pickle_and_copies():
    assert DataLoader[int] is not None
    loader = DataLoader(Numbers(4), batch_size=3, num_workers=1)
    epoch(loader)
    for twin in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader), copy.copy(loader)):
        assert type(twin) is DataLoader
        assert set(vars(twin)) == set(vars(loader))
        assert values(epoch(twin)) == [[0, 1, 2], [3]]


def test_p6_a_live_persistent_iterator_is_not_picklable():
    loader = DataLoader(Numbers(4), num_workers=1, persistent_workers=True)
    epoch(loader)
    for fn in (pickle.dumps, copy.deepcopy):
        with pytest.raises(NotImplementedError) as caught:
            fn(loader)
        assert caught.value.args == ("{} cannot be pickled", "_MultiProcessingDataLoaderIter")


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


@pytest.mark.parametrize("arguments", BAD, ids=str)
def test_p7_constructor_errors_are_torchs(arguments):
    theirs, ours = (outcome(lambda cls=cls: cls(Numbers(4), **arguments)) for cls in BOTH)
    assert ours[0] == "error"
    assert ours == theirs


BAD_ITERABLE = [
    dict(shuffle=True),
    dict(shuffle=None, sampler=[0]),
    dict(batch_sampler=[[0]]),
    dict(batch_size=None, drop_last=True),
]


@pytest.mark.parametrize("arguments", BAD_ITERABLE, ids=str)
def test_p7_iterable_constructor_errors_are_torchs(arguments):
    theirs, ours = (outcome(lambda cls=cls: cls(Shards([1]), **arguments)) for cls in BOTH)
    assert ours[0] == "error"
    assert ours == theirs


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_p7_a_prefetch_factor_of_zero_fails_in_iter():
    loader = DataLoader(Numbers(4), num_workers=1, prefetch_factor=0)
    assert loader.prefetch_factor == 0
    with pytest.raises(
        AssertionError, match="prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
    ):
        iter(loader)


@pytest.mark.ours
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_s8_a_construction_that_failed_cleans_up_in_silence():
    for _ in range(3):
        with pytest.raises(AssertionError):
            iter(DataLoader(Numbers(4), num_workers=1, prefetch_factor=0))


def test_p8_defaults_for_map_style():
    generator = torch.Generator()
    loader = DataLoader(Numbers(4), shuffle=True, generator=generator)
    assert type(loader.sampler) is RandomSampler and loader.sampler.generator is generator
    loader = DataLoader(Numbers(4), batch_size=3)
    assert type(loader.sampler) is SequentialSampler and type(loader.batch_sampler) is BatchSampler
    assert loader.batch_sampler.batch_size == 3 and loader.collate_fn is default_collate
    loader = DataLoader(Numbers(4), batch_size=None)
    assert loader.batch_sampler is None and loader.collate_fn is default_convert
    loader = DataLoader(Numbers(4), batch_sampler=[[0]])
    assert loader.batch_size is None and loader.drop_last is False


def test_p8_defaults_for_iterable():
    loader = DataLoader(Shards([3]), batch_size=2)
    assert type(loader.sampler) is torch.utils.data.dataloader._InfiniteConstantSampler
    assert type(loader.batch_sampler) is BatchSampler and loader.batch_sampler.batch_size == 2
    loader = DataLoader(Shards([3]), batch_size=None)
    assert loader.batch_sampler is None and loader.collate_fn is default_convert


def test_p9_length():
    assert len(DataLoader(Numbers(10), batch_size=3)) == 4
    assert len(DataLoader(Numbers(10), batch_size=3, drop_last=True)) == 3
    assert len(DataLoader(Numbers(10), batch_size=None)) == 10
    assert len(DataLoader(Numbers(10), sampler=LazySampler(7, []))) == 7
    assert len(DataLoader(Numbers(10), batch_sampler=[[0], [1]])) == 2
    assert len(DataLoader(Numbers(0))) == 0
    loader = DataLoader(Shards([5], reported=5), batch_size=2)
    assert loader._IterableDataset_len_called is None
    assert len(loader) == 3 and loader._IterableDataset_len_called == 5
    assert len(DataLoader(Shards([5], reported=5), batch_size=2, drop_last=True)) == 2
    with pytest.raises(TypeError):
        len(DataLoader(Shards([5])))


def test_p10_length_of_the_iterator():
    loader = DataLoader(Numbers(10), batch_size=3, num_workers=1)
    iterator = iter(loader)
    assert iter(iterator) is iterator and len(iterator) == 4


def test_t4_a_loader_can_be_rebuilt_from_its_public_attributes():
    loader = DataLoader(Numbers(7), batch_size=None, num_workers=1)
    public = {k: v for k, v in vars(loader).items() if not k.startswith("_")}
    assert values(epoch(type(loader)(**public))) == list(range(7))
