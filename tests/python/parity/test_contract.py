"""How libraries use the class and the live iterator, reproduced without these libraries (T4, T9, T10)."""

import contextlib
import functools
import inspect
import itertools

import pytest
from sample_data import Numbers, Shards, Value
from support import (
    BOTH,
    DataLoader,
    LoaderIter,
    TorchDataLoader,
    epoch,
    from_engine,
    gone,
    values,
    wait_until,
    worker_pids,
)
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler
from torch.utils.data import dataloader as torch_dataloader

from rustloader.settings import loader_state

TorchIter = torch_dataloader._MultiProcessingDataLoaderIter

# Lightning


def family(cls):
    return {cls}.union(*map(family, cls.__subclasses__()))


@contextlib.contextmanager
def replaced_methods(base):
    """`__init__`, `__setattr__` and `__delattr__` of a class and all its subclasses, as Lightning replaces them."""

    def init(cls, original):
        @functools.wraps(original)
        def wrapper(self, *args, **kw):
            outermost = not hasattr(self, "__pl_saved_args")
            if outermost:
                object.__setattr__(self, "__pl_saved_args", args)
                object.__setattr__(self, "__pl_saved_kwargs", kw)
            object.__setattr__(self, "__pl_inside_init", True)
            original(self, *args, **kw)
            object.__setattr__(self, "__pl_inside_init", not outermost)

        return wrapper

    def recorded(original):
        @functools.wraps(original)
        def wrapper(self, *args):
            original(self, *args)
            if not getattr(self, "__pl_inside_init", True):
                record = getattr(self, "__pl_attrs_record", [])
                object.__setattr__(self, "__pl_attrs_record", [*record, (original.__name__, *args)])

        return wrapper

    saved = []
    for cls in family(base):
        for name in ("__init__", "__setattr__", "__delattr__"):
            if name in vars(cls) or cls is base:
                original = getattr(cls, name)
                saved.append((cls, name, vars(cls).get(name)))
                setattr(cls, name, init(cls, original) if name == "__init__" else recorded(original))
    try:
        yield
    finally:
        for cls, name, before in saved:
            if before is None:
                delattr(cls, name)
            else:
                setattr(cls, name, before)


def test_p1_lightning_replaces_the_methods_of_every_loader_class():
    class Mine(DataLoader):
        def __init__(self, dataset, *args, extra=None, **kw):
            self.extra = extra
            super().__init__(dataset, *args, **kw)

    before = {cls: dict(vars(cls)) for cls in family(TorchDataLoader)}
    with replaced_methods(TorchDataLoader):
        for cls in (DataLoader, Mine):
            loader = cls(Numbers(4), 2, num_workers=1)
            assert getattr(loader, "__pl_saved_args") == (loader.dataset, 2)
            loader.worker_init_fn = None
            loader.anything = 1
            del loader.anything
            assert getattr(loader, "__pl_attrs_record") == [
                ("__setattr__", "worker_init_fn", None),
                ("__setattr__", "anything", 1),
                ("__delattr__", "anything"),
            ]
            with pytest.raises(ValueError, match="should not be set after"):
                loader.batch_size = 3
            rebuilt = type(loader)(*getattr(loader, "__pl_saved_args"), **getattr(loader, "__pl_saved_kwargs"))
            assert values(epoch(rebuilt)) == values(epoch(loader)) == [[0, 1], [2, 3]]
    assert {cls: dict(vars(cls)) for cls in before} == before
    assert values(epoch(loader)) == [[0, 1], [2, 3]]


def lightning_arguments(loader, sampler):
    """The arguments for a copy of a loader with another sampler: attributes not identical to their defaults."""
    attributes = {k: v for k, v in vars(loader).items() if not k.startswith("_")}
    attributes["multiprocessing_context"] = loader.multiprocessing_context
    parameters = dict(inspect.signature(loader.__init__).parameters)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        parameters.update(inspect.signature(DataLoader.__init__).parameters)
    differing = {name for name, p in parameters.items() if name in attributes and p.default is not attributes[name]}
    arguments = {k: v for k, v in attributes.items() if k in differing | {"dataset"}}
    if isinstance(loader.dataset, IterableDataset):
        arguments.update(batch_sampler=None, sampler=None)
    elif type(loader.batch_sampler) is not BatchSampler and loader.batch_sampler is not None:
        arguments.update(
            batch_sampler=type(loader.batch_sampler)(sampler, loader.batch_sampler.batch_size, False),
            sampler=None,
            shuffle=False,
            batch_size=1,
            drop_last=False,
        )
    else:
        arguments.update(sampler=sampler, shuffle=False, batch_sampler=None)
    return arguments


@pytest.mark.parametrize(
    "arguments",
    [
        dict(batch_size=3, num_workers=2, prefetch_factor=3, persistent_workers=True, in_order=False),
        dict(batch_size=None, num_workers=1, timeout=60, multiprocessing_context="fork"),
        dict(shuffle=True, drop_last=True, batch_size=2),
        dict(),
    ],
    ids=str,
)
def test_t4_lightning_rebuilds_a_loader_from_its_attributes(arguments):
    built = [
        type(loader)(**lightning_arguments(loader, SequentialSampler(loader.dataset)))
        for loader in (cls(Numbers(7), **arguments) for cls in BOTH)
    ]
    expected, actual = ({k: v for k, v in vars(b).items() if not k.endswith(("sampler", "dataset"))} for b in built)
    contexts = [str(d.pop("_DataLoader__multiprocessing_context")).split(" at ")[0] for d in (expected, actual)]
    assert actual == expected and contexts[0] == contexts[1]
    assert sorted(map(str, values(epoch(built[1])))) == sorted(map(str, values(built[0])))
    iterable = DataLoader(Shards([3]), num_workers=1, batch_size=None)
    assert len(epoch(type(iterable)(**lightning_arguments(iterable, None)))) == 3


