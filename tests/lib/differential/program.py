"""Programs, the values of their dimensions, and which values can be combined."""

import dataclasses
import json

from . import samples

MAP = ("map", "getitems")
ITERABLE = ("iterable", "iterable, longer than it says", "uneven shards", "empty shards", "its own iterator")

DIMENSIONS = {
    "dataset": (*MAP, *ITERABLE),
    "size": ("0", "1", "2-9", "10-49", "50-200"),
    "samples": tuple(samples.MAKE),
    "structure": ("alone", "tuple", "dict", "list"),
    "sampler": (
        "default",
        "shuffle",
        "sequential",
        "random",
        "replacement",
        "subset",
        "weighted",
        "distributed",
        "batch sampler",
        "list of batches",
        "array of batches",
        "token budget",
        "packs",
        "tensors",
        "odd indices",
        "eager",
        "lazy",
        "walk",
        "infinite",
        "none",
    ),
    "batch_size": ("none", "1", "some", "larger"),
    "drop_last": (False, True),
    "collate": ("default", "wrapped default", "list", "dict", "tensors that share", "convert", "draws"),
    "num_workers": (0, 1, 2, 3, 4),
    "prefetch_factor": (None, 1, 2, 3, 4, 5, 6, 7, 8),
    "persistent": (False, True),
    "in_order": (True, False),
    "timeout": (0, 90),
    "generator": (False, True),
    "pin_memory": (False, True),
    "context": ("none", "name", "object"),
    "init": ("none", "plain", "draws", "changes the dataset"),
    "error_in": ("nowhere", "dataset", "collate", "sampler", "init", "iter"),
    "error": (
        "none",
        "KeyError",
        "two lines",
        "OSError",
        "StopIteration",
        "two arguments",
        "message",
        "unicode",
        "chained",
        "group",
        "IndexError",
        "assertion",
    ),
    "length_asked": (False, True),
    "warnings_raise": (False, True),
    "pattern": (
        "full epochs",
        "draws between epochs",
        "break",
        "again in mid-epoch",
        "two iterators",
        "nested loops",
        "attributes",
        "dataset changed",
        "sampler changed",
        "pickled",
        "copied",
        "deep copied",
        "guarded",
        "dropped at once",
        "shut down",
        "subclass",
        "in a thread",
        "iterator class",
    ),
    "epochs": (2, 3, 8),
    # rustloader's own options, which only its loader gets.
    "dispatch": (None, "shared_queue"),
    "reorder_window": (None, 1, 3, 32, "64kB"),
    "worker_threads": (None, 3),
    "seed_by": (None, "batch", "sample"),
    "overlap_epochs": (None, True),
    "given": ("keyword", "install"),
    # Whether the dataset of rustloader's loader is cached.
    "cache": (False, True),
}

OPTIONS = ("dispatch", "reorder_window", "worker_threads", "seed_by", "overlap_epochs")

BATCHES = ("batch sampler", "list of batches", "array of batches", "token budget", "packs")

# Samplers whose order depends on no generator of the main process.
REFUSE_NOTHING = ("random", "shuffle", "replacement", "weighted", "infinite", "subset", "token budget", "packs")
FIXED_ORDER = ("default", "sequential", "distributed", *BATCHES, "tensors", "odd indices")

# Patterns that give the same batches with any workers if the random numbers are the same.
SEEDED_PATTERNS = (
    "full epochs",
    "draws between epochs",
    "break",
    "dataset changed",
    "guarded",
    "pickled",
    "copied",
    "deep copied",
    "dropped at once",
    "shut down",
    "subclass",
    "in a thread",
)

