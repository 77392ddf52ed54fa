"""Definitions that workers under spawn and forkserver cannot import are sent by value (T32)."""

import importlib
import io
import linecache
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from multiprocessing import reduction

import pytest
import torch
from orders import Holds
from sample_data import Numbers
from support import DataLoader, run_script

from rustloader.workers import arguments, by_name, definitions

pytestmark = [pytest.mark.ours, pytest.mark.timeout(400)]

METHODS = ["spawn", "forkserver"]
# Matches the text of the standard pickle's error.
LAMBDA = r"(pickle|local object).*lambda"

# Everything that a notebook may define: each class and function is in `__main__`, which has no file.
DEFINE = """
import collections, dataclasses, enum, functools, logging, os, pickle, sys
import torch, rustloader
from rustloader import DataLoader
from rustloader.stateful_dataloader import StatefulDataLoader

logging.getLogger("rustloader").addHandler(logging.StreamHandler(sys.stdout))
SCALE, SEEN = 10, None

class Kind(enum.Enum):
    ODD, EVEN = 1, 0

@dataclasses.dataclass
class Item:
    value: int
    kind: Kind
    seen: object = None

class Outer:
    class Inner:
        def __init__(self, value):
            self.value = value

class Oops(Exception):
    pass

Index = collections.namedtuple("Index", "value")

@functools.cache
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

@functools.lru_cache(maxsize=7)
def square(n):
    "Squares."
    return n * n

fib(3)

class Squares(torch.utils.data.Dataset):
    def __init__(self, n=6):
        self.inner, self.n, self.square = Outer.Inner(SCALE), n, square
    def __len__(self):
        return self.n
    @functools.cached_property
    def table(self):
        return [fib(i) for i in range(20)]
    @functools.lru_cache
    def third(self, i):
        return 3 * i
    def __getitem__(self, i):
        if isinstance(i, Index):
            i = i.value
        if i == 5:
            raise Oops("five")
        # Other code can look the class up by its name, too.
        assert type(pickle.loads(pickle.dumps(Item(0, Kind.ODD)))) is Item
        # Functions with caches are one object wherever they are used.
        assert self.square is square and square.__doc__ == "Squares." and square.cache_info().maxsize == 7
        assert self.table is self.table and fib.cache_info().currsize == 20 and self.third(i) == 3 * i
        return Item(square(i) + self.inner.value, Kind(i % 2), SEEN), Outer.Inner(i)

class Counts(torch.utils.data.IterableDataset):
    def __init__(self):
        self.at = Item(0, Kind.EVEN)
    def __iter__(self):
        while self.at.value < 6:
            self.at.value += 1
            yield self.at.value
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        assert type(state["at"]) is Item
        self.at = state["at"]

def init_function(word):
    @functools.cache
    def init(worker):
        global SEEN
        SEEN = f"{word} {worker}"
    return init
"""
RUN = """
def check(loader):
    got, errors = [], []
    iterator = iter(loader)
    while True:
        try:
            (item, inner), = next(iterator)
        except StopIteration:
            break
        except Oops as error:
            errors.append(type(error) is Oops and "five" in str(error))
            continue
        assert type(item) is Item and type(inner) is Outer.Inner and item.kind in list(Kind), item
        got.append((item.value, item.kind.name, item.seen, inner.value))
    return got, errors

def main(method, *, briefly=False):
    given = dict(multiprocessing_context=method, worker_init_fn=init_function("init"), collate_fn=lambda them: them)
    if briefly:
        print(*check(DataLoader(Squares(), num_workers=1, **given)))
        return
    for workers in (1, 2):
        print(*check(DataLoader(Squares(), num_workers=workers, **given)))
    indices = [Index(2), Index(3)]
    print(*check(DataLoader(Squares(), sampler=indices, num_workers=1, persistent_workers=True, **given)))

    loader = StatefulDataLoader(Counts(), batch_size=None, num_workers=1, multiprocessing_context=method)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    other = StatefulDataLoader(Counts(), batch_size=None, num_workers=1, multiprocessing_context=method)
    other.load_state_dict(state)
    print(first, list(other), rustloader.engine_batches())
"""
ROWS = [(i * i + 10, "ODD" if i % 2 else "EVEN", i) for i in range(5)]


