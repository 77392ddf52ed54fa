"""Classes of wrappers that have the special methods of the objects that they wrap.

Python looks up the special methods behind ``len(x)``, ``x()``, ``item in x`` and ``with x`` in the class, so the
``__getattr__`` of a wrapper cannot forward them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar, cast

_Class = TypeVar("_Class", bound=type)

# Special methods that concern the object itself, not what it contains: construction, attributes, copies, pickles,
# identity and text.
_OBJECT_ITSELF = {
    *dir(object),
    *(
        "__post_init__",
        "__del__",
        "__set_name__",
        "__class_getitem__",
        "__getattr__",
        "__annotate__",
        "__annotate_func__",
    ),
    *("__copy__", "__deepcopy__", "__replace__", "__getnewargs__", "__getnewargs_ex__", "__setstate__"),
}


def special_methods(kind: type) -> set[str]:
    """Returns the names of the special methods that a class and its bases define, except those for the object
    itself."""
    names = {name for base in kind.__mro__ for name in vars(base) if name.startswith("__") and name.endswith("__")}
    return {name for name in names - _OBJECT_ITSELF if callable(getattr(kind, name, None))}


def class_with(base: _Class, attribute: str, names: Iterable[str]) -> _Class:
    """Returns a subclass of a wrapper's class with special methods that call those of the wrapped object. A method
    that returns the wrapped object returns the wrapper instead.

    Args:
        base: The class of the wrapper. Its own methods are not replaced.
        attribute: The attribute in which a wrapper keeps the wrapped object.
        names: The names of the methods.
    """
    # `hasattr` would also find the methods of the metaclass, such as `__call__`.
    missing = frozenset(names).difference(*map(vars, base.__mro__[:-1]))
    return cast(_Class, _class_with(base, attribute, missing)) if missing else base


@cache
def _class_with(base: type, attribute: str, names: frozenset[str]) -> type:
    methods: dict[str, Any] = {name: _forwarding(name, attribute) for name in sorted(names)}
    about = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base)(base.__name__, (base,), methods | about)


def _forwarding(name: str, attribute: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = vars(self)[attribute]
        result = getattr(wrapped, name)(*args, **kwargs)
        return self if result is wrapped else result

    method.__name__ = name
    return method
