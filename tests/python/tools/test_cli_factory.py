"""Factories of `check` and `bench`: what is not a factory is named, with a remedy; a user's error comes first."""

import os
import pickle
import sys
import textwrap

import pytest
import torch
from support import rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.tools.probe import factory
    from rustloader.tools.probe.failure import failure

FACTORIES = """
    import argparse, sys
    import torch
    from torch.utils.data import DataLoader

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 3
        def __getitem__(self, i):
            return i
    class Loader(DataLoader):
        pass
    class Module:
        def train_dataloader(self):
            return loader()
    class Fabric:
        def setup_dataloaders(self, loader):
            return loader
    class FabricDataLoader:
        pass

    def loader():
        return DataLoader(Numbers(), num_workers=1)
    def derived():
        return Loader(Numbers(), num_workers=1)
    def with_arguments_of_its_own():
        parser = argparse.ArgumentParser()
        parser.add_argument("--workers", type=int, default=3)
        return DataLoader(Numbers(), num_workers=parser.parse_args().workers)
    def with_defaults(root=".", *more, **options):
        return loader()
    def single():
        return DataLoader(Numbers())
    async def coroutine():
        return loader()
    def needing(root, batch_size=4, *, workers):
        return loader()
    class Space:
        @staticmethod
        def loader():
            return loader()
    instance = loader()
    if __name__ == "__main__":
        raise AssertionError("this is not the script")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with factories.py; modules that are imported from it are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    before = set(sys.modules)
    (tmp_path / "factories.py").write_text(textwrap.dedent(FACTORIES))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def make_loader(target, **kw):
    return factory.make(factory.find(target), target, **kw)


def refusal(target):
    with pytest.raises(factory.Unusable) as raised:
        make_loader(target)
    return raised.value


@pytest.mark.parametrize("name", ["loader", "derived", "with_arguments_of_its_own", "with_defaults", "Space.loader"])
@pytest.mark.parametrize("place", ["factories", "factories.py", "./factories.py"])
def test_loaders(place, name, folder):
    assert isinstance(make_loader(f"{place}:{name}"), torch.utils.data.DataLoader)


@pytest.mark.parametrize(
    "target, text",
    [
        ("factories", "'factories' does not name a function; write module:function or file.py:function"),
        ("no_such_thing:f", "there is no module 'no_such_thing' here ("),
        ("factories.sub:f", "there is no module 'factories.sub'"),
        ("no_such_file.py:f", "there is no file no_such_file.py"),
        ("./factories:f", "there is no file ./factories; did you mean ./factories.py?"),
        ("factories:loadr", "factories has no 'loadr'; did you mean loader"),
        ("factories:instance", "factories:instance is a DataLoader, not a function that returns a DataLoader; wri"),
        ("factories:needing", "factories:needing needs arguments (root, workers), but is called without any"),
        ("factories:coroutine", "returned a coroutine, not a torch.utils.data.DataLoader; write `def`, not `async"),
        ("broken_module:f", "importing broken_module failed: ModuleNotFoundError: No module named 'a_missing_lib"),
        ("broken_module.py:f", "No module named 'a_missing_library' (broken_module.py:1 in <module>)"),
        ("script.py:f", "failed: it called sys.exit(1) (script.py:2 in <module>)\n  put the code of the script"),
        ("mistyped.py:f", "importing mistyped.py failed: SyntaxError: "),
        ("latin.py:f", "importing latin.py failed: SyntaxError: "),
        ("json.py:f", "json.py cannot be imported under the name 'json'; rename the file"),
        ("twin.py:f", "rename one"),
        ("./bare_script:f", "must end in .py"),
    ],
)
def test_what_is_no_factory(target, text, folder):
    (folder / "broken_module.py").write_text("import a_missing_library")
    (folder / "script.py").write_text("import sys\nsys.exit(1)\n")
    (folder / "mistyped.py").write_text("def f(:\n")
    (folder / "latin.py").write_bytes(b"name = 'caf\xe9'\n")
    (folder / "json.py").write_text("")
    (folder / "twin").mkdir()
    for name in ("twin/__init__.py", "twin.py", "bare_script"):
        (folder / name).write_text("def f(): pass\n")
    assert text in str(refusal(target))


def write_own(folder, body):
    (folder / "own.py").write_text(f"from factories import *\n\ndef make():\n    {body}\n")


WRONG_KIND = "not a torch.utils.data.DataLoader; "


@pytest.mark.parametrize(
    "body, text",
    [
        ("return loader(), loader()", f"returned a tuple, {WRONG_KIND}return one of its loaders"),
        ("loader()", f"returned None, {WRONG_KIND}is a `return` missing?"),
        ("yield loader()", f"returned a generator, {WRONG_KIND}use `return`, not `yield`"),
        ("return iter(DataLoader(Numbers()))", f"{WRONG_KIND}return the loader, not iter(loader)"),
        ("return Numbers()", f"returned a Numbers, {WRONG_KIND}wrap it in a DataLoader"),
        ("return Module()", "return its train_dataloader()"),
        ("return Fabric()", "return the DataLoader that you pass to setup_dataloaders()"),
        ("return FabricDataLoader()", "return the DataLoader that it wraps"),
        ("return 3", "own:make returned an int, not a torch.utils.data.DataLoader"),
        ("raise OSError('no such data')", "own:make failed: OSError: no such data (own.py:4 in make)"),
        ("return DataLoader([], num_workers=1, shuffle=True, sampler=[1])", "failed: ValueError: sampler option is"),
        ("sys.exit('where is the data?')", "failed: it called sys.exit('where is the data?') (own.py:4 in make)"),
        ("raise KeyboardInterrupt", "own:make failed: KeyboardInterrupt (own.py:4 in make)"),
    ],
)
def test_functions_that_make_no_loader(body, text, folder):
    write_own(folder, body)
    assert text in str(refusal("own:make"))


def test_a_loader_without_workers(folder):
    text = (
        "With `num_workers=0`, torch's own loop runs; there is nothing to accelerate. "
        "Set num_workers to 1 or more in factories:single"
    )
    for remedy in ("", ", or pass --workers 2"):
        with pytest.raises(factory.Unusable) as raised:
            make_loader("factories:single", remedy=remedy)
        assert str(raised.value) == f"{text}{remedy}."
    assert make_loader("factories:single", workers=2).num_workers == 2


def test_the_cause_first_and_the_traceback_on_demand(folder):
    write_own(folder, "raise OSError('no such data')")
    error = pickle.loads(pickle.dumps(refusal("own:make")))
    cause, hint = error.message(verbose=False).splitlines()
    assert cause == "own:make failed: OSError: no such data (own.py:4 in make)"
    assert hint == "  --verbose prints the whole traceback"
    first, empty, title, frame, *_, last = error.message(verbose=True).splitlines()
    assert (first, empty, title) == (cause, "", "Traceback (most recent call last):")
    assert "own.py" in frame and last == "OSError: no such data"
    plain = factory.Unusable("so it is")  # has no details
    assert plain.message(True) == plain.message(False) == str(plain) == "so it is"


# The short form of errors


class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(a, b)


class Failing(torch.utils.data.Dataset):
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 2

    def __getitem__(self, i):
        raise self.error


HERE = os.path.basename(__file__)


@pytest.mark.parametrize(
    "error, text",
    [
        (ValueError("two\n  lines\nof text"), "ValueError: two\n  lines\nof text"),
        (KeyError("a key"), "KeyError: 'a key'"),
        (Odd(1, 2), f"{__name__}.Odd: (1, 2)"),
        (ValueError(), "ValueError"),
    ],
)
def test_an_error_out_of_a_worker(error, text, monkeypatch):
    monkeypatch.chdir(os.path.dirname(__file__))
    loader = torch.utils.data.DataLoader(Failing(error), num_workers=1)
    with pytest.raises(Exception) as raised:
        next(iter(loader))
    description = failure(raised.value)
    assert description.text == text
    assert description.where.startswith(f"{HERE}:") and description.where.endswith(" in __getitem__, worker 0")
    assert "Original Traceback" in description.details


def test_the_users_frame_is_the_innermost_one_outside_of_libraries(monkeypatch):
    monkeypatch.chdir(os.path.dirname(__file__))
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(2).reshape(3)
    description = failure(raised.value)
    assert description.where == f"{HERE}:{raised.traceback[0].lineno + 1} in {raised.traceback[0].name}"
    assert str(description) == f"{description.text} ({description.where})"


def test_a_description_is_short_and_has_no_notes():
    assert len(str(failure(ValueError("x" * 100_000)))) < 1200
    # rustloader adds a note to a worker's error. With it, `check` would find a difference from torch.
    error = KeyError("no sample 0")
    error.add_note("Worker 0 was fetching batch 0.")
    assert failure(error).text == "KeyError: 'no sample 0'" and "Worker 0 was" in failure(error).details
