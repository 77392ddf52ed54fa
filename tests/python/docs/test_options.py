"""`rustloader.Options`: everything that takes options follows its fields."""

import argparse
import ast
import dataclasses
import importlib
import inspect
import pickle
import re
import typing
from multiprocessing.context import BaseContext

import numpy as np
import pytest
from support import TORCH_MODE, TorchDataLoader, run_script, rustloader
from test_docs import PAGES, ROOT

from rustloader.installation.environment import parse_install
from rustloader.settings import option_values, options
from rustloader.settings.config import resolve, view_for_torch
from rustloader.system.install_handle import Installed
from rustloader.tools.cli import parser as commands

pytestmark = pytest.mark.ours

FIELDS = [] if TORCH_MODE else dataclasses.fields(rustloader.Options)
NAMES = [field.name for field in FIELDS]
# For each option, a value that is not torch's default, and that value as text.
OTHER = {
    "in_order": (False, "0"),
    "prefetch_factor": (3, "3"),
    "persistent_workers": (True, "1"),
    "multiprocessing_context": ("spawn", "spawn"),
    "num_workers": ("auto", "auto"),
    "dispatch": ("shared_queue", "shared_queue"),
    "reorder_window": ("512MiB", "512MiB"),
    "seed_by": ("sample", "sample"),
    "worker_threads": (4, "4"),
    "max_restarts": (3, "3"),
    "stall_timeout": (2.5, "2.5"),
    "on_error": ("skip", "skip"),
    "max_errors": (0.25, "0.25"),
    "worker_affinity": ([[0], [1, 4], [2, 3]], "0/1+4/2-3"),
    "name": ("train: a.py/3", "train: a.py/3"),
    "overlap_epochs": (True, "1"),
    "stateful": (True, "1"),
}


@pytest.fixture(params=["installation.api", "iterator.unsupported"])
def module(request):
    return importlib.import_module(f"rustloader.{request.param}")


@pytest.mark.parametrize("function", ["install", "installed"])
def test_the_functions_take_the_fields(module, function):
    function = getattr(module, function)
    parameters = inspect.signature(function).parameters
    assert [(p.name, p.default, p.annotation, p.kind) for p in parameters.values()] == [
        (field.name, None, field.type, inspect.Parameter.KEYWORD_ONLY) for field in FIELDS
    ]
    hints = typing.get_type_hints(function)
    returned = {"install": None, "installed": Installed}[function.__name__]
    assert inspect.signature(function).return_annotation is returned
    assert hints.pop("return") is (returned or type(None))
    assert hints == typing.get_type_hints(rustloader.Options)
    # scripts/docs_signature.py finds the functions by this line.
    assert inspect.getsource(function).startswith("@options.takes(options.Options)\n")
    for name in NAMES:
        assert f"{name}: {options.option_of(name).text}" in re.sub(r"\s+", " ", function.__doc__)


def test_the_functions_refuse_what_is_no_field(module):
    for call in (module.install, module.installed):
        with pytest.raises(TypeError, match=rf"^{call.__name__}\(\) got an unexpected keyword argument 'batch_size'$"):
            call(batch_size=2)
        with pytest.raises(TypeError, match=rf"^{call.__name__}\(\) takes 0 positional arguments but 1 was given$"):
            call(True)
        with pytest.raises(TypeError, match=r"'num_worker'\nDid you mean num_workers instead of num_worker\?$"):
            call(num_worker="auto")


def test_the_site_gets_parameters_and_descriptions_without_the_package():
    """Runs a part of scripts/docs_signature.py: griffe, which the whole imports, is not installed here."""
    source = (ROOT / "scripts" / "docs_signature.py").read_text()
    load = re.search(r"^def options_module\(.*?\n(?=\n\n)", source, re.DOTALL | re.MULTILINE)[0]
    namespace = {"__file__": str(ROOT / "scripts" / "docs_signature.py")}
    imports = "\n".join(re.findall(r"^(?:import|from) (?!griffe).*$", source, re.MULTILINE))
    exec(f"{imports}\n{load}", namespace)
    alone = namespace["options_module"]()
    assert alone.Options is not rustloader.Options and list(alone.Options.__dataclass_fields__) == NAMES
    assert alone.with_fields("Does.\n\nRaises:\n    X: y", "Args:").startswith(f"Does.\n\nArgs:\n    {NAMES[0]}: ")


