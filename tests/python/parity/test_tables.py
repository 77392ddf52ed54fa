"""Tables: the batches of a TensorDataset are gathered, and equal those of torch's fetcher and default_collate."""

import random
import subprocess
import sys
import types

import pytest
import torch
from differential import describe
from pinning_support import pinning
from roundtrip.compare import Record
from support import DataLoader, TorchDataLoader, epoch, first_line, within
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset, get_worker_info
from torch.utils.data._utils import collate, fetch

from rustloader import _core
from rustloader.fetch import tables

pytestmark = pytest.mark.ours

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


@pytest.fixture
def gathered(monkeypatch):
    """The list of the batches that this process gathers."""
    batches = []

    def counted(tensors, index):
        batch = _core.gather(tensors, index)
        if batch is not None:
            batches.append(batch)
        return batch

    monkeypatch.setattr("rustloader.iterator.single.gather", counted)
    return batches


def content(size, dtype):
    """Random elements of any dtype."""
    count = torch.Size(size).numel()
    if dtype == torch.bool:
        return (torch.arange(count) % 3 == 0).reshape(size)
    itemsize = torch.empty((), dtype=dtype).element_size()
    numbers = torch.randint(0, 120, (count * itemsize,), dtype=torch.uint8)
    return numbers.view(dtype).reshape(size)


def random_tensor(rng, length):
    """A tensor of some dtype, shape and strides, whose rows are contiguous or not."""
    dtype = rng.choice(DTYPES)
    row = [rng.choice([0, 1, 1, 2, 3, 4, 7]) for _ in range(rng.randrange(5))]
    kind = rng.choice(["plain", "plain", "step", "narrow", "expanded", "transposed", "channels", "offset"])
    if kind == "step":
        return content([length * 2, *row], dtype)[::2]
    if kind == "narrow" and row:
        return content([length, *row[:-1], row[-1] + 2], dtype)[..., 1 : 1 + row[-1]]
    if kind == "expanded":
        return content([1, *row], dtype).expand(length, *row)
    if kind == "transposed":
        return content([*row, length], dtype).movedim(-1, 0)
    if kind == "channels" and len(row) == 3:
        return content([length, row[1], row[2], row[0]], dtype).permute(0, 3, 1, 2)
    if kind == "offset":
        return content([length + 3, *row], dtype)[3:]
    return content([length, *row], dtype)


def forms(batches):
    """All properties of delivered tensors that a program can see, except where their memory is."""
    return describe.value(list(batches))


def random_table(rng):
    length = rng.choice([1, 2, 5, 23])
    table = TensorDataset(*(random_tensor(rng, length) for _ in range(rng.randint(1, 3))))
    for _ in range(rng.choice([0, 0, 1, 2])):
        count = rng.randint(1, 2 * length)
        indices = [rng.randrange(-length, length) for _ in range(count)]
        table, length = (
            Subset(table, rng.choice([indices, tuple(indices), range(length), torch.tensor(indices)])),
            count,
        )
        length = len(table)
    return table


@pytest.mark.parametrize("part", range(8))
def test_random_tables_without_workers(part, gathered):
    rng = random.Random(part)
    torch.manual_seed(part)
    for _ in range(60):
        table = random_table(rng)
        kw = dict(batch_size=rng.choice([1, 2, 4, 30]), drop_last=rng.random() < 0.3)
        if len(table) > 0:
            kw["shuffle"] = rng.random() < 0.5
        torch.manual_seed(9)
        expected = list(TorchDataLoader(table, **kw))
        torch.manual_seed(9)
        actual = list(DataLoader(table, **kw))
        assert all(tensor.untyped_storage().resizable() for batch in actual for tensor in batch)
        assert Record(actual).facts == Record(expected).facts
    assert len(gathered) > 60


