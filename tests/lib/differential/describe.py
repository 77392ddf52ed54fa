"""Turns what a user can observe (batches, exceptions, warnings, loaders) into plain lists that can be compared."""

import os
import re

import numpy as np
import torch
import torch.utils.data
from roundtrip.compare import Record
from roundtrip.intended import as_by_protocol_4
from support import type_in_torch
from torch.utils.data import dataloader as torch_dataloader

from .recorder import crc

# Facts of a value that may differ: where in its storage a tensor lies, and whose memory an array has. They are compared
# in ``roundtrip/``.
PLACES = ("storage_offset", "nbytes", "storage of", "in shared memory", "owns", "alone")
# torch's loader and rustloader's may deliver equal ones as one object or as several.
TEXTS = (str, bytes, complex)
LOADER_ATTRIBUTES = (
    "batch_size drop_last num_workers prefetch_factor pin_memory pin_memory_device timeout persistent_workers in_order "
    "_dataset_kind _auto_collation _IterableDataset_len_called"
).split()
ITERATOR_ATTRIBUTES = (
    "_num_yielded _base_seed _IterableDataset_len_called _num_workers _prefetch_factor _in_order _persistent_workers "
    "_pin_memory _pin_memory_device _timeout _drop_last _auto_collation _dataset_kind _world_size _rank "
    "_profile_name _shared_seed _pg _shutdown"
).split()


def short(text):
    """The text, or the length and checksum of a long one."""
    return text if len(text) <= 1000 else [len(text), crc(text.encode())]


def name_of(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


def value(batch):
    """A batch, as {path: facts}: types, dtypes, shapes, strides, bytes, which values are one object, and which tensors
    share elements."""
    record = Record(batch)
    return {path: facts_of(record, path) for path in record.facts}


def facts_of(record, path):
    facts, v = record.facts[path], record.objects[path]
    if "same as" in facts and isinstance(v, TEXTS):
        facts = record.facts[facts["same as"]]
    if type(v) is np.ndarray and not v.dtype.hasobject and "same as" not in facts:
        facts = Record(as_by_protocol_4(v)).facts[""]
    return {name: plain(fact) for name, fact in facts.items() if name not in PLACES}


def plain(fact):
    """A fact as a value that JSON can hold."""
    if isinstance(fact, type):
        return name_of(fact)
    if fact is None or type(fact) in (bool, int):
        return fact
    if type(fact) is tuple and all(type(part) is int for part in fact):
        return list(fact)
    return short(normal(repr(fact)))


def tensors(batch):
    """The tensors of a batch that have memory."""
    return [leaf.owner for leaf in Record(batch).leaves if isinstance(leaf.owner, torch.Tensor)]


def compact(shape, strides):
    """The strides without holes for the same order of dimensions; strides of 0 are kept."""
    dense, step = list(strides), 1
    if not strides:
        return dense
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], shape[d])):
        if strides[d] != 0 and shape[d] > 1:
            dense[d] = step
            step *= shape[d]
    return dense


def normal(text):
    """A text with process IDs and addresses masked, and without the library's own frames."""
    text = re.sub(r"\bpid(\(s\))? [\d, ]+", r"pid\1 N", str(text))
    text = re.sub(r"0x[0-9a-f]{6,}", "0xN", text)
    # Since Python 3.14, notes of pickle's errors name the class of each object.
    text = re.sub(r"\b(?:torch\.utils\.data|rustloader)\.dataloader\.DataLoader\b", "DataLoader", text)
    return re.sub(r'  File "([^"]*)", line \d+, in (\S+)\n((?:    .*\n)*)', _frame, text)


def _frame(match):
    file, function, code = match.groups()
    if "/rustloader/" in file or file.endswith("utils/data/_utils/worker.py"):
        return ""
    return f"  {os.path.basename(file)} {function}: {code.strip().splitlines()[0] if code.strip() else ''}\n"


def error(e):
    """An exception: class, text, notes, cause; whatever a handler can inspect."""
    text = normal(e.args[0]) if e.args else ""
    try:
        shown = normal(e)
    except Exception as failed:
        shown = f"str() fails: {failed!r}"
    if isinstance(e, RecursionError):  # the number of frames depends on the caller
        text, shown = (t.splitlines()[:1] for t in (text, shown))
    # Leaves out the note that says what the worker was fetching, which torch does not add.
    notes = [normal(n) for n in getattr(e, "__notes__", []) if not re.match(r"Worker \d+ was fetching batch \d+", n)]
    described = [name_of(type_in_torch(e)), text, shown, notes]
    for link in (e.__cause__, None if e.__suppress_context__ else e.__context__):
        described.append(None if link is None else [name_of(type_in_torch(link)), normal(link)])
    return described


def warning(w):
    """A warning: category, text, and whether it points to user code or to a library."""
    file = w.filename
    place = "library" if "/torch/" in file or "/rustloader/" in file else "user"
    return [w.category.__name__, normal(w.message), place]


def loader(v):
    """A loader: the names of its attributes, the values of the plain ones, the types of the others."""
    values = [[name, repr(getattr(v, name))] for name in LOADER_ATTRIBUTES]
    types = [
        [name, name_of(type(getattr(v, name)))]
        for name in ("sampler", "batch_sampler", "collate_fn", "generator", "_index_sampler", "worker_init_fn")
    ]
    context = v.multiprocessing_context
    return [sorted(vars(v)), values, types, context and context.get_start_method()]


def iterator(v, loader=None):
    """An iterator: its class, its attributes, and which of them are also its loader's."""
    values = [[name, repr(getattr(v, name, "absent"))] for name in ITERATOR_ATTRIBUTES]
    same = loader is not None and [
        getattr(v, "_" + name, None) is getattr(loader, name)
        for name in ("dataset", "collate_fn", "worker_init_fn", "index_sampler")
        if hasattr(loader, name)
    ]
    bases = (torch_dataloader._BaseDataLoaderIter, torch_dataloader._MultiProcessingDataLoaderIter)
    return [type(v).__name__, [isinstance(v, base) for base in bases], values, same, iter(v) is v]