def test_the_environment_and_the_flags_of_run_take_the_fields():
    parser = argparse.ArgumentParser()
    commands._add_options(parser)
    assert vars(parser.parse_args([])) == dict.fromkeys(NAMES)
    for name in NAMES:
        value, text = OTHER[name]
        option = options.option_of(name)
        assert parse_install(f"{name}={text}") == {name: value}
        with pytest.raises(ValueError, match=re.escape(f"{name} ({option.kind.expected})")):
            parse_install(f"{name}=*")
        given = [option.flag, text] if option.flag in commands._valued_flags() else [option.flag]
        assert getattr(parser.parse_args(given), name) == value
        assert rustloader.Options(**{name: value})


def test_the_page_has_every_option_with_its_type_and_flag():
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|.*\| `([^`]+)` \|$", PAGES["docs/options.md"].read_text(), re.MULTILINE)
    documented = {name: (re.findall(r"`(\w+)`", kind), flag.split()) for name, kind, flag in rows}
    expected = {}
    for field in FIELDS:
        kinds = [kind for kind in typing.get_args(field.type) if kind not in (type(None), BaseContext)]
        option = options.option_of(field.name)
        names = ["str" if typing.get_origin(kind) is typing.Literal else kind.__name__ for kind in kinds]
        expected[field.name] = (names, [*filter(None, [option.flag, option.metavar])])
    assert documented == expected


def _definition(scope, kind, name):
    return next(it for it in ast.walk(scope) if isinstance(it, kind) and it.name == name)


def _parameters(module, cls):
    """Returns the annotations of the parameters that type checkers see, as source."""
    cls = _definition(ast.parse(inspect.getsource(importlib.import_module(module))), ast.ClassDef, cls)
    arguments = _definition(cls, ast.FunctionDef, "__init__").args  # the first definition: the one under TYPE_CHECKING
    return {it.arg: ast.unparse(it.annotation) for it in arguments.args[1:] + arguments.kwonlyargs}


def test_type_checkers_see_the_types_of_the_fields_in_loaders():
    own = _definition(ast.parse(inspect.getsource(options)), ast.ClassDef, "Options").body
    fields = {it.target.id: ast.unparse(it.annotation) for it in own if isinstance(it, ast.AnnAssign)}
    loader = _parameters("rustloader.dataloader", "DataLoader")
    assert list(loader) == [*inspect.signature(rustloader.DataLoader).parameters]
    assert {name: loader[name] for name in options.keywords()} == {name: fields[name] for name in options.keywords()}
    stateful = _parameters("rustloader.stateful_dataloader.loader", "StatefulDataLoader")
    assert stateful == loader | {"snapshot_every_n_steps": "int | None", "forward_set_epoch": "bool"}


@pytest.mark.parametrize("field", FIELDS, ids=NAMES)
def test_words_of_a_type_are_the_words_that_are_accepted(field):
    kinds = typing.get_args(field.type)
    words = {word for kind in kinds if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind)}
    kind = options.option_of(field.name).kind
    assert words == {*getattr(kind, "choices", ["spread"] if isinstance(kind, option_values.Cores) else [])}
    for word in words:
        kind.check(field.name, word)


def test_options_give_way_to_what_differs_from_torchs_defaults():
    loader = TorchDataLoader(range(2), num_workers=1)
    arguments = inspect.signature(TorchDataLoader).parameters
    for name in set(NAMES) - set(options.keywords()) - {"stateful", "num_workers"}:
        unset = options.option_of(name).unset
        assert {arguments[name].default, getattr(loader, name)} == set(unset)
        assert OTHER[name][0] not in unset
    assert loader.prefetch_factor == options.PREFETCH_FACTOR


@pytest.mark.parametrize(("name", "own"), [("on_error", "raise"), ("max_restarts", 0), ("worker_threads", 1)])
def test_options_give_way_to_what_a_loader_was_given_even_if_it_is_the_default(name, own):
    loader = rustloader.DataLoader(range(2), num_workers=1, **{name: own})
    other = rustloader.DataLoader(range(2), num_workers=1)
    with rustloader.installed(**{name: OTHER[name][0]}):
        assert getattr(resolve(loader), name) == own
        assert getattr(resolve(other), name) == OTHER[name][0]


@pytest.mark.parametrize(
    ("name", "texts"),
    [("worker_affinity", ["0", "0/1+3", "2-4/1", "spread"]), ("max_errors", ["0", "12", "0.5", "0.00001", "1e-3"])],
)
def test_values_have_the_form_of_the_command_line(name, texts):
    parse = options.option_of(name).kind.parse
    for text in texts:
        value = parse(text)
        reparsed = parse(option_values.text_of(value))
        assert reparsed == value and type(reparsed) is type(value)


def test_one_is_an_error_and_one_point_zero_a_share():
    assert [type(options.option_of("max_errors").kind.parse(text)) for text in ("1", "1.0")] == [int, float]


def test_an_option_that_no_loader_has_leaves_loaders_alone():
    loader = TorchDataLoader(range(2), num_workers=1)
    options.replace({"stateful": True})
    try:
        assert view_for_torch(loader, resolve(loader)) is loader
    finally:
        options.replace({})


def test_it_is_a_frozen_value():
    one = rustloader.Options(prefetch_factor=4)
    assert repr(one) == "rustloader.Options(prefetch_factor=4)" and repr(rustloader.Options) == (
        "<class 'rustloader.Options'>"
    )
    assert pickle.loads(pickle.dumps(one)) == one and b"rustloader.settings.options" not in pickle.dumps(one)
    assert one != rustloader.Options() and hash(one) == hash(rustloader.Options(prefetch_factor=4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.prefetch_factor = 3
    with pytest.raises(TypeError):
        rustloader.Options(True)


WRONG = [
    ("in_order", 1, TypeError),
    ("prefetch_factor", 0, ValueError),
    ("num_workers", "many", ValueError),
    ("num_workers", 4, TypeError),
    ("dispatch", "fastest", ValueError),
    ("dispatch", 1, TypeError),
    ("reorder_window", 0, ValueError),
    ("reorder_window", "0B", ValueError),
    ("reorder_window", "many", ValueError),
    ("reorder_window", 1.5, TypeError),
    ("reorder_window", True, TypeError),
    ("reorder_window", "9" * 400 + "B", ValueError),
    ("seed_by", "epoch", ValueError),
    ("worker_threads", 0, ValueError),
    ("max_restarts", -1, ValueError),
    ("max_restarts", 1.0, TypeError),
    ("max_restarts", True, TypeError),
    ("stall_timeout", 0, ValueError),
    ("stall_timeout", float("inf"), ValueError),
    ("stall_timeout", float("nan"), ValueError),
    ("stall_timeout", "1", TypeError),
    ("on_error", "ignore", ValueError),
    ("on_error", 1, TypeError),
    ("max_errors", -1, ValueError),
    ("max_errors", 1.5, ValueError),
    ("max_errors", float("nan"), ValueError),
    ("max_errors", True, TypeError),
    ("max_errors", "1", TypeError),
    ("worker_affinity", "all", ValueError),
    ("worker_affinity", 0, TypeError),
    ("worker_affinity", {0, 1}, TypeError),
    ("worker_affinity", [], ValueError),
    ("worker_affinity", [0, []], ValueError),
    ("worker_affinity", [0, [-1]], ValueError),
    ("worker_affinity", [True], TypeError),
    ("worker_affinity", ["01"], TypeError),
    ("name", "", ValueError),
    ("name", " a", ValueError),
    ("name", "a\nb", ValueError),
    ("name", "a" * 101, ValueError),
    ("name", 1, TypeError),
    ("overlap_epochs", 1, TypeError),
    ("stateful", 1, TypeError),
]


@pytest.mark.parametrize("name, value, error", WRONG)
def test_it_checks_its_values(name, value, error):
    with pytest.raises(error, match=f"^{name} must be .*, got {re.escape(repr(value))}$"):
        rustloader.Options(**{name: value})
    if name in options.keywords():
        with pytest.raises(error, match=f"^{name} must be .*, got {re.escape(repr(value))}$"):
            rustloader.DataLoader(range(2), **{name: value})
        loader = rustloader.DataLoader(range(2), num_workers=1, persistent_workers=True, **{name: OTHER[name][0]})
        setattr(loader, name, value)
        with pytest.raises(error, match=f"^{name} must be .*, got {re.escape(repr(value))}$"):
            options.in_force(loader, name)


@pytest.mark.parametrize("kind", ["torch", "ours"])
@pytest.mark.parametrize("workers", [0, 1])
def test_names_of_options_that_a_program_uses_itself_are_no_options(kind, workers):
    class Mine(TorchDataLoader if kind == "torch" else rustloader.DataLoader):
        def dispatch(self, batch):
            return batch

        reorder_window = property(lambda self: 1 / 0)

        def __init__(self, *args, **kw):
            super().__init__(*args, **kw)
            self.seed_by = "epoch"
            self.worker_threads = 0

    with rustloader.installed():
        assert [x.tolist() for x in Mine(range(4), batch_size=2, num_workers=workers)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("name, value", [("max_restarts", 1), ("stall_timeout", 1.5)])
def test_without_workers_nothing_can_be_started_again(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={value} needs workers: .*set num_workers to 1 or more"):
        rustloader.DataLoader(range(2), **{name: value})
    with rustloader.installed(**{name: value}):
        assert len(list(rustloader.DataLoader(range(2)))) == 2
    assert len(list(rustloader.DataLoader(range(2), max_restarts=0))) == 2


def test_a_function_may_decide_about_errors():
    def decide(index, error):
        return index

    assert rustloader.Options(on_error=decide).on_error is decide
    assert rustloader.DataLoader(range(2), on_error=decide).on_error is decide
    assert [rustloader.Options(max_errors=value).max_errors for value in (0, 7, 0.0, 1.0)] == [0, 7, 0.0, 1.0]


def test_a_window_beyond_the_machine_is_no_limit():
    for value in (10**30, "9" * 30 + "B"):
        loader = rustloader.DataLoader(range(4), num_workers=1, batch_size=None, reorder_window=value)
        iterator = iter(loader)
        assert list(iterator) == [0, 1, 2, 3] and iterator.engine_batches == 4


def test_an_array_is_no_word():
    with pytest.raises(TypeError, match=r"^dispatch must be "):
        rustloader.Options(dispatch=np.array(["a", "b"]))


def test_sizes():
    assert [option_values.byte_size(text) for text in ("1B", "2 kB", "1.5 GB", "512MiB", "2GiB")] == [
        1, 2000, 1_500_000_000, 512 << 20, 2 << 30,
    ]  # fmt: skip
    for text in ("", "5", "1.5", "-1MB", "1 m", "0.5B", "1TB", "MB"):
        with pytest.raises(ValueError):
            option_values.byte_size(text)


def test_a_loader_takes_the_options_that_torch_does_not_have():
    own = options.keywords()
    torch_parameters = inspect.signature(TorchDataLoader).parameters
    parameters = inspect.signature(rustloader.DataLoader).parameters
    assert list(parameters) == [*torch_parameters, *own]
    assert all(parameters[name] == torch_parameters[name] for name in torch_parameters)
    assert [parameters[name].annotation for name in own] == [field.type for field in FIELDS if field.name in own]
    plain = rustloader.DataLoader(range(2))
    assert vars(plain).keys() == vars(TorchDataLoader(range(2))).keys()
    values = {name: OTHER[name][0] for name in own}
    loader = rustloader.DataLoader(range(2), num_workers=1, persistent_workers=True, **values)
    for name, value in values.items():
        assert getattr(plain, name) is None and getattr(loader, name) == value == options.in_force(loader, name)
        assert options.in_force(TorchDataLoader(range(2)), name) == options.option_of(name).default
        assert f"{name}: {options.option_of(name).text}" in re.sub(r"\s+", " ", rustloader.DataLoader.__doc__)


def test_neither_options_nor_the_environment_need_torch():
    source = """
        import sys
        import rustloader, rustloader.installation.environment
        rustloader.Options(in_order=False)
        print("torch" in sys.modules)
    """
    status, out, err = run_script(source, head="")
    assert (status, out) == (0, "False\n"), err


def test_cores_beyond_any_machine_are_refused_at_once():
    with pytest.raises(ValueError, match="0-9999999999"):
        options.option_of("worker_affinity").kind.parse("0-9999999999")
