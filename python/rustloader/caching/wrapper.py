"""A dataset that wraps another one, and the checks of the arguments of ``cache``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeVar

from torch.utils.data import Dataset, IterableDataset

from rustloader.system.forwarding import class_with, special_methods

# The wrapper's own attributes. All others are attributes of the wrapped dataset.
_OWN_ATTRIBUTES = ("dataset", "then", "table", "_origin")
# Special methods of the dataset that the wrapper lacks: they would change the dataset but not the samples in a cache,
# or return samples without `then`. `cached_of` decides about `__getitems__`.
_NOT_FORWARDED = {"__setitem__", "__delitem__", "__next__", "__getitems__"}
_T_co = TypeVar("_T_co", covariant=True)


class Wrapper(Dataset[_T_co]):
    """A dataset with the length, the attributes and the special methods of the dataset that it wraps. The type
    parameter is the type of its samples, after ``then``.

    Attributes:
        dataset: The wrapped dataset.
        then: The function that is applied to each sample, or None.
    """

    dataset: Any
    then: Callable[[Any], Any] | None

    def __init__(self, **own: Any) -> None:
        self.__dict__.update(own)

    @classmethod
    def class_for(cls, dataset: Any) -> type[Self]:
        """Returns the class of the wrapper of a dataset."""
        return class_with(cls, "dataset", special_methods(type(dataset)) - _NOT_FORWARDED)

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[_T_co]:
        return self._iterate(iter, "__iter__", range(len(self)))

    def __reversed__(self) -> Iterator[_T_co]:
        return self._iterate(reversed, "__reversed__", reversed(range(len(self))))

    def _iterate(self, function: Callable[[Any], Iterator[Any]], method: str, indices: Iterable[int]) -> Iterator[Any]:
        """Returns an iterator over the samples, which the dataset makes itself if its class has the method."""
        if not hasattr(type(self.dataset), method):
            return map(self.__getitem__, indices)
        samples = function(self.dataset)
        return samples if self.then is None else map(self.then, samples)

    def __getattr__(self, name: str) -> Any:
        # Unpickling accesses attributes before the dataset is set.
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_ATTRIBUTES:
            self.__dict__[name] = value
        else:
            setattr(self.dataset, name, value)


def check(dataset: Any, then: Any, key: Any, path: Any, version: Any) -> None:
    """Checks the arguments of ``cache``."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__"):
        raise TypeError(
            f"cache() needs a map-style dataset, whose samples have indices, but {name} is not one: cache a map-style "
            "dataset of the files that it reads, or write its samples into such a dataset (a list, or one file each)"
        )
    if not hasattr(type(dataset), "__len__"):
        raise TypeError(f"cache() needs the number of samples, but {name} has no __len__: add one")
    if then is not None and not callable(then):
        raise TypeError(f"then must be a function of a sample, got {then!r}")
    if not isinstance(version, str):
        raise TypeError(f"version must be a str, got {version!r}")
    if key is not None and not isinstance(key, str):
        raise TypeError(f"key must be a str, got {key!r}")
    if key is not None and path is not None:
        raise ValueError(
            "cache() takes a key or a path, not both: ranks that pass the same path already share the file"
        )