WAYS = {
    "one worker": dict(num_workers=1),
    "two workers": dict(num_workers=2),
    "persistent": dict(num_workers=2, persistent_workers=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", range(3))
def test_random_tables_with_workers(way, part):
    rng = random.Random(part + 100)
    torch.manual_seed(part)
    for _ in range(3):
        table = random_table(rng)
        kw = dict(batch_size=rng.choice([2, 4]), **WAYS[way])
        with within(120):
            expected, loader = list(TorchDataLoader(table, **kw)), DataLoader(table, **kw)
            for _ in range(2):
                assert forms(epoch(loader)) == forms(expected)


class Recording(torch.utils.data.Sampler):
    """Yields the index batches that it was given."""

    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def outcome(cls, table, batch, **kw):
    """The properties of the one batch, or of the error."""
    loader = cls(table, batch_sampler=Recording(batch), **kw)
    try:
        (delivered,) = loader
    except Exception as error:
        text = str(error)
        return type(error), first_line(error), text.count("Traceback"), text.strip().splitlines()[-1:]
    return forms([delivered])


INDICES = [
    [],
    [-1, -10],
    [-11],
    [3, 10],
    [9, 9, 0],
    [True, False],
    [torch.tensor(3), 4],
    [2**70],
    [-(2**70)],
    [2**63],
    [None],
    [1.5],
    ["a"],
    (1, 2),
    range(3),
    torch.tensor([1, 2]),
    [[1, 2]],
    [slice(0, 2)],
]


@pytest.mark.parametrize("number", range(len(INDICES)))
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("subset", [False, True])
def test_index_batches_of_any_kind(number, workers, subset):
    table = TensorDataset(torch.arange(30.0).reshape(10, 3), torch.arange(10))
    if subset:
        table = Subset(table, [7, 3, 3, -1, 0, 1, 2, 5, 6, 9])
    batch = INDICES[number]
    if workers and any(isinstance(part, torch.Tensor) for part in [batch, *batch]):
        workers = 0  # torch's loader leaves behind a shared file for each tensor that it sends to a worker
    with within(60):
        actual = outcome(DataLoader, table, batch, num_workers=workers)
        assert actual == outcome(TorchDataLoader, table, batch, num_workers=workers)


def test_tensors_that_change_after_construction(gathered):
    def changed(change):
        table = TensorDataset(torch.arange(30.0).reshape(10, 3), torch.arange(10))
        change(table)
        return table

    def shorter(table):
        table.tensors = (table.tensors[0], table.tensors[1][:4])

    def as_list(table):
        table.tensors = list(table.tensors)

    def empty(table):
        table.tensors = ()

    def of_two(table):
        table.tensors = (table.tensors[0], [1] * 10)

    def same(table):
        table.tensors = (table.tensors[0],) * 2

    def scalar(table):
        table.tensors = (torch.tensor(3),)

    for change in (shorter, as_list, empty, of_two, same, scalar):
        for batch in ([0, 3], [3, 4], [9]):
            actual = outcome(DataLoader, changed(change), batch)
            assert actual == outcome(TorchDataLoader, changed(change), batch), (change, batch)
    assert len(gathered) == 4  # `shorter` once, `same` three times


def test_a_change_in_the_middle_of_an_epoch(gathered):
    """torch reads the tensors, the indices and the fetcher's attributes again for each batch."""

    def play(cls):
        data = torch.arange(12)
        indices = list(range(12))
        table = TensorDataset(data)
        iterator = iter(cls(Subset(table, indices), batch_size=2))
        seen = [next(iterator)]
        data += 100
        seen.append(next(iterator))
        indices[4:6] = [0, 1]
        seen.append(next(iterator))
        table.tensors = (torch.arange(12.0),)
        seen.append(next(iterator))
        iterator._dataset_fetcher.collate_fn = list
        seen.append([column for sample in next(iterator) for column in sample])
        iterator._dataset_fetcher.collate_fn = collate.default_collate
        iterator._dataset_fetcher.dataset = TensorDataset(torch.arange(12) * 2)
        seen.append(next(iterator))
        return [[(tensor.dtype, tensor.tolist()) for tensor in batch] for batch in seen]

    assert play(DataLoader) == play(TorchDataLoader)
    assert len(gathered) == 5


# Loaders whose batches are not gathered


def ordinary(gathered, table, **kw):
    """A batch, which must be torch's and not gathered."""
    before = len(gathered)
    batch = outcome(DataLoader, table, [1, 2], **kw)
    assert batch == outcome(TorchDataLoader, table, [1, 2], **kw)
    assert len(gathered) == before
    return batch


def gathers(gathered, table, **kw):
    before = len(gathered)
    outcome(DataLoader, table, [1, 2], **kw)
    return len(gathered) == before + 1


@pytest.fixture
def table(gathered):
    dataset = TensorDataset(torch.arange(10.0).reshape(5, 2), torch.arange(5))
    assert gathers(gathered, dataset)
    return dataset


class OwnTable(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)[:1]


class OwnSubset(Subset):
    pass


class Columns(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return (torch.tensor(index),)


class OwnTensor(torch.Tensor):
    pass


def plain():
    return torch.arange(10.0).reshape(5, 2)


# Datasets that are not tables of plain tensors.
ORDINARY = {
    "own table": lambda table: OwnTable(*table.tensors),
    "own subset": lambda table: OwnSubset(table, range(5)),
    "columns": lambda table: Columns(),
    "stacked": lambda table: StackDataset(*table.tensors),
    "subset of columns": lambda table: Subset(Columns(), range(5)),
    "indices in a tensor": lambda table: Subset(table, torch.arange(5)),
    "grad": lambda table: TensorDataset(plain().requires_grad_()),
    "conj": lambda table: TensorDataset(torch.complex(plain(), plain()).conj()),
    "neg": lambda table: TensorDataset(torch.complex(plain(), plain()).conj().imag),
    "rows": lambda table: TensorDataset(plain().t().contiguous().t()),
    "parameter": lambda table: TensorDataset(torch.nn.Parameter(plain())),
    "subclass": lambda table: TensorDataset(plain().as_subclass(OwnTensor)),
    "sparse": lambda table: TensorDataset(plain().to_sparse()),
    "quantized": lambda table: TensorDataset(torch.quantize_per_tensor(plain(), 0.1, 0, torch.quint8)),
    "meta": lambda table: TensorDataset(plain().to("meta")),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ORDINARY)
def test_other_datasets(kind, table, gathered):
    dataset, before = ORDINARY[kind](table), len(gathered)
    actual, expected = (described(cls, dataset) for cls in (DataLoader, TorchDataLoader))
    assert actual == expected and len(gathered) == before


def described(cls, dataset):
    """The type of each tensor of a batch, and what can be told of it; or the error."""
    try:
        batch = next(iter(cls(dataset, batch_size=3)))
        return [(type(x), str(x), x.requires_grad, x.layout, x.is_conj()) for x in batch]
    except Exception as error:
        return type(error), first_line(error)


def doubled(self, index):
    return tuple(tensor[index] * 2 for tensor in self.tensors)


def batched(self, indices):
    return [(torch.tensor(7),) for _ in indices]


def twice(batch, *, collate_fn_map=None):
    return torch.stack(list(batch) * 2)


def tuples(batch, *, collate_fn_map=None):
    return [torch.tensor(len(batch))]


KINDS = collate.default_collate_fn_map
# Functions of torch that a program may replace.
REPLACED = {
    "getitem": lambda patch: patch.setattr(TensorDataset, "__getitem__", doubled),
    "getitems": lambda patch: patch.setattr(TensorDataset, "__getitems__", batched, raising=False),
    "getitems of the base": lambda patch: patch.setattr(Dataset, "__getitems__", batched, raising=False),
    "tensors": lambda patch: patch.setitem(KINDS, torch.Tensor, twice),
    "no tensors": lambda patch: patch.delitem(KINDS, torch.Tensor),
    "tuples": lambda patch: patch.setitem(KINDS, tuple, tuples),
    "objects": lambda patch: patch.setitem(KINDS, object, tuples),
    "collate": lambda patch: patch.setattr(collate, "collate", lambda batch, collate_fn_map: tuples(batch)),
    "stack": lambda patch: patch.setattr(torch, "stack", lambda tensors, *args, out=None: torch.zeros(3)),
    "fetch": lambda patch: patch.setattr(fetch._MapDatasetFetcher, "fetch", lambda self, index: [torch.tensor(1)]),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", REPLACED)
def test_replaced_functions_of_torch(name, late, table, gathered):
    """They are replaced before the iterator is created, or after."""
    before, seen = len(gathered), []
    for cls in (DataLoader, TorchDataLoader):
        with pytest.MonkeyPatch.context() as patch:
            if not late:
                REPLACED[name](patch)
            iterator = iter(cls(table, batch_size=2))
            if late:
                REPLACED[name](patch)
            try:
                seen.append(forms([next(iterator)]))
            except TypeError as error:
                seen.append(str(error))
    assert seen[0] == seen[1] and len(gathered) == before
    assert gathers(gathered, table)


def test_replaced_functions_of_an_instance(table, gathered, monkeypatch):
    subset = Subset(table, range(5))
    for instance in (table, subset):
        monkeypatch.setattr(instance, "__getitems__", types.MethodType(batched, instance), raising=False)
        ordinary(gathered, instance)
        monkeypatch.undo()
    monkeypatch.setattr(Subset, "__getitems__", batched)
    ordinary(gathered, subset)
    # Python does not look `__getitem__` up on the instance.
    table.__getitem__ = doubled
    assert outcome(DataLoader, table, [1]) == outcome(TorchDataLoader, table, [1])


def test_modes_of_torch(table, gathered):
    for mode in (torch.inference_mode(), torch.no_grad(), torch.autocast("cpu"), torch.device("cpu")):
        seen = []
        for cls in (DataLoader, TorchDataLoader):
            iterator = iter(cls(table, batch_size=2))
            with mode:
                seen.append(forms([next(iterator)]))
        assert seen[0] == seen[1]
    with torch.inference_mode():
        table = TensorDataset(torch.arange(6.0))
    assert forms(DataLoader(table, batch_size=2)) == forms(TorchDataLoader(table, batch_size=2))

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen = []
    iterator = iter(DataLoader(table, batch_size=2))
    with Counting():
        next(iterator)
    assert torch.stack in seen


@pytest.mark.parametrize("owner, name", [("torch", "stack"), ("torch.Tensor", "__getitem__")])
def test_functions_that_were_replaced_before_the_import(owner, name):
    script = f"""
import torch
torchs = {owner}.{name}
{owner}.{name} = lambda *args, **kw: torchs(*args, **kw) * 2
import rustloader
loader = rustloader.DataLoader(rustloader.TensorDataset(torch.arange(4)), batch_size=2)
print([batch.tolist() for batch, in loader])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[[0, 2], [4, 6]]\n"


def test_a_replaced_new_empty_is_not_written_to(table, gathered, monkeypatch):
    before = len(gathered)
    for wrong in (torch.zeros(1), torch.zeros(4, dtype=torch.float64), torch.zeros(4, 2).t(), "no tensor"):
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, wrong=wrong, **kw: wrong)
        assert outcome(DataLoader, table, [1, 2, 3, 0]) == outcome(TorchDataLoader, table, [1, 2, 3, 0])
    assert len(gathered) == before


def patch_in_worker(worker_id):
    collate.default_collate_fn_map[torch.Tensor] = lambda batch, collate_fn_map=None: torch.zeros(2)


def double_in_worker(worker_id):
    get_worker_info().dataset.tensors[0].mul_(2)


@pytest.mark.parametrize("init", [None, patch_in_worker, double_in_worker])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_start_methods_and_what_workers_change(init, method):
    def play(cls):
        table = TensorDataset(torch.arange(2000.0).reshape(10, 200), torch.arange(10))
        kw = dict(batch_size=5, num_workers=1, multiprocessing_context=method, worker_init_fn=init)
        return forms(cls(table, **kw))

    with within(120):
        assert play(DataLoader) == play(TorchDataLoader)


@pytest.mark.parametrize("workers", [0, 1])
def test_pinning(workers):
    table = TensorDataset(torch.randn(100, 64), torch.arange(100))
    kw = dict(batch_size=50, num_workers=workers, pin_memory=True)
    with pinning() as host, within(60):
        batches = list(DataLoader(table, **kw))
        assert all(host.owns(tensor) for batch in batches for tensor in batch)
        seen = [[tensor.tolist() for tensor in batch] for batch in batches]
        del batches
    assert seen == [[tensor.tolist() for tensor in batch] for batch in TorchDataLoader(table, batch_size=50)]


@pytest.mark.parametrize("workers", [0, 1])
def test_no_sample_is_read_one_by_one(workers):
    """A worker gathers, too: no item of a table is ever read by itself."""

    def play():
        with pytest.MonkeyPatch.context() as patch:
            # The same function, so that it is taken for torch's own.
            patch.setattr(tables, "_getitem", refuse)
            patch.setattr(TensorDataset, "__getitem__", refuse)
            return forms(DataLoader(table, batch_size=4, num_workers=workers))

    def refuse(self, index):
        raise AssertionError("a sample was read")

    table = TensorDataset(torch.arange(8192.0).reshape(8, 1024))
    with within(60):
        assert play() == forms(TorchDataLoader(table, batch_size=4))


def test_unknown_code_takes_the_ordinary_way(table, gathered, monkeypatch):
    assert tables._torch_is_known
    monkeypatch.setattr(tables, "_torch_is_known", False)
    ordinary(gathered, table)
