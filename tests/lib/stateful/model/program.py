"""A program: a loader's settings, and what is done with it."""

import dataclasses
import json

DATASETS = ("map", "stateful map", "drawing map", "iterable", "stateful iterable", "generator", "drawing stream")
SAMPLERS = (
    "sequential",
    "shuffle",
    "shuffle with generator",
    "distributed",
    "subset",
    "weighted",
    "weighted with generator",
    "torchdata random",
    "custom",
    "custom iterator state",
    "custom state",
    "batch sampler",
    "batch sampler state",
    "batch sampler budget",
    "batch sampler packs",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a loader.

    Attributes:
        sizes: Samples of each worker's part of an iterable dataset; their sum is the length of a map-style one.
        errors: Indices of the samples that raise; for map-style datasets only.
        slow: Indices of samples that take some milliseconds.
    """

    dataset: str = "map"
    sizes: tuple[int, ...] = (8, 0, 0, 0)
    batch_size: int | None = 1
    drop_last: bool = False
    sampler: str = "sequential"
    num_workers: int = 0
    prefetch_factor: int = 2
    persistent: bool = False
    overlap_epochs: bool = False
    in_order: bool = True
    dispatch: str = "round_robin"
    reorder_window: int | None = None
    seed_by: str = "worker"
    every: int = 1
    errors: tuple[int, ...] = ()
    slow: tuple[int, ...] = ()

    @property
    def is_map(self):
        return "map" in self.dataset

    @property
    def is_drawing(self):
        """Whether samples draw from the program's generator, whose state is the dataset's."""
        return "drawing" in self.dataset

    @property
    def length(self):
        return sum(self.sizes)

    @property
    def is_bound(self):
        """Whether a state can be resumed only with the same num_workers."""
        return self.dataset != "map"

    @property
    def keeps_order(self):
        return self.in_order or self.num_workers == 0


@dataclasses.dataclass(frozen=True)
class Program:
    """Settings and steps: (name, argument, ...).

    ("iter",): begins an epoch, whatever is left of the current one.
    ("next", n): takes up to n answers, batches or errors.
    ("end",): takes all remaining answers, and the end.
    ("save", way, back): takes a state. Ways: "now", "thread" and "handler", the last two while `next`
        runs.
    ("resume", way, changes, same): loads the last state, into the same loader if `same` is true, and begins. Ways:
        "dict", "json", "pickle", "torch".
    ("kill", worker): kills the worker, and takes what `next` still delivers.
    ("interrupt", n): takes up to n answers while Ctrl-C is pressed.
    """

    settings: Settings = Settings()
    steps: tuple[tuple, ...] = ()
    seed: int = 0

    def json(self):
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text):
        parts = json.loads(text)
        settings = {
            name: tuple(value) if isinstance(value, list) else value for name, value in parts["settings"].items()
        }
        return Program(Settings(**settings), tuple(map(tuple, parts["steps"])), parts["seed"])


def changed(settings, changes):
    return dataclasses.replace(settings, **changes)


def why_invalid(settings):
    """Why no loader has these settings, or None."""
    workers = settings.num_workers
    if settings.drop_last and settings.batch_size is None:
        return "batch_size=None and drop_last"
    if not settings.is_map and (settings.sampler != "sequential" or settings.errors):
        return "an iterable dataset has no sampler, and here no errors"
    if settings.is_map and settings.length == 0 and settings.sampler != "sequential":
        return "some samplers need samples"
    if settings.is_drawing and (workers or settings.errors or settings.seed_by != "worker"):
        return "workers have generators of their own"
    if settings.persistent and not workers:
        return "persistent without workers"
    if settings.overlap_epochs and not (settings.persistent and settings.is_map):
        return "epochs overlap in persistent workers with a map-style dataset"
    if settings.sampler.startswith("batch sampler") and (settings.batch_size != 1 or settings.drop_last):
        return "a batch sampler has its own sizes"
    if not workers and (settings.dispatch, settings.reorder_window) != ("round_robin", None):
        return "without workers nothing is dispatched"
    if settings.dispatch == "shared_queue" and settings.dataset != "map":
        return "a dataset with a state, or an iterable one, needs round robin"
    if settings.reorder_window is not None and settings.reorder_window < settings.prefetch_factor * workers:
        return "a window that is too small"
    if settings.sampler == "torchdata random" and settings.batch_size is None:
        return "it draws as often as iter() is called, which is twice with workers"
    if settings.sampler.startswith("weighted") and not settings.in_order:
        return "repeated samples cannot be told apart"
    return None
