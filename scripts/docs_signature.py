"""A griffe extension, named in mkdocs.yml, that completes signatures and docstrings on the documentation site.

The loaders have the parameters of torch's class and their own. The site is built without torch, so torch's parameters
are listed here; a test compares them with those of the classes. Functions that take ``Options`` get these parameters
and their descriptions only at run time, and ``Stats`` its docstring, so this extension adds them, too.
"""

import importlib
import inspect
import sys
import types
import typing
from pathlib import Path
from typing import Any
from unittest import mock

import griffe

SIGNATURE = """
def __init__(
    self,
    dataset: Dataset,
    batch_size: int | None = 1,
    shuffle: bool | None = None,
    sampler: Sampler | Iterable | None = None,
    batch_sampler: Sampler[list] | Iterable[list] | None = None,
    num_workers: int | Literal["auto"] = 0,
    collate_fn: Callable | None = None,
    pin_memory: bool = False,
    drop_last: bool = False,
    timeout: float = 0,
    worker_init_fn: Callable | None = None,
    multiprocessing_context: str | BaseContext | None = None,
    generator: Generator | None = None,
    *,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    pin_memory_device: str = "",
    in_order: bool = True,
): ...
"""
STATEFUL = "snapshot_every_n_steps: int | None = 1, forward_set_epoch: bool = True"


def options_module() -> Any:
    """Returns ``rustloader.settings.options`` without importing the package, whose extension may not be built."""
    package = types.ModuleType("rustloader")
    package.__path__ = [str(Path(__file__).parents[1] / "python" / "rustloader")]
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "rustloader"]:
            del sys.modules[name]
        sys.modules["rustloader"] = package
        return importlib.import_module("rustloader.settings.options")


class Completed(griffe.Extension):
    """Adds the missing signatures and descriptions, before docstrings are parsed."""

    def __init__(self) -> None:
        self.options = options_module()

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        own = self.parameters(self.options.keywords())
        if cls.path == "rustloader.dataloader.DataLoader":
            assert cls.docstring is not None
            cls.set_member("__init__", made(with_more(own)))
            cls.docstring.value = self.options.with_fields(
                cls.docstring.value, "Keyword Args:", self.options.keywords()
            )
        elif cls.path == "rustloader.stateful_dataloader.loader.StatefulDataLoader":
            cls.set_member("__init__", made(with_more(f"{own}, {STATEFUL}")))
        elif cls.path == "rustloader.metrics.stats.Stats":
            fields = Path(__file__).parents[1] / "python" / "rustloader" / "metrics" / "fields.py"
            cls.docstring = griffe.visit("fields", fields, fields.read_text()).classes["StatsFields"].docstring
        elif cls.path == "rustloader.settings.options.Options" and cls.docstring is not None:
            cls.set_member("__init__", made(f"def __init__(self, {self.parameters()}): ..."))
            cls.docstring.value = inspect.cleandoc(self.options.Options.__doc__)

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        if any(str(decorator.value).startswith("options.takes") for decorator in func.decorators):
            assert func.docstring is not None
            func.parameters = made(f"def taken({self.parameters()}): ...").parameters
            func.docstring.value = self.options.with_fields(func.docstring.value, "Args:")

    def parameters(self, names: list[str] | None = None) -> str:
        """Returns the source of keyword-only parameters for the fields of ``Options`` (default: for all fields)."""
        fields = self.options.Options.__dataclass_fields__
        given = [f"{name}: {annotation_of(self.options.type_of(name))} = None" for name in names or fields]
        return ("" if names else "*, ") + ", ".join(given)


def annotation_of(kind: Any) -> str:
    """Returns the source of a type annotation. Python before 3.14 writes some unions as ``Optional[...]``."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else [kind]
    texts = ["None" if kind is types.NoneType else inspect.formatannotation(kind) for kind in kinds]
    return " | ".join(texts).replace("multiprocessing.context.", "")


def with_more(parameters: str) -> str:
    """Returns torch's signature with further parameters."""
    return SIGNATURE.replace("\n): ...", f"\n    {parameters},\n): ...")


def made(source: str) -> griffe.Function:
    """Returns the function that ``source`` defines."""
    # Without the import, griffe takes the words in ``Literal["auto"]`` for names.
    source = f"from typing import Literal\n{source}"
    (function,) = griffe.visit("made", Path(__file__), source).functions.values()
    return function
