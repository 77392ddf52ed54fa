"""`rustloader.system.patches` lists all that the package replaces in torch, multiprocessing, NumPy and Python."""

import importlib
import json

import pytest
from support import run_script

from rustloader.system.patches import PATCHES, Patch

ITERATOR = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"
MOVES = {f"torch.storage.UntypedStorage.{name}" for name in ("_share_fd_cpu_", "_share_filename_cpu_")}
SHARED = ("SharedStore", "SharedData", "SharedTensor", "SharedList", "SharedTuple", "SharedDict")
CACHED = ("CacheTable", "CachedDataset", "_CachedBatches")
REDUCERS = {f"ForkingPickler.{kind}" for kind in SHARED + CACHED}
TABLE = "torch.utils.data._utils.collate.default_collate_fn_map"

SCRIPT = '''
import collections, json, sys, types
import atexit, copyreg, faulthandler, importlib, logging, os, pickle, select, signal, socket, subprocess
import threading, warnings
import multiprocessing.forkserver, multiprocessing.queues, multiprocessing.resource_sharer, multiprocessing.spawn
import multiprocessing.popen_fork, multiprocessing.popen_forkserver, multiprocessing.popen_spawn_posix
import numpy.random, torch, torch.multiprocessing, torch.utils.data
from multiprocessing.reduction import ForkingPickler
from torch.utils.data import _utils

TOPS = set("torch multiprocessing numpy sys builtins atexit copyreg faulthandler importlib logging os".split())
TOPS |= set("pickle random select signal socket subprocess threading warnings".split())
TABLES = {
    "ForkingPickler": ForkingPickler._extra_reducers,
    "copyreg": copyreg.dispatch_table,
    "torch.utils.data._utils.collate.default_collate_fn_map": _utils.collate.default_collate_fn_map,
}


def everything():
    """The attributes of modules, of their classes and of some objects: {(owner, name): (label, value, owner)}."""
    found = {}

    def add(label, owner, names):
        found.update({(id(owner), name): (f"{label}.{name}", value, owner) for name, value in list(names.items())})

    for label, module in list(sys.modules.items()):
        if label.partition(".")[0] in TOPS and type(module) is types.ModuleType:
            add(label, module, vars(module))
            for value in list(vars(module).values()):
                # Not `isinstance`, which warns about some of torch's objects.
                if issubclass(type(value), type) and value.__module__ == label:
                    add(f"{label}.{value.__name__}", value, vars(value))
    server = multiprocessing.forkserver._forkserver
    add("multiprocessing.forkserver._forkserver", server, vars(server))
    for label, table in TABLES.items():
        add(label, table, {getattr(key, "__name__", str(key)): value for key, value in table.items()})
    return found


def changes():
    """The labels of attributes that have another value than before, or are gone, or are new. Not submodules."""
    if not before:
        return []
    now = everything()
    earlier, present = ({owner for owner, _ in them} for them in (before, now))
    kept = {key: it for key, it in before.items() if key[0] in present}
    changed = {it[0] for key, it in kept.items() if key not in now or now[key][1] is not it[1]}
    new = (it for key, it in now.items() if key[0] in earlier and key not in before)
    changed |= {label for label, value, _ in new if type(value) is not types.ModuleType}
    return sorted(changed - PASSING)


class Changes(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return changes()


def epochs(loader):
    for workers in (0, 2):
        found = list(loader(torch.arange(64).reshape(8, 8), batch_size=4, num_workers=workers))
        found[0].share_memory_()
        found = list(loader(Changes(), num_workers=workers, batch_size=None))
    return found[-1]


PASSING = set()
before = {}
'''
USE_TORCH = """
# Changed by torch's own loader, not by rustloader.
epochs(torch.utils.data.DataLoader)
before = everything()
PASSING = set(epochs(torch.utils.data.DataLoader)) | set(changes())
PASSING.discard("torch.utils.data._utils.worker._worker_info")
report = {"passing": sorted(PASSING), "nothing": changes()}
"""
USE_RUSTLOADER = """
import rustloader
report["import"] = changes()
rustloader.install()
report["install"] = changes()
report["worker"] = epochs(torch.utils.data.DataLoader)
report["used"] = changes()
rustloader.uninstall()
rustloader.share([numpy.arange(3)])
rustloader.share(numpy.arange(3))
rustloader.StatefulDataLoader
rustloader.prefetch_to_device
report["end"] = changes()
print(json.dumps(report))
"""