# fork is tried with many programs, the other start methods with a few. "remote" and "ray": torch's workers start by
# forkserver, rustloader's run as on other machines, over connections, or as actors of a cluster.
START_METHODS = ("fork", "spawn", "forkserver", "remote", "ray")
ELSEWHERE = ("remote", "ray")


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int = 0
    dataset: str = "map"
    size: int = 10
    samples: tuple = ("int",)
    structure: str = "alone"
    sampler: str = "default"
    batch_size: int | None = 1
    drop_last: bool = False
    collate: str = "default"
    num_workers: int = 2
    prefetch_factor: int | None = None
    persistent: bool = False
    in_order: bool = True
    timeout: int = 0
    generator: bool = False
    pin_memory: bool = False
    context: str = "none"
    init: str = "none"
    error_in: str = "nowhere"
    error: str = "none"
    error_at: tuple = ()
    length_asked: bool = False
    warnings_raise: bool = False
    pattern: str = "full epochs"
    epochs: int = 2
    take: int = 3
    start_method: str = "fork"
    dispatch: str | None = None
    reorder_window: int | str | None = None
    worker_threads: int | None = None
    seed_by: str | None = None
    overlap_epochs: bool | None = None
    given: str = "keyword"
    cache: bool = False

    # --- Derived from the values

    @property
    def is_map(self):
        return self.dataset in MAP

    @property
    def depends_on_worker(self):
        """Whether batches depend on which worker makes them, and on what it made before them."""
        if self.init == "changes the dataset" or self.collate == "draws":
            return True
        return any(kind in samples.WORKER_DEPENDENT for kind in self.samples)

    @property
    def options(self):
        """The options that the program sets."""
        return {name: getattr(self, name) for name in OPTIONS if getattr(self, name) is not None}

    @property
    def shares(self):
        """Whether the workers share a queue, so that timing decides which of them makes a batch."""
        return self.dispatch == "shared_queue" and self.is_map and self.num_workers > 0

    @property
    def has_window(self):
        """Whether a window decides how far ahead the sampler is."""
        return self.reorder_window is not None and self.num_workers > 0

    @property
    def overlaps(self):
        """Whether workers may be asked for samples of the next epoch, which may remain unused."""
        can_overlap = self.sampler in ("default", "shuffle", "replacement", "subset", "distributed")
        return bool(self.overlap_epochs) and self.persistent and self.num_workers > 0 and self.is_map and can_overlap

    @property
    def has_threads(self):
        """Whether threads make the samples of a batch."""
        several = self.worker_threads is not None and self.num_workers > 0
        return several and self.dataset == "map" and self.batch_size is not None

    @property
    def is_seeded(self):
        """Whether it draws what ``seed_by`` seeds: other numbers than with torch, but the same with any workers."""
        return self.seed_by is not None and (self.collate == "draws" or any(k in samples.DRAWN for k in self.samples))

    @property
    def sampler_draws(self):
        """Whether the sampler draws from a generator that the program can see, also after the first index."""
        if self.sampler in ("lazy", "walk", "infinite"):
            return True
        return self.generator and self.sampler in ("random", "shuffle", "replacement")

    @property
    def breaks_off(self):
        """Whether an epoch may end before its last batch, so that timing decides what the workers did beyond it."""
        if self.is_endless or self.pattern == "subclass":  # a generator ends with an error
            return True
        if self.persistent and self.pattern in ("pickled", "copied", "deep copied"):  # the copy shares the iterator
            return True
        return self.pattern in (
            "break",
            "again in mid-epoch",
            "two iterators",
            "nested loops",
            "dropped at once",
            "shut down",
        )

    @property
    def is_endless(self):
        """Whether an epoch has no end: the sampler has none, or a broken worker answers every task with an error."""
        return self.sampler == "infinite" or (not self.is_map and self.error_in in ("init", "iter"))

    @property
    def is_ordered(self):
        """Whether torch's order of batches is the same in every run.

        It is not the same without `in_order`, nor if workers of an iterable dataset end at different tasks: then timing
        decides which worker gets the next task.
        """
        if self.num_workers <= 1:
            return True
        if not self.in_order:
            return False
        return self.is_map or self.dataset not in ("uneven shards", "empty shards")

    def value_of(self, dimension):
        """The values of a dimension that this program tries."""
        value = getattr(self, dimension)
        if dimension == "samples":
            return value
        if dimension == "size":
            return (next(b for b, top in zip(DIMENSIONS["size"], (0, 1, 9, 49, 200), strict=True) if value <= top),)
        if dimension == "batch_size":
            if value is None:
                return ("none",)
            return ("1" if value == 1 else "larger" if value > self.size else "some",)
        return (value,)

    @property
    def is_small_on_purpose(self):
        """Whether few batches are the point: size 0 or 1, a batch_size beyond the data, or workers without samples."""
        return self.size <= 1 or self.value_of("batch_size") == ("larger",) or self.dataset == "empty shards"

    def json(self):
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text):
        values = json.loads(text)
        for name in ("samples", "error_at"):
            values[name] = tuple(values.get(name, getattr(cls, name, ())))
        return cls(**values)


