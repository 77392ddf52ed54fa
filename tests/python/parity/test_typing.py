"""Type checkers accept our options, and report the same for our class as for torch's."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import uuid

import pytest
from support import ROOT, rustloader

from rustloader.settings import options

pytestmark = [pytest.mark.ours, pytest.mark.timeout(600)]


def _mypy(files):
    # This uses the cache of `make lint`, if there is one: mypy takes a while to read torch.
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--no-pretty", "--no-error-summary"]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    for line in done.stdout.splitlines():
        file, number, severity, text = re.fullmatch(r"(.*?):(\d+): (error|note): (.*)", line).groups()
        yield file, int(number), severity, text.removeprefix("Revealed type is ")


def _pyright(files):
    # With --outputjson, pyright does not ask the network for newer versions.
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, *files], cwd=os.path.dirname(files[0]), capture_output=True, text=True)
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        text = re.sub(r'^Type of ".*" is ', "", each["message"])
        yield each["file"], each["range"]["start"]["line"] + 1, each["severity"], text


@pytest.fixture(params=[_mypy, _pyright], ids=["mypy", "pyright"])
def check(request, tmp_path):
    """Returns a function that runs a type checker over programs, and returns what it reports for each: the lines and
    texts of its errors, and the types that it reveals.
    """
    checker = request.param.__name__[1:]
    if importlib.util.find_spec(checker) is None:
        (pytest.fail if os.environ.get("RUSTLOADER_REQUIRE_ALL") else pytest.skip)(f"{checker} is not installed")

    def run(*programs):
        files = [tmp_path / f"program_{n}.py" for n in range(len(programs))]
        for file, program in zip(files, programs, strict=True):
            # mypy does not repeat what it reported for a cached file.
            file.write_text(f"{program}# {uuid.uuid4()}\n")
        reports = [*request.param([str(file) for file in files])]
        for file in files:
            found = [(line, severity, text) for where, line, severity, text in reports if where == str(file)]
            errors = [(line, text) for line, severity, text in found if severity == "error"]
            yield errors, [(line, text.strip('"')) for line, severity, text in found if severity != "error"]

    return run


def _check_lines(program, errors):
    """Checks that errors are reported in the lines that are marked `error`, and in no others."""
    marked = {n for n, line in enumerate(program.splitlines(), 1) if line.endswith("# error")}
    assert {line for line, _ in errors} == marked, errors


# Lines marked `error` must be errors, and the others must not.
SNIPPET = """
import torch
from {module} import DataLoader, Dataset, IterableDataset, default_collate, random_split
from torch.utils.data import DataLoader as TorchDataLoader

class Pairs(Dataset[tuple[torch.Tensor, int]]):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(1), index

class Stream(IterableDataset[str]):
    pass

class Mine(DataLoader[int]):
    pass

loader = DataLoader(Pairs(), batch_size=4, num_workers=2, prefetch_factor=None, in_order=False)
given: DataLoader[tuple[torch.Tensor, int]] = DataLoader(Pairs(), shuffle=True, collate_fn=default_collate)
reveal_type(loader)
reveal_type(given)
reveal_type(DataLoader(Stream()))  # error
reveal_type(DataLoader(["a", "b"]))  # error
reveal_type(Mine)
reveal_type(loader.dataset)
reveal_type(loader.batch_size)
reveal_type(loader.num_workers)
reveal_type(loader.sampler)
reveal_type(loader.timeout)
reveal_type(loader.prefetch_factor)
reveal_type(loader.multiprocessing_context)
reveal_type(loader._iterator)
reveal_type(loader._get_iterator())
reveal_type(iter(loader))
reveal_type(len(loader))
reveal_type(next(iter(loader)))
reveal_type(DataLoader.__init__)
reveal_type(random_split(Pairs(), [1, 2]))
for batch in loader:
    reveal_type(batch)

def wants_torchs(loader: TorchDataLoader[object]) -> None: ...
def wants_numbers(loader: DataLoader[int]) -> None: ...

wants_torchs(loader)
wants_numbers(Mine(range(3)))  # error
wants_numbers(loader)  # error
DataLoader(Pairs(), batch_size="4")  # error
DataLoader(Pairs(), nonsense=1)  # error
DataLoader(Pairs(), 1, True, None, None, 0, None, False, False, 0, None, None, None, 2)  # error
DataLoader()  # error
loader.nonsense  # error
loader.num_workers = "two"  # error
"""


def _as_torchs(reports):
    """Returns reports about our class without what it adds to torch's signature. pyright does not know the types that
    torch's signature leaves out; in ours they are Any."""
    for line, text in reports:
        text = re.sub(r", dispatch: .*?overlap_epochs: bool \| None =( None)?", "", text)
        text = re.sub(r"\brustloader\.dataloader\b", "torch.utils.data.dataloader", text)
        for ours, theirs in ((" | Literal['auto']", ""), ("Unknown", "Any"), ("Any | None =", "Any ="), ("_1", "_0")):
            text = text.replace(ours, theirs)
        yield line, text