def lines(*indices, workers=1, errors=()):
    """The line that is printed for a call of `check`."""
    items = [(ROWS[i][0], ROWS[i][1], f"init {k % workers}", i) for k, i in enumerate(indices)]
    return f"{items} {list(errors)}"


EXPECTED = [
    lines(*range(5), errors=[True]),
    lines(*range(5), workers=2, errors=[True]),
    lines(2, 3),
    "[1, 2, 3] [4, 5, 6] 18",
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("where", ["-c", "stdin", "script"])
def test_t32_everything_of_main(where, method, tmp_path):
    """torch's workers die when they try to run the file `<stdin>`. A script is imported: its classes are sent by name,
    as with torch; its lambda and its local function by value."""
    is_brief = where == "stdin" or (where == "script" and method == "spawn")
    call = f"main({method!r}, briefly={is_brief})\n"
    source = DEFINE + RUN + (f"\nif __name__ == '__main__':\n    {call}" if where == "script" else f"\n{call}")
    if where == "stdin":
        command = [sys.executable, "-"]
        done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        status, out, err = done.returncode, done.stdout, done.stderr
    else:
        file = tmp_path / "script.py" if where == "script" else None
        status, out, err = run_script(source, 300, head="", file=file)
    assert (status, err) == (0, "")
    assert out.splitlines() == (EXPECTED[:1] if is_brief else EXPECTED)


@pytest.mark.parametrize("method", METHODS)
def test_t32_local_classes_and_closures_of_an_imported_module(method):
    class Failure(Exception):
        pass

    class Item:
        def __init__(self, value):
            self.value = value

    class Local(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            if i == 3:
                raise Failure("three")
            return Item(factor * i)

    factor, seen = 7, []

    def collate(samples):
        seen.append(len(samples))
        return samples[0], list(seen)

    iterator = iter(DataLoader(Local(), num_workers=2, collate_fn=collate, multiprocessing_context=method))
    batches = [next(iterator) for _ in range(3)]
    assert [type(item) for item, _ in batches] == [Item] * 3
    assert [(item.value, counts) for item, counts in batches] == [(0, [1]), (7, [1]), (14, [1, 1])]
    with pytest.raises(Failure, match="Caught Failure in DataLoader worker process 1") as caught:
        next(iterator)
    assert type(caught.value) is Failure and not seen


@pytest.mark.filterwarnings("ignore:Got pickle error")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers", [1, 2])
def test_what_neither_way_can_send_is_the_standard_error(method, workers):
    """A note says why the definition cannot be sent by value."""
    generator = (i for i in ())
    dataset = Holds(3, [lambda: 0, threading.Lock()])
    with pytest.raises((AttributeError, pickle.PicklingError), match=LAMBDA) as caught:
        iter(DataLoader(dataset, num_workers=workers, multiprocessing_context=method))
    first, second, *_ = caught.value.__notes__
    assert first.startswith("The DataLoader's argument dataset cannot be pickled.")
    assert second.startswith("It cannot be sent by value either: TypeError: cannot pickle '_thread.lock' object")
    # A lambda that captures a generator.
    with pytest.raises((AttributeError, pickle.PicklingError), match=LAMBDA) as caught:
        iter(DataLoader(range(3), num_workers=workers, collate_fn=lambda _: generator, multiprocessing_context=method))
    first, second, *_ = caught.value.__notes__
    assert first.startswith("The DataLoader's argument collate_fn cannot be pickled.")
    assert "cannot pickle 'generator' object" in second


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers", [1, 2])
def test_without_cloudpickle_the_error_is_the_way_out(method, workers, monkeypatch):
    """One sentence, without warnings, notes, and the frames of multiprocessing."""
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(pickle.PicklingError, match=LAMBDA) as caught:
        iter(DataLoader(range(3), num_workers=workers, collate_fn=lambda it: it, multiprocessing_context=method))
    expected = "Run `pip install cloudpickle`: workers started by spawn or forkserver need it to receive the argument "
    assert str(caught.value).startswith(f"{expected}collate_fn, which the standard pickle refuses (")
    assert not hasattr(caught.value, "__notes__") and caught.value.__suppress_context__
    assert not any("multiprocessing" in str(entry.path) for entry in caught.traceback)


def test_without_cloudpickle_no_worker_looks_for_classes_that_it_lacks():
    status, out, err = run_script(
        """
        import sys
        sys.modules["cloudpickle"] = None
        class Mine(list):
            pass
        try:
            iter(DataLoader(Mine([1]), num_workers=1, multiprocessing_context="spawn"))
        except Exception as error:
            print(error)
        """,
        300,
    )
    assert (status, err) == (0, "")
    assert out.startswith("Run `pip install cloudpickle`: ") and "classes and functions of this `__main__`" in out


@pytest.mark.parametrize("method", METHODS)
def test_t32_tracebacks_show_the_lines_of_what_is_sent_by_value(method):
    def fails(sample):
        raise ValueError("mine")  # the line

    # Only the cache of `linecache` has the lines of this function, as those of a cell.
    lines = ["def of_cell(sample):\n", "    return inner(sample)  # the cell\n"]
    name, names = f"<cell of {method}>", {"inner": fails, "__name__": "__main__"}
    linecache.cache[name] = 0, None, lines, name
    exec(compile("".join(lines), name, "exec"), names)
    try:
        with pytest.raises(ValueError, match="mine") as caught:
            next(iter(DataLoader([1], num_workers=1, collate_fn=names["of_cell"], multiprocessing_context=method)))
    finally:
        del linecache.cache[name]
    assert f'File "{name}", line 2, in of_cell\n    return inner(sample)  # the cell\n' in str(caught.value)
    assert f'File "{__file__}", line' in str(caught.value) and 'ValueError("mine")  # the line\n' in str(caught.value)


# The pickles


class Once:
    """Counts how often it is pickled."""

    calls = 0

    def __init__(self, *held):
        self.held = held

    def __reduce__(self):
        type(self).calls += 1
        return Once, self.held


class File(io.BytesIO):
    """Counts the bytes that are written."""

    written = 0

    def write(self, data):
        self.written += len(data)
        return super().write(data)


@pytest.fixture
def pickling(monkeypatch):
    monkeypatch.setattr(Once, "calls", 0)
    monkeypatch.setattr(definitions, "workers_have_main", lambda: True)
    return definitions.Pickling


def test_what_the_standard_pickle_takes_is_pickled_once_and_byte_for_byte_the_same(pickling, monkeypatch):
    monkeypatch.setattr(definitions.Pickling, "_by_value", lambda *_: pytest.fail("by value"))
    file, expected = File(), File()
    value = Once(b"x" * 300_000, Numbers)
    pickling().dump(value, file)
    reduction.dump(value, expected)
    assert file.getvalue() == expected.getvalue() and Once.calls == 2  # one each


def test_a_second_pickle_begins_where_the_first_did_and_later_ones_skip_the_first_try(pickling):
    file, pickler = File(), pickling()
    file.write(b"before")
    pickler.dump([Once(b"x" * 300_000), lambda: 5], file)
    assert Once.calls == 2 and file.written > 600_000 and len(file.getvalue()) < 302_000
    assert file.getvalue().startswith(b"before")
    assert pickle.loads(file.getvalue()[6:])[1]() == 5
    # The pickle for the next worker is by value from the start.
    pickler.dump([Once(1), lambda: 6], file)
    assert Once.calls == 3


def test_a_main_that_workers_lack_ends_the_first_pickle_early(pickling, monkeypatch):
    monkeypatch.setattr(definitions, "workers_have_main", lambda: False)
    main = sys.modules["__main__"]
    kind = type("Mine", (), {"__module__": "__main__"})
    monkeypatch.setattr(main, "Mine", kind, raising=False)
    file = File()
    pickling().dump([kind(), [str(i) for i in range(30_000)], Once(b"x" * 5_000_000)], file)
    assert Once.calls == 1 and file.written < 6_000_000
    # A string is no reference to the module: the pickle is by value needlessly, but correct.
    file = File()
    pickling().dump(["__main__", 3], file)
    assert pickle.loads(file.getvalue()) == ["__main__", 3]


@pytest.mark.parametrize("error", [AttributeError, pickle.PicklingError, ValueError])
def test_an_error_of_the_datasets_own_code_is_no_reason_for_a_second_pickle(pickling, error):
    class Refuses:
        calls = 0

        def __reduce__(self):
            Refuses.calls += 1
            raise error("mine")

    refuses = Refuses()
    with pytest.raises(error, match="mine"):
        pickling().dump(refuses, File())
    assert Refuses.calls == 1


def test_what_cloudpickle_would_turn_into_something_else_is_refused(pickling):
    with open(os.devnull) as file:
        for value in (file, memoryview(b"abc")):
            with pytest.raises((AttributeError, pickle.PicklingError), match=LAMBDA) as caught:
                pickling().dump([lambda: 0, value], File())
            assert "It cannot be sent by value either: TypeError: cannot pickle" in caught.value.__notes__[0]


def test_descriptors_of_the_first_pickle_are_not_sent(pickling, monkeypatch):
    class Popen:
        def __init__(self):
            self._fds = [3]

        def duplicate_for_child(self, fd):
            self._fds.append(fd)
            return fd

    popen = Popen()
    monkeypatch.setattr(definitions, "get_spawning_popen", lambda: popen)

    class Held:
        def __reduce__(self):
            return int, (popen.duplicate_for_child(7),)

    pickling().dump([Held(), lambda: 0], File())
    assert popen._fds == [3, 7]


def test_a_class_redefined_since_comes_back_as_the_one_that_was_sent():
    key = by_name.key_of(Once)
    assert by_name.key_of(Once) == key and by_name.find_own(key, "nowhere", "Nothing") is Once
    assert by_name.find_own("gone", __name__, "Once") is Once
    with pytest.raises(AttributeError) as caught:
        by_name.find_own("gone", __name__, "Lost")
    assert "received 'Lost' of" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("spec", "file", "present"),
    [
        ("package.__main__", __file__, False),
        ("__main__", __file__, False),
        ("package.module", None, True),
        (None, None, False),
        (None, "<stdin>", False),
        (None, __file__, True),
        (None, "/usr/bin/ipython", False),
    ],
)
def test_which_mains_a_worker_has(spec, file, present, monkeypatch):
    """As `multiprocessing.spawn` decides."""
    main = type(sys)("__main__")
    main.__spec__ = spec and importlib.machinery.ModuleSpec(spec, None)
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert definitions.workers_have_main() is present
    calls = definitions.first_calls()
    sets = [call.__reduce__()[1][1:] for call in calls]
    missing = file is not None and not os.path.exists(file)
    assert sets == ([("__file__", os.path.join(multiprocessing.process.ORIGINAL_DIR, file))] if missing else [])


def test_the_argument_that_was_refused_is_named():
    refused = textwrap.dedent
    with pytest.raises(TypeError) as caught, arguments.naming_argument():
        reduction.dump([arguments.Mark("collate_fn"), refused, (i for i in ())], File())
    assert "argument collate_fn cannot be pickled" in caught.value.__notes__[0]


@pytest.mark.parametrize("method", ["fork", *METHODS])
def test_an_index_that_cannot_be_sent_or_loaded_names_the_sampler(method):
    loader = DataLoader(range(3), sampler=[0, (i for i in ())], batch_size=None, num_workers=1)
    loader.multiprocessing_context = method
    with pytest.raises(TypeError, match="cannot pickle 'generator'") as caught:
        iter(loader)
    assert "sampler or batch_sampler yielded an index that cannot be pickled" in caught.value.__notes__[0]