def why_invalid_with_options(p):
    """Like `why_invalid`, for what options change: how far ahead the sampler is, and which worker makes a batch."""
    if p.given == "install" and not p.options:
        return "nothing to install"
    if p.overlap_epochs and p.given == "keyword" and not (p.persistent and p.num_workers and p.is_map):
        return "overlap_epochs refuses these settings"
    if p.overlaps and not p.is_ordered:
        return "timing decides which worker makes a sample of the next epoch"
    if p.worker_threads and not p.is_map and p.given == "keyword":
        return "worker_threads refuses an iterable dataset"
    if "sample seed" in p.samples and not p.seed_by:
        return "there is no seed to ask for"
    if "around" in p.samples and p.seed_by:
        return "such a sample holds the seed of the worker's generators"
    if p.is_seeded:
        return why_invalid_if_seeded(p)
    may_change = p.num_workers > 1 or p.pattern == "attributes"
    if p.shares and (p.depends_on_worker or p.error_in == "init") and may_change:
        return "timing decides which worker makes a batch"
    if p.shares and p.error_in == "collate" and p.sampler == "list of batches" and may_change:
        return "timing decides which sample the worker made before an empty batch"
    if (p.shares or p.has_window) and p.depends_on_worker and p.persistent and p.breaks_off:
        return "timing decides what the worker made before"
    if p.has_threads and "draws" in p.samples:
        return "timing decides which thread draws first"
    if p.has_threads and p.error_in == "collate" and (p.batch_size != 1 or p.sampler in BATCHES):
        return "timing decides which sample of the batch was made last"
    # A program mistakes a StopIteration raised by the dataset for the end of the epoch.
    carries_over = p.breaks_off or p.pattern in ("pickled", "copied", "deep copied") or p.error == "StopIteration"
    if p.has_window and p.sampler_draws and carries_over:
        return "the draws of an epoch that continues, or was abandoned, change the next one"
    if p.has_window and p.error_in == "sampler" and p.sampler != "eager":
        return "the window decides when the sampler is asked, and so when it fails"
    return None


def why_invalid_if_seeded(p):
    """Why a program that draws what seed_by seeds may give other batches with other workers, or without workers."""
    if not p.is_map:
        return "the samples of an iterable dataset belong to their worker"
    if p.sampler == "eager" and p.batch_size is None:
        return "with workers, torch's loader walks such a sampler twice"
    if not set(p.samples) <= {*samples.DRAWN, *samples.SIMPLE}:
        return "values that one process sends to another may lose their identity"
    if p.collate not in ("default", "wrapped default", "list", "draws"):
        return "tensors may arrive with another layout than they were made with"
    if p.init == "changes the dataset" or p.error_in in ("init", "sampler") or p.error == "StopIteration":
        return "the program behaves differently without workers"
    if not p.in_order and p.pattern == "subclass" and p.error != "none":
        return "a generator ends with an error, and timing decides what came before"
    if p.pattern not in SEEDED_PATTERNS:
        return "without workers, or with fewer, the loader is at another position"
    if p.persistent and p.sampler not in FIXED_ORDER:
        return "without persistent workers, each epoch draws a base seed, which changes the sampler's draws"
    if p.persistent and p.pattern in ("pickled", "copied", "deep copied", "dataset changed"):
        return "persistent workers have an earlier copy"
    if p.sampler_draws and (p.breaks_off or p.pattern in ("pickled", "copied", "deep copied")):
        return "how far ahead the sampler was asked decides what comes next"
    if p.worker_threads and "draws" in p.samples:  # also without workers, because another run has some
        return "threads share their generators"
    return None


def why_invalid_with_cache(p):
    """Like `why_invalid`, for a cached dataset, which must always make the same samples."""
    if not p.is_map:
        return "only samples with indices are cached"
    if p.depends_on_worker or p.seed_by or "sample seed" in p.samples:
        return "a sample is not always the same"
    if "views" in p.samples:
        return "tensors of a pickled sample no longer share memory"
    if p.pattern in ("pickled", "dataset changed") or p.init == "changes the dataset":
        return "the cache keeps what the dataset made before, and cannot be pickled"
    if p.error_in in ("dataset", "collate"):
        return "a cached sample is not made again, so it does not fail"
    return None


