"""The text that ``repr`` returns for a loader."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch.utils.data import RandomSampler, SequentialSampler, default_collate, default_convert
from torch.utils.data.dataloader import _InfiniteConstantSampler

from rustloader.settings import loader_state, names, options
from rustloader.settings.config import resolve
from rustloader.system.formatting import count_of

# The values of torch's arguments that are not shown.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "collate_fn": (default_collate, default_convert),
    "pin_memory": (False,),
    "drop_last": (False,),
    "timeout": (0,),
    "worker_init_fn": (None,),
    "multiprocessing_context": (None,),
    "generator": (None,),
    "prefetch_factor": (None, options.PREFETCH_FACTOR),
    "persistent_workers": (False,),
    "pin_memory_device": ("",),
    "in_order": (True,),
}
_WORDS = (bool, int, float, str, type(None))
# Maximum length of a list whose items are shown.
_MAX_ITEMS = 8


def of(loader: Any, place: str) -> str:
    """Returns the text for a loader. Of the program's code, this runs only ``len(dataset)`` and properties that a
    subclass of the loader defines.

    Args:
        loader: The loader.
        place: A phrase that says where the loader runs.
    """
    shown = ", ".join(f"{name}={_text(value)}" for name, value in _arguments(loader))
    return f"<{type(loader).__qualname__} of {_dataset(loader.dataset)}: {shown}; {place}>"


def _dataset(dataset: Any) -> str:
    name = type(dataset).__qualname__
    try:
        return f"{name}, {count_of(len(dataset), 'sample')}"
    except Exception:
        return name


def _arguments(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of the arguments in effect, including those of ``install()``. Leaves out those that
    have their default."""
    is_custom = loader.batch_size is None and loader.batch_sampler is not None
    yield ("batch_sampler", loader.batch_sampler) if is_custom else ("batch_size", loader.batch_size)
    if type(loader.sampler) is RandomSampler:
        yield "shuffle", True
    elif type(loader.sampler) not in (SequentialSampler, _InfiniteConstantSampler):
        yield "sampler", loader.sampler
    yield "num_workers", "auto" if loader_state.has_auto(loader) else loader.num_workers
    config = resolve(loader)
    for name, defaults in _DEFAULTS.items():
        value = getattr(config if hasattr(config, name) else loader, name)
        if not any(_is(value, default) for default in defaults):
            yield name, value
    for name in options.keywords():
        value = names.given(loader) if name == "name" else getattr(config, name)
        if not _is(value, options.option_of(name).default):
            yield name, value


def _is(value: Any, default: Any) -> bool:
    """Compares without calling a method of an object of the program."""
    return value is default or (type(value) in _WORDS and type(default) in _WORDS and bool(value == default))


def _text(value: Any) -> str:
    if type(value) in _WORDS:
        return repr(value)
    if type(value) in (list, tuple) and len(value) <= _MAX_ITEMS:
        return f"[{', '.join(map(_text, value))}]"
    return value.__qualname__ if isinstance(value, (FunctionType, MethodType, type)) else type(value).__qualname__