VARIABLE = """
before = everything()
import rustloader
print(json.dumps(changes()))
"""


def report_of(source, **variables):
    status, out, err = run_script(SCRIPT + source, head="", environment=variables)
    assert status == 0, err
    return json.loads(out)


def owner_of(place):
    """The owner of a listed attribute."""
    names = place.split(".")
    for length in range(len(names) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(names[:length]))
        except ModuleNotFoundError:
            continue
        for name in names[length:-1]:
            owner = getattr(owner, name)
        return owner
    raise AssertionError(place)


def test_a_program_and_its_workers_find_replaced_what_is_listed_and_nothing_else():
    report = report_of(USE_TORCH + USE_RUSTLOADER)
    assert len(report["passing"]) < 20, report["passing"]
    assert report["nothing"] == report["import"] == []
    assert set(report["install"]) == {ITERATOR, *REDUCERS}
    assert set(report["used"]) == {ITERATOR, *REDUCERS, *MOVES}
    assert set(report["worker"]) == {
        ITERATOR,
        *REDUCERS,
        *MOVES,
        "torch.storage.UntypedStorage._new_shared",
        "torch.utils.data._utils.worker._worker_info",
        *(f"{TABLE}.{kind}" for kind in ("Tensor", "float", "int")),
    }
    assert set(report["end"]) == {*MOVES, *REDUCERS, "ForkingPickler.ndarray"}
    changed = {label for labels in report.values() for label in labels} - set(report["passing"])
    listed = {(change.place if change.is_attribute else change.place.partition(":")[0]) for change in PATCHES}
    listed = {place.replace("torch.UntypedStorage", "torch.storage.UntypedStorage") for place in listed}
    tables = {TABLE: TABLE, "ForkingPickler": "multiprocessing.reduction.ForkingPickler"}
    assert {tables.get(label.rpartition(".")[0], label) for label in changed} <= listed


def test_a_program_that_follows_the_variable_has_one_change_more():
    changed = report_of(VARIABLE, RUSTLOADER_INSTALL="1")
    assert {"multiprocessing.spawn.get_preparation_data", ITERATOR} == set(changed) - REDUCERS


@pytest.mark.parametrize("change", [it for it in PATCHES if it.is_attribute], ids=lambda change: change.place)
def test_a_listed_attribute_is_there(change):
    if change.place.startswith("torchdata"):
        pytest.importorskip("torchdata.stateful_dataloader")
    if change.place.startswith("PIL"):
        pytest.importorskip("PIL.JpegImagePlugin")
    assert hasattr(owner_of(change.place), change.place.rpartition(".")[2])


# A single patch


class Owner:
    def shown(self):
        return "theirs"


class Derived(Owner):
    pass


@pytest.fixture
def patch(monkeypatch):
    """Creates a patch of an owner's `shown`."""
    monkeypatch.setattr("rustloader.system.patches._PLACES", frozenset({"owner.shown"}))
    return lambda owner: Patch("owner.shown", owner)


@pytest.mark.parametrize("owner", [Owner, Derived])
def test_a_patch_is_taken_out_as_it_was(owner, patch):
    before = dict(vars(owner))
    one = patch(owner)
    one.take_out()
    one.put_in(lambda self: "ours")
    assert owner().shown() == "ours"
    one.take_out()
    one.take_out()
    assert dict(vars(owner)) == before


@pytest.mark.parametrize("anyway", [False, True])
def test_what_other_code_has_put_there_since_stays(anyway, patch, monkeypatch):
    monkeypatch.setattr(Owner, "shown", Owner.shown)
    one = patch(Owner)
    one.put_in(lambda self: "ours")
    Owner.shown = lambda self: "another's"
    one.take_out(anyway=anyway)
    assert Owner().shown() == ("theirs" if anyway else "another's")


def test_a_place_that_is_not_listed_is_refused():
    with pytest.raises(ValueError, match=r"^os\.fork is not in rustloader\.system\.patches\.PATCHES: add an entry"):
        Patch("os.fork", importlib.import_module("os"))