def why_invalid(p):
    """Why a program is invalid or left out; None for a valid one."""
    iterable = not p.is_map
    if p.start_method != "fork" and (p.num_workers not in (1, 2) or p.epochs > 2):
        return "a worker that imports torch takes seconds to start"
    if p.epochs > 3 and p.size > 9:
        return "many epochs are tried with few samples"
    custom_batches = p.sampler in BATCHES
    default_collate = p.collate in ("default", "wrapped default") and not (p.batch_size is None and not custom_batches)
    if iterable != (p.sampler == "none"):
        return "an iterable dataset has no sampler"
    if p.drop_last and (p.batch_size is None or custom_batches):
        return "drop_last needs a batch_size"
    if custom_batches and p.batch_size != 1:
        return "a batch sampler excludes batch_size"
    if p.num_workers == 0 and (p.prefetch_factor or p.persistent or p.timeout or p.context != "none"):
        return "an option for workers, but no workers"
    if p.num_workers == 0 and (p.init != "none" or p.error_in == "init"):
        return "a worker_init_fn, but no workers"
    if (p.error_in == "nowhere") != (p.error == "none"):
        return "an error needs a place"
    if (p.error_in == "iter") and (p.is_map or p.num_workers == 0 or p.persistent):
        # In the second epoch of a persistent worker, it kills torch's worker (T24 in docs/parity.md).
        return "errors of iter(dataset) are tried once for each worker"
    if p.error_in == "init" and p.persistent:
        # torch's worker goes on without its init function in the second epoch; rustloader repeats the error (T24).
        return "after its init function has failed, torch's persistent worker goes on in the next epoch"
    if p.error_in == "sampler" and p.sampler not in ("eager", "lazy", "walk", "infinite"):
        return "torch's samplers do not fail"
    if p.error_in == "init" and p.init == "none":
        return "there is no worker_init_fn to fail"
    if p.error_in == "collate" and p.collate == "default":
        return "torch's function does not fail at will"
    if p.error == "StopIteration" and p.error_in in ("sampler", "iter", "init"):
        return "an end, not an error"
    if p.pattern == "sampler changed" and p.sampler in ("token budget", "packs"):
        return "the batch sampler has no other sampler"
    if p.size == 0 and p.sampler in REFUSE_NOTHING:
        return "the sampler refuses an empty dataset, or there is nothing to repeat"
    if default_collate and any(kind in samples.OTHER for kind in p.samples):
        return "default_collate would walk into them"
    if default_collate and len(p.samples) > 1 and any(kind in samples.REFUSED for kind in p.samples):
        return "a kind that is refused hides the others"
    if p.sampler == "infinite" and p.pattern not in ("break", "again in mid-epoch", "two iterators", "nested loops"):
        return "an infinite sampler has no epoch"
    if p.sampler == "infinite" and p.size == 0:
        return "nothing to repeat"
    if not p.is_ordered and p.depends_on_worker and not p.is_seeded and (p.is_map or p.breaks_off):
        return "timing decides which worker makes a batch"
    if not p.is_ordered and p.error_in in ("init", "iter"):
        return "timing decides which tasks the broken worker gets"
    if not p.is_ordered and not p.is_map and p.warnings_raise:
        return "timing decides which batches are lost to the warning"
    if not p.is_ordered and p.error == "StopIteration":
        return "timing decides what came before the apparent end"
    if not p.is_ordered and p.error_in == "sampler":
        return "timing decides which batch torch's loader loses (T24)"
    if p.error == "group" and p.error_in in ("init", "iter"):
        return "torch's text for it does not name the worker, so that its later errors cannot be told apart"
    if not p.is_ordered and p.pattern == "subclass":
        return "a generator ends with an error, and timing decides what came before"
    if p.structure == "alone" and len(p.samples) > 1:
        return "several kinds need a structure"
    if p.pattern == "two iterators" and p.persistent and not p.is_ordered:
        return "a reset of an unordered epoch"
    return (p.cache and why_invalid_with_cache(p)) or why_invalid_with_options(p)