def test_torchs_class_has_the_same_types_and_errors(check):
    theirs, ours = SNIPPET.format(module="torch.utils.data"), SNIPPET.format(module="rustloader")
    (their_errors, their_types), (errors, types) = check(theirs, ours)
    _check_lines(theirs, their_errors)
    assert [*_as_torchs(errors)] == [*_as_torchs(their_errors)]
    assert [*_as_torchs(types)] == [*_as_torchs(their_types)]
    assert len(types) >= SNIPPET.count("reveal_type(")


# For each option, a value in Python's syntax that must pass, and one that must not.
VALUES = {
    "in_order": ("False", "1.5"),
    "prefetch_factor": ("3", "'3'"),
    "persistent_workers": ("True", "'yes'"),
    "multiprocessing_context": ("'spawn'", "'fork_server'"),
    "num_workers": ("'auto'", "'automatic'"),
    "dispatch": ("'shared_queue'", "'shared-queue'"),
    "reorder_window": ("'512MiB'", "0.5"),
    "seed_by": ("'sample'", "'epoch'"),
    "worker_threads": ("4", "'4'"),
    "max_restarts": ("3", "1.5"),
    "stall_timeout": ("2.5", "'2.5'"),
    "on_error": ("lambda index, error: None", "'ignore'"),
    "max_errors": ("0.25", "'1%'"),
    "worker_affinity": ("[0, [1, 4]]", "'all'"),
    "name": ("'train'", "1"),
    "overlap_epochs": ("True", "'yes'"),
    "stateful": ("True", "'yes'"),
}
LOADERS = """
import rustloader
class Squares(rustloader.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index**2
with rustloader.installed(in_order=True):
    pass
"""


def test_each_option_has_a_right_and_a_wrong_value(check):
    calls = [(f"rustloader.{function}(", VALUES) for function in ("install", "installed", "Options")]
    own = options.keywords()
    calls += [(f"rustloader.{loader}(Squares(), 4, ", own) for loader in ("DataLoader", "StatefulDataLoader")]
    right = "".join(f"{call}{name}={VALUES[name][0]})\n" for call, names in calls for name in names)
    wrong = "".join(f"{call}{name}={VALUES[name][1]})  # error\n" for call, names in calls for name in names)
    wrong += "".join(f"{call}nonsense=1)  # error\n" for call, _ in calls)
    wrong += "rustloader.install(True)  # error\nrustloader.Dataloader  # error\n"
    programs = LOADERS + right, LOADERS + wrong
    for program, (errors, _) in zip(programs, check(*programs), strict=True):
        _check_lines(program, errors)


def test_values_in_programs_for_type_checkers_are_right_and_wrong():
    assert [*VALUES] == [*rustloader.Options.__dataclass_fields__]
    for name, (right, wrong) in VALUES.items():
        rustloader.Options(**{name: eval(right)})
        with pytest.raises((TypeError, ValueError)):
            rustloader.Options(**{name: eval(wrong)})


# Each line that reveals a type ends with the type.
SAMPLES = """
import torch
import rustloader

class Pairs(rustloader.Dataset[tuple[torch.Tensor, int]]):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(1), index

class Words:
    def __len__(self) -> int:
        return 2
    def __getitem__(self, index: int) -> str:
        return "ab"[index]

def number(sample: tuple[torch.Tensor, int]) -> int:
    return sample[1]

cached = rustloader.cache(Pairs(), "1GiB")
loader = rustloader.DataLoader(cached, num_workers=2)
reveal_type(cached)  # CachedDataset[tuple[Tensor, int]]
reveal_type(cached[0])  # tuple[Tensor, int]
reveal_type(loader)  # DataLoader[tuple[Tensor, int]]
reveal_type(loader.dataset[0])  # tuple[Tensor, int]
reveal_type(rustloader.StatefulDataLoader(cached))  # StatefulDataLoader[tuple[Tensor, int]]
reveal_type(rustloader.cache(Pairs(), then=number))  # CachedDataset[int]
reveal_type(rustloader.cache(Words()))  # CachedDataset[str]
reveal_type(rustloader.cache([1.5, 2.5]))  # CachedDataset[float]
reveal_type(rustloader.cache(rustloader.cache(Pairs()), then=number))  # CachedDataset[int]
reveal_type(rustloader.prefetch_to_device(loader))  # DeviceLoader[Any]
reveal_type(rustloader.prefetch_to_device([torch.zeros(1)]))  # DeviceLoader[Tensor]
with rustloader.prefetch_to_device([torch.zeros(1)], "cpu") as batches:
    for batch in batches:
        reveal_type(batch)  # Tensor
reveal_type(rustloader.share(Pairs()))  # Pairs
reveal_type(rustloader.share(torch.zeros(1)))  # Tensor
reveal_type(rustloader.share([1, 2]))  # Any
rustloader.cache(Words(), then=number)  # error
rustloader.cache(3)  # error
rustloader.prefetch_to_device(3)  # error
wrong: rustloader.CachedDataset[str] = cached  # error
"""


def test_samples_keep_their_types(check):
    ((errors, types),) = check(SAMPLES)
    _check_lines(SAMPLES, errors)
    expected = {(n, line.partition("# ")[2]) for n, line in enumerate(SAMPLES.splitlines(), 1) if "reveal_type" in line}
    assert {(line, re.sub(r"\b(?:\w+\.)+(\w)", r"\1", text)) for line, text in types} >= expected
