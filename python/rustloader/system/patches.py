"""Everything of torch, multiprocessing, NumPy and Python that this package changes at run time, in one list.

An attribute of a foreign module or class is replaced by a :class:`Patch`, which refuses a place that is not listed.
A change that is not of an attribute, or of one object only, is made by its own module, and listed with a place in
words.
``tests/python/unit/test_patch_list.py`` compares the list with what a program and its workers find.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# The processes in which a change is made.
PROGRAM = "the program"
WORKER = "a worker"
SERVER = "the fork server"
COMMAND = "a process of a command"


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        place: Dotted name of an attribute; else words.
        by: The module of this package that makes it.
        process: The processes in which it is made.
        why: Its purpose.
        put_in: When it is made.
        taken_out: When it is undone, and how.
    """

    place: str
    by: str
    process: str
    why: str
    put_in: str
    taken_out: str

    @property
    def is_attribute(self) -> bool:
        return " " not in self.place


_NEVER = "never"
_WITH_WORKER = "at the worker's end"

PATCHES = (
    # Loaders that a framework builds
    Change(
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
        "installation.replacement, installation.api",
        PROGRAM,
        "torch's loaders make the engine's iterator; and in other loaded modules that have the class",
        "install()",
        "uninstall(), or the end of installed(); what the program has put there since stays",
    ),
    Change(
        "torchdata.stateful_dataloader.StatefulDataLoader",
        "installation.replacement, installation.stateful",
        PROGRAM,
        "torchdata's loader is rustloader's; also in other loaded modules that hold the class",
        "install(stateful=True)",
        "uninstall(), or an install() that ends it; what the program has put there since stays",
    ),
    Change(
        "sys.modules: torchdata and its stateful_dataloader",
        "installation.stateful",
        PROGRAM,
        "programs import torchdata's names where torchdata is not installed",
        "install(stateful=True)",
        "uninstall(); a module that the program has put there since stays",
    ),
    Change(
        "multiprocessing.spawn.get_preparation_data",
        "installation.environment",
        PROGRAM,
        "spawned processes follow RUSTLOADER_INSTALL, too",
        "import rustloader with RUSTLOADER_INSTALL, or `rustloader run`",
        _NEVER,
    ),
    Change(
        "sys.meta_path: a finder in front, and the loader's exec_module of one module",
        "system.after_import",
        PROGRAM,
        "torch (RUSTLOADER_INSTALL) and Dynamo are changed when the program imports them, not imported for it",
        "import rustloader, unless the module is loaded",
        "at the end of that import",
    ),
    Change(
        "torch._dynamo.trace_rules: its folders to skip",
        "system.dynamo",
        PROGRAM,
        "torch.compile passes over this package as over torch.utils.data; by Dynamo's own function `add`",
        "import rustloader, or the later import of Dynamo",
        _NEVER,
    ),
    # The memory of tensors and arrays
    Change(
        "torch.UntypedStorage._share_fd_cpu_",
        "system.moved_storages",
        f"{PROGRAM}, {WORKER}",
        "views of a delivered tensor keep its memory when torch moves the tensor; the method does what it did",
        "the first iterator of the process, or the start of a worker",
        _NEVER,
    ),
    Change(
        "torch.UntypedStorage._share_filename_cpu_",
        "system.moved_storages",
        f"{PROGRAM}, {WORKER}",
        "the same under torch's other sharing strategy",
        "the first iterator of the process, or the start of a worker",
        _NEVER,
    ),
    Change(
        "an UntypedStorage that torch has moved: _rustloader_memory",
        "_core (src/interop/tensor/moved.rs)",
        PROGRAM,
        "keeps the old memory until the storage ends",
        "share_memory_() or a queue of torch's",
        "with the storage",
    ),
    Change(
        "torch.UntypedStorage._new_shared",
        "workers.collate",
        WORKER,
        "default_collate, copies of its table and PyG's collater allocate in the arena",
        "the start of a worker",
        _WITH_WORKER,
    ),
    Change(
        "torch.utils.data._utils.collate.default_collate_fn_map: its entries for tensors, floats and ints",
        "workers.collate",
        WORKER,
        "Rust collates plain ones; the others go to torch's function",
        "the start of a worker, for those that are torch's",
        f"{_WITH_WORKER}; an entry that the program has replaced since stays",
    ),
    Change(
        "NumPy's memory handler (NEP 49), in the worker's contexts",
        "_core (src/interop/numpy_memory.rs)",
        WORKER,
        "large arrays lie in the arena from the start",
        "the loop of a worker, unless RUSTLOADER_NUMPY_ARENA=0",
        "never; after the worker's end it gives ordinary memory",
    ),
    # Workers
    Change(
        "torch.utils.data._utils.worker._worker_info",
        "workers.context",
        WORKER,
        "get_worker_info(), as in torch's worker",
        "the start of a worker",
        _WITH_WORKER,
    ),
    Change(
        "multiprocessing.forkserver._forkserver._preload_modules",
        "workers.fork_server",
        PROGRAM,
        "the server imports what workers need, if the program has not said what it shall import",
        "when the server starts",
        "when it has started; a list that another thread has set meanwhile stays",
    ),
    Change(
        "sys.path",
        "workers.preloaded",
        SERVER,
        "the server imports from the program's path",
        "while it imports its modules",
        "after that",
    ),
    Change(
        "a worker's Process: _name",
        "workers.preparation",
        PROGRAM,
        "calls that a spawned worker makes before it imports anything travel with its name",
        "when the worker starts",
        "when it has started",
    ),
    Change(
        "__main__ of a worker: names of the program's __main__, and __file__",
        "workers.by_name, workers.definitions",
        WORKER,
        "what a notebook, python -c or stdin defines is where pickle looks for it; a file such as <stdin> is not run",
        "the start of a worker by spawn or forkserver that cannot import the program's __main__",
        _NEVER,
    ),
    Change(
        "multiprocessing.process._children: workers that have ended, and the parent's in a forked child",
        "workers.process",
        PROGRAM,
        "multiprocessing would list a worker as alive that the engine has reaped, or a child would end it",
        "the end of a worker, or a fork",
        _NEVER,
    ),
    Change(
        "the handlers of SIGINT, SIGTERM and others, in C",
        "_core (src/sys/deferred_signals.rs)",
        PROGRAM,
        "signals wait until the workers are known",
        "when workers start",
        "when they have started",
    ),
    Change(
        "the handlers of SIGTERM and SIGRTMIN+13, in C",
        "_core (src/worker/terminate.rs, src/worker/stack.rs)",
        WORKER,
        "a worker outlives a SIGTERM to the whole group for a while, and shows its stack when it is stalled",
        "the start of a worker",
        _NEVER,
    ),
    # Changes of one object
    Change(
        "a _SingleProcessDataLoaderIter: _sampler_iter and _dataset_fetcher",
        "iterator.single",
        PROGRAM,
        "options hold with num_workers=0; indices and tables are fast",
        "when a loader makes the iterator",
        "with the iterator",
    ),
    Change(
        "a fetcher of torch's: fetch, dataset, dataset_iter, collate_fn and its class",
        "fetch, workers.resuming, workers.main",
        f"{PROGRAM}, {WORKER}",
        "seeds, guards, threads and tables of samples",
        "when an iterator or a worker makes the fetcher",
        "with the fetcher",
    ),
    Change(
        "the class of a dataset with set_epoch: set_epoch",
        "stateful_dataloader.set_epoch",
        PROGRAM,
        "persistent workers are told the epochs that the program tells its dataset",
        "the first iterator of a StatefulDataLoader over one",
        _NEVER,
    ),
    # Changes of the way objects travel
    Change(
        "multiprocessing.reduction.ForkingPickler: reducers of shared objects, cached datasets and numpy.ndarray",
        "sharing.pickling",
        f"{PROGRAM}, {WORKER}",
        "shared objects travel as descriptors; arrays that are not shared travel as before",
        "install(), a loader, or share(); numpy.ndarray with the first shared array",
        _NEVER,
    ),
    Change(
        "collections.abc.Sequence and Mapping: three virtual subclasses",
        "sharing.sequences",
        f"{PROGRAM}, {WORKER}",
        "shared lists, tuples and dicts are what their originals are",
        "install(), a loader, or share()",
        _NEVER,
    ),
    # Hooks that Python has for everyone
    Change(
        "os.register_at_fork: one hook for each step",
        "system.forks",
        f"{PROGRAM}, {WORKER}, {SERVER}",
        "see forks.py",
        "the first import of a module with a step",
        _NEVER,
    ),
    Change(
        "atexit: the end of all workers, and of the servers of shared objects",
        "workers.group, sharing.ranks",
        PROGRAM,
        "no worker or thread outlives the program",
        "the import of these modules",
        _NEVER,
    ),
    # Commands
    Change(
        "sys.excepthook",
        "tools.cli.run",
        COMMAND,
        "tracebacks begin with the script, as with `python script`",
        "`rustloader run`",
        _NEVER,
    ),
    Change(
        "sys.argv, sys.path[0] and the attributes of __main__",
        "tools.cli.run, tools.probe.factory",
        COMMAND,
        "the script finds what it finds with `python script`",
        "`rustloader run`, or the import of what a command measures",
        _NEVER,
    ),
    Change(
        "multiprocessing.queues.Queue._on_queue_feeder_error",
        "tools.probe.side",
        COMMAND,
        "a batch of torch's workers that cannot be pickled ends the command, which would wait for it",
        "when the process begins",
        _NEVER,
    ),
    Change(
        "torch.utils.data._DatasetKind.create_fetcher",
        "tools.bench.timeline",
        COMMAND,
        "the picture of `rustloader bench` shows when workers fetch and collate",
        "in the workers of the pass that is drawn",
        _NEVER,
    ),
    Change(
        "PIL.JpegImagePlugin.JpegImageFile.load",
        "tools.bench.images",
        COMMAND,
        "`rustloader bench` says that images are decoded larger than what samples keep",
        "in the workers of the first pass, if they have imported Pillow",
        "after 16 images",
    ),
    Change(
        "the handlers of SIGINT, SIGALRM and of a signal that writes the stack; warnings.filters",
        "tools.probe",
        COMMAND,
        "an interrupt ends the command's processes; warnings are shown once",
        "when the process begins",
        _NEVER,
    ),
)
_PLACES = frozenset(change.place for change in PATCHES if change.is_attribute)
_NOTHING: Any = object()