def test_p1_fabric_and_ray_copy_the_attributes_of_a_loader():
    class Wrapped(DataLoader):
        """The constructor of its base class is never called."""

        def __init__(self, loader):
            self.__dict__.update(loader.__dict__)
            self._loader = loader

        def __iter__(self):
            for batch in self._loader:
                yield batch + 1

        def __len__(self):
            return len(self._loader)

    for base in BOTH:
        wrapped = Wrapped(base(Numbers(4), num_workers=1, batch_size=2))
        assert isinstance(wrapped, TorchDataLoader) and len(wrapped) == 2 and wrapped.batch_size == 2
        assert values(list(wrapped)) == [[1, 2], [3, 4]]
        with from_engine(2):
            assert values(super(Wrapped, wrapped).__iter__()) == [[0, 1], [2, 3]]


# accelerate and transformers

ACCELERATE = (
    "batch_size collate_fn num_workers pin_memory timeout worker_init_fn multiprocessing_context generator "
    "prefetch_factor persistent_workers pin_memory_device in_order"
).split()


class Adapter:
    """A wrapper that poses as its loader, and looks one batch ahead."""

    def __init__(self, loader, batch_sampler):
        ignored = ("batch_size",)
        copied = {name: getattr(loader, name) for name in ACCELERATE if name not in ignored}
        self.base = type(loader)(loader.dataset, batch_sampler=batch_sampler, **copied)

    def __getattr__(self, name):
        return getattr(self.base, name)

    @property
    def __class__(self):
        return self.base.__class__

    def __len__(self):
        return len(self.base)

    def __iter__(self):
        iterator = iter(self.base)
        try:
            ahead = next(iterator)
        except StopIteration:
            return
        while True:
            try:
                current, ahead = ahead, next(iterator)
                yield current
            except StopIteration:
                yield ahead
                return


class Sharded(BatchSampler):
    """Every `num_processes`-th batch; training loops write to this attribute."""

    num_processes = 2

    def __iter__(self):
        return itertools.islice(super().__iter__(), 1, None, self.num_processes)


@pytest.mark.parametrize("persistent", [False, True])
def test_t10_accelerate_copies_attributes_and_looks_one_batch_ahead(persistent):
    loader = DataLoader(Numbers(11), batch_size=2, num_workers=2, prefetch_factor=3, persistent_workers=persistent)
    adapter = Adapter(loader, Sharded(SequentialSampler(loader.dataset), 2, False))
    assert isinstance(adapter, DataLoader) and adapter.prefetch_factor == 3
    adapter.batch_sampler.num_processes = 3
    with from_engine(4):
        for _ in range(2):
            kept = list(adapter)
            assert values(kept) == [[2, 3], [8, 9]]


@pytest.mark.ours
def test_t9_the_class_has_no_state_dict():
    """Lightning and accelerate would call it at every batch, and write into its result."""
    loader = DataLoader(Numbers(4), num_workers=1)
    for thing in (loader, iter(loader)):
        assert not hasattr(thing, "state_dict") and not hasattr(thing, "load_state_dict")


# ultralytics and timm


class Forever:
    """A sampler that restarts endlessly."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class Infinite(DataLoader):
    """As in ultralytics: it bypasses the guard, and one iterator lives as long as the loader."""

    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        object.__setattr__(self, "batch_sampler", Forever(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)

    def reset(self):
        self.iterator = self._get_iterator()

    def close(self):
        for worker in self.iterator._workers:
            if worker.is_alive():
                worker.terminate()
        self.iterator._shutdown_workers()


def test_p5_ultralytics_replaces_the_batch_sampler_and_resets():
    dataset = Value(5)
    loader = Infinite(dataset, batch_size=2, num_workers=2)
    assert len(loader) == 3
    for _ in range(3):
        assert values(list(loader)) == [[0, 0], [0, 0], [0]]
    dataset.value = 7  # as `close_mosaic` does
    first = worker_pids(loader.iterator)
    loader.reset()
    assert values(list(loader)) == [[7, 7], [7, 7], [7]]
    assert wait_until(lambda: all(map(gone, first)))
    last = worker_pids(loader.iterator)
    if DataLoader is not TorchDataLoader:  # torch's SIGCHLD handler raises in whatever runs next
        loader.close()
        assert all(map(gone, last))


# fastai, ignite, mmengine, detectron2


def test_the_iterator_reads_of_its_loader_what_torchs_reads():
    def read_by(iterator_class, cls):
        real, read = cls(Numbers(4), num_workers=1, batch_size=2), set()

        class Spy:
            def __getattr__(self, name):
                read.add(name)
                return getattr(real, name)

        assert values(iterator_class(Spy())) == [[0, 1], [2, 3]]
        return read

    # The attributes of options that torch does not have may be missing.
    own = {loader_state.GIVEN, loader_state.AUTO}
    assert read_by(LoaderIter, DataLoader) - own <= read_by(TorchIter, TorchDataLoader)
