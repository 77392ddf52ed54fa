"""The docstrings of the public names: their examples run, and the API page can be built from them."""

import doctest
import importlib.resources
import inspect
import re
import textwrap
from typing import get_args

import pytest
import torch
from support import TORCH_MODE, rustloader

from rustloader.settings import options

pytestmark = pytest.mark.ours

NAMES = [] if TORCH_MODE else sorted({*rustloader.__all__} - {*torch.utils.data.__all__} | {"DataLoader"})
CALLABLES = ["DataLoader", "install", "installed", "is_installed", "report", "report_ranks", "serve_metrics", "stats"]
CALLABLES += ["uninstall"]
DATACLASSES = [name for name in NAMES if hasattr(getattr(rustloader, name), "__dataclass_fields__")]
SECTIONS = ("Args:", "Keyword Args:", "Attributes:", "Returns:", "Raises:", "Examples:")


def documented():
    """Each public name that can have a docstring, and the public methods of classes: (name, object)."""
    for name in NAMES:
        value = getattr(rustloader, name)
        if name == "VerdictKind":
            continue  # an alias of a type
        yield name, value
        if name in DATACLASSES:
            for method, function in vars(value).items():
                if not method.startswith("_") and (inspect.isfunction(function) or isinstance(function, property)):
                    yield f"{name}.{method}", function


DOCUMENTED = dict(documented())


def sections(text):
    """The sections of a docstring in Google's style, dedented, by their headings."""
    result, name = {"": []}, ""
    for line in inspect.cleandoc(text).splitlines():
        if line in SECTIONS:
            assert line not in result, f"{line} occurs twice"
            name = line
            result[name] = []
        else:
            result[name].append(line)
    return {name: textwrap.dedent("\n".join(lines)).strip() for name, lines in result.items()}


def entries(section):
    """The names of the entries of a section, which stand before the colons."""
    return [line.split(":")[0] for line in section.splitlines() if line and not line.startswith(" ")]


WITH_EXAMPLES = [
    # Its example shows a loader that falls back to torch's own iterator.
    pytest.param(name, marks=pytest.mark.handover) if name == "Fallback" else name
    for name, value in DOCUMENTED.items()
    if not isinstance(value, property)
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tests = doctest.DocTestFinder(recurse=False).find(
        DOCUMENTED[name], name, module=False, globs={"rustloader": rustloader, "torch": torch}
    )
    assert len(tests) == 1 and tests[0].examples, "it has no example"
    output = []
    runner = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST | doctest.REPORT_NDIFF)
    runner.run(tests[0], out=output.append)
    assert runner.failures == 0, "".join(output)


@pytest.mark.parametrize("name", CALLABLES)
def test_each_parameter_is_described_and_no_other(name):
    value = getattr(rustloader, name)
    parameters = [p for p in inspect.signature(value).parameters if p not in ("self", "args", "kwargs")]
    described = sections(value.__doc__)
    if name == "DataLoader":
        # Args are torch's parameters, some of which older versions lack; Keyword Args are those that torch lacks.
        own = entries(described["Keyword Args:"])
        assert parameters[-len(own) :] == own == options.keywords()
        assert set(parameters) - {*own} <= set(entries(described["Args:"]))
    elif parameters:
        assert entries(described["Args:"]) == parameters
    else:
        assert "Args:" not in described


@pytest.mark.parametrize("name", DATACLASSES)
def test_each_field_is_described_and_no_other(name):
    value = getattr(rustloader, name)
    assert entries(sections(value.__doc__)["Attributes:"]) == list(value.__dataclass_fields__)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_only_sections_that_the_api_page_knows(name):
    text = inspect.cleandoc(DOCUMENTED[name].__doc__)
    headings = [line for line in text.splitlines() if re.fullmatch(r"[A-Z][\w ]+:", line)]
    assert set(headings) <= set(SECTIONS), headings
    for heading, section in sections(text).items():
        if heading in ("Args:", "Keyword Args:", "Attributes:", "Raises:"):
            # One name per entry: "TypeError, ValueError: ..." would be read as one name.
            assert all(re.fullmatch(r"\w+", entry) for entry in entries(section)), entries(section)


def test_the_stub_of_the_extension_has_the_docstring_of_the_extension():
    stub = (importlib.resources.files("rustloader") / "_core.pyi").read_text()
    text = re.search(r'def engine_batches\(\) -> int:\n    """(.*?)"""', stub, re.S)[1]
    assert re.sub(r"\s+", " ", text).strip() == re.sub(r"\s+", " ", rustloader.engine_batches.__doc__).strip()


def test_the_kinds_of_verdicts_are_described():
    text = sections(rustloader.Verdict.__doc__)["Attributes:"]
    assert all(f'"{kind}"' in text for kind in get_args(rustloader.VerdictKind))
