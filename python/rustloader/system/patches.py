"""The list of all changes that this package makes to torch, multiprocessing, NumPy and Python at run time.

A :class:`Patch` replaces an attribute of a module, class or object that is not part of this package. It refuses
attributes that are not in the list. The modules that need other changes, such as to one iterator or fetcher, make these
themselves; the list then describes in words what is changed. ``tests/python/unit/test_patch_list.py`` compares the list
with the changes that are found in a program and its workers.
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
    """A change that is made at run time.

    Attributes:
        place: What is changed: the dotted name of an attribute, or a description in words.
        by: The modules of this package that make the change.
        process: The processes in which the change is made.
        why: The purpose of the change.
        put_in: When the change is made.
        taken_out: When and how the change is undone.
    """

    place: str
    by: str
    process: str
    why: str
    put_in: str
    taken_out: str

    @property
    def is_attribute(self) -> bool:
        """True if ``place`` is the name of an attribute."""
        return " " not in self.place


_NEVER = "never"
_WITH_WORKER = "at the worker's end"

PATCHES = (
    # Loaders that a framework builds
    Change(
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
        "installation.replacement, installation.api",
        PROGRAM,
        "torch's loaders make the engine's iterator; the class is also replaced in other loaded modules that hold it",
        "install()",
        "uninstall(), or the end of installed(); a class that the program has put there since stays",
    ),
    Change(
        "torchdata.stateful_dataloader.StatefulDataLoader",
        "installation.replacement, installation.stateful",
        PROGRAM,
        "programs find rustloader's loader; the class is also replaced in other loaded modules that hold it",
        "install(stateful=True)",
        "uninstall(), install(stateful=False), or the end of installed(); what the program has put there since stays",
    ),
    Change(
        "multiprocessing.spawn.get_preparation_data",
        "installation.environment",
        PROGRAM,
        "spawned processes apply RUSTLOADER_INSTALL, too",
        "import rustloader with RUSTLOADER_INSTALL, or `rustloader run`",
        _NEVER,
    ),
    Change(
        "sys.meta_path: a finder at the front, and the exec_module of one module's loader",
        "system.after_import",
        PROGRAM,
        "torch (for RUSTLOADER_INSTALL) and Dynamo are changed when the program imports them, so this package need not "
        "import them",
        "import rustloader, unless the module is already loaded",
        "at the end of that import",
    ),
    Change(
        "torch._dynamo.trace_rules: the folders that it skips",
        "system.dynamo",
        PROGRAM,
        "torch.compile skips this package, as it skips torch.utils.data; uses Dynamo's own function `add`",
        "import rustloader, or the later import of Dynamo",
        _NEVER,
    ),
    # The memory of tensors and arrays
    Change(
        "torch.UntypedStorage._share_fd_cpu_",
        "system.moved_storages",
        f"{PROGRAM}, {WORKER}",
        "views of a delivered tensor keep its memory when torch moves the tensor; otherwise the method is unchanged",
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
        "keeps the old memory until the storage is freed",
        "share_memory_(), or one of torch's queues",
        "with the storage",
    ),
    Change(
        "torch.UntypedStorage._new_shared",
        "workers.collate",
        WORKER,
        "default_collate, users of a copy of its map, and PyG's collater allocate in the arena",
        "the start of a worker",
        _WITH_WORKER,
    ),
    Change(
        "torch.utils.data._utils.collate.default_collate_fn_map: its entries for tensors, floats and ints",
        "workers.collate",
        WORKER,
        "Rust collates plain values; all others go to torch's function",
        "the start of a worker, for entries that are torch's",
        f"{_WITH_WORKER}; an entry that the program has replaced since stays",
    ),
    Change(
        "NumPy's memory handler (NEP 49), in the worker's contexts",
        "_core (src/interop/numpy_memory.rs)",
        WORKER,
        "large arrays are allocated in the arena",
        "the start of a worker's loop, unless RUSTLOADER_NUMPY_ARENA=0",
        "never; after the end of the loop it allocates ordinary memory",
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
        "the server imports the modules that workers need, unless the program has set its own list",
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
        "the pickle of the name contains calls that a spawned worker makes before it imports anything",
        "when the worker starts",
        "when it has started",
    ),
    Change(
        "__main__ of a worker: names of the program's __main__, and __file__",
        "workers.by_name, workers.definitions",
        WORKER,
        "pickle finds definitions of a notebook, of python -c or of stdin; a file such as <stdin> is not run",
        "the start of a worker by spawn or forkserver that cannot import the program's __main__",
        _NEVER,
    ),
    Change(
        "multiprocessing.process._children: workers that have ended, and the parent's in a forked child",
        "workers.process",
        PROGRAM,
        "otherwise multiprocessing would list reaped workers as alive, and a child would end its parent's workers",
        "the end of a worker, or a fork",
        _NEVER,
    ),
    Change(
        "the handlers of SIGINT, SIGTERM and others, in C",
        "_core (src/sys/deferred_signals.rs)",
        PROGRAM,
        "signals wait until the engine knows the workers",
        "when the main thread starts workers",
        "when they have started",
    ),
    Change(
        "the handlers of SIGTERM and SIGRTMIN+13, in C",
        "_core (src/worker/terminate.rs, src/worker/stack.rs)",
        WORKER,
        "a worker survives a SIGTERM to the whole process group for a while, and writes its stack when it is stuck",
        "the start of a worker",
        _NEVER,
    ),
    # Changes to a single object
    Change(
        "a _SingleProcessDataLoaderIter: _sampler_iter and _dataset_fetcher",
        "iterator.single",
        PROGRAM,
        "options also work with num_workers=0; drawing indices and gathering from tables is faster",
        "when a loader makes the iterator",
        "with the iterator",
    ),
    Change(
        "a torch fetcher: fetch, dataset, dataset_iter, collate_fn, ended and its class",
        "fetch, iterator.fetches, workers.main, workers.resuming, workers.snapshots",
        f"{PROGRAM}, {WORKER}",
        "seeds, guards, threads and tables of samples; resuming; traces and metrics",
        "when an iterator or a worker makes the fetcher",
        "with the fetcher",
    ),
    Change(
        "the class of a dataset with set_epoch: set_epoch",
        "stateful_dataloader.set_epoch",
        PROGRAM,
        "persistent and restarted workers get the epoch that the program sets in its dataset",
        "a StatefulDataLoader over such a dataset, with persistent_workers or max_restarts",
        "with the last such loader; what the program has put there since stays",
    ),
    # Pickling, and the types of shared objects
    Change(
        "multiprocessing.reduction.ForkingPickler: reducers of shared objects, cached datasets and numpy.ndarray",
        "sharing.pickling",
        f"{PROGRAM}, {WORKER}",
        "shared objects are pickled as descriptors; arrays that are not shared are pickled as before",
        "install(), a loader, or share(); numpy.ndarray with the first shared array",
        _NEVER,
    ),
    Change(
        "collections.abc.Sequence and Mapping: three virtual subclasses",
        "sharing.sequences",
        f"{PROGRAM}, {WORKER}",
        "shared lists, tuples and dicts pass the isinstance() checks that their originals pass",
        "install(), a loader, or share()",
        _NEVER,
    ),
    # Python's own hooks
    Change(
        "os.register_at_fork: hooks for each step",
        "system.forks",
        f"{PROGRAM}, {WORKER}, {SERVER}",
        "see system/forks.py",
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
        "the script finds the same values as with `python script`",
        "`rustloader run`, or the import of the code that a command measures",
        _NEVER,
    ),
    Change(
        "multiprocessing.queues.Queue._on_queue_feeder_error",
        "tools.probe.side",
        COMMAND,
        "if a batch of torch's workers cannot be pickled, the command ends; otherwise it would wait for the batch",
        "when the process begins",
        _NEVER,
    ),
    Change(
        "the handlers of SIGINT, of SIGALRM, and of a signal that writes the stack; warnings.filters",
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
    """Replaces an attribute of a module, class or object that is not part of this package. This can be undone.

    Args:
        place: Dotted name of the attribute, as in ``PATCHES``.
        owner: The module, class or object that has the attribute.

    Raises:
        ValueError: ``PATCHES`` has no entry for the attribute.
    """

    def __init__(self, place: str, owner: Any) -> None:
        if place not in _PLACES:
            raise ValueError(
                f"{place} is not in rustloader.system.patches.PATCHES: add an entry with the reason and the time"
            )
        self._owner = owner
        self._name = place.rpartition(".")[2]
        # `_before` is the previous value, or `_NOTHING` if the owner had not defined the attribute itself: a class may
        # have inherited it.
        self._before = self._ours = _NOTHING

    def put_in(self, replacement: Any) -> None:
        """Replaces the attribute."""
        self._before = vars(self._owner).get(self._name, _NOTHING)
        # Set before the attribute, so that `take_out` finds the change even after an interrupt in between.
        self._ours = replacement
        setattr(self._owner, self._name, replacement)

    def take_out(self, *, anyway: bool = False) -> None:
        """Restores the attribute, unless other code has replaced it since. Does nothing if this patch is not in effect.

        Args:
            anyway: Whether to restore the attribute even if other code has replaced it.
        """
        ours, self._ours = self._ours, _NOTHING
        if ours is _NOTHING or not (anyway or vars(self._owner).get(self._name, _NOTHING) is ours):
            return
        if self._before is _NOTHING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