class Patch:
    """Replaces an attribute of a foreign module, class or object.

    Args:
        place: Dotted name of the attribute, as in ``PATCHES``.
        owner: The module, class or object that has it.

    Raises:
        ValueError: The place is not in the list.
    """

    def __init__(self, place: str, owner: Any) -> None:
        if place not in _PLACES:
            raise ValueError(
                f"{place} is not in rustloader.system.patches.PATCHES: say there why it is replaced, and when"
            )
        self._owner = owner
        self._name = place.rpartition(".")[2]
        # The owner's own attribute before, if it had one: a class may inherit it.
        self._before = self._ours = _NOTHING

    def put_in(self, replacement: Any) -> None:
        """Replaces the attribute."""
        self._before = vars(self._owner).get(self._name, _NOTHING)
        # First, so that an interrupt in between leaves nothing behind that `take_out` would not see.
        self._ours = replacement
        setattr(self._owner, self._name, replacement)

    def take_out(self, *, anyway: bool = False) -> None:
        """Restores the attribute, unless other code has replaced it since. Does nothing if it is not replaced.

        Args:
            anyway: Restores it also then.
        """
        ours, self._ours = self._ours, _NOTHING
        if ours is _NOTHING or not (anyway or vars(self._owner).get(self._name, _NOTHING) is ours):
            return
        if self._before is _NOTHING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
