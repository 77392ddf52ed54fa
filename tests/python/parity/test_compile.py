"""A loop under `torch.compile`: no frame of this package is traced, just as none of torch's loader is."""

import pytest
from support import run_script

pytestmark = pytest.mark.ours

GIVEN = """
import importlib, logging, sys
import torch, torch.utils.data

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.full((4,), float(i)) + torch.ones(4)

class CompiledInWorker(Rows):
    # Names the frames that Dynamo has compiled in this worker.
    def __getitem__(self, i):
        self.made = super().__getitem__(i) * 2
        return named(self.made)

def named(row):
    return torch.tensor([sum(map(ord, name)) for name in sorted({"", *compiled})[-1:]]).repeat(4)

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([torch.ones(4)] * 8)

# Files and names of the frames that were compiled in this process.
compiled = []

def note(code, new_code):
    compiled.append(f"{code.co_filename}:{code.co_name}")

def with_dynamo():
    dynamo = importlib.import_module("torch._dynamo")
    importlib.import_module("torch._logging").set_logs(dynamo=logging.ERROR)
    if hasattr(dynamo.config, "fail_on_recompile_limit_hit"):  # not in torch 2.6
        dynamo.config.fail_on_recompile_limit_hit = True
    importlib.import_module("torch._dynamo.convert_frame").register_bytecode_hook(note)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert len(compiled) == 1

def traced(loader, backend="eager"):
    '''The frames that Dynamo has compiled, and the sum of each epoch.'''
    def loop():
        total = torch.zeros(4)
        for batch in loader:
            total = total + batch.sum(0)
        return total
    torch._dynamo.reset()
    compiled.clear()
    sums = [torch.compile(loop, backend=backend)().tolist() for _ in range(3)]
    return sorted(compiled), sums

def given(**more):
    return dict(batch_size=2, **more)
"""

LOADERS = """
import rustloader
torchs = torch.utils.data.DataLoader

def of_all(make):
    '''The results of the loop over each kind of loader, torch's first.'''
    yield "torch", traced(make(torchs))
    yield "DataLoader", traced(make(rustloader.DataLoader))
    yield "StatefulDataLoader", traced(make(rustloader.StatefulDataLoader))
    with rustloader.installed():
        yield "install", traced(make(torchs))
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_t30_no_frame_of_the_loader_is_traced(workers):
    status, out, err = run_script(
        GIVEN
        + LOADERS
        + f"""
workers = {workers}
with_dynamo()
persistent = dict(persistent_workers=True) if workers else {{}}
for name, make in {{
    "map": lambda cls: cls(Rows(), **given(num_workers=workers)),
    "shuffled": lambda cls: cls(Rows(), **given(num_workers=workers, shuffle=True)),
    "persistent": lambda cls: cls(Rows(), **given(num_workers=workers, **persistent)),
    "iterable": lambda cls: cls(Stream(), **given(num_workers=workers)),
    "in a worker": lambda cls: cls(CompiledInWorker(), **given(num_workers=workers)),
}}.items():
    found = dict(of_all(make))
    for kind, what in found.items():
        assert what == found["torch"], (name, kind, what, found["torch"])
    if workers == 0:
        assert traced(make(torchs), "aot_eager") == traced(make(rustloader.DataLoader), "aot_eager")
rows = rustloader.DataLoader(Rows(), **given(num_workers=workers))
assert traced(rustloader.prefetch_to_device(rows, "cpu")) == traced(rows)
print("done")
"""
    )
    assert status == 0 and out.endswith("done\n"), err[-3000:]


@pytest.mark.parametrize("first", ["torch._dynamo", "rustloader", "a loader", "an iterator"])
def test_t30_whatever_is_imported_first(first):
    status, out, err = run_script(
        GIVEN
        + f"""
first = {first!r}
if first == "torch._dynamo":
    with_dynamo()
import rustloader
loader = rustloader.DataLoader(Rows(), **given()) if first in ("a loader", "an iterator") else None
batches = iter(loader) if first == "an iterator" else loader
if first != "torch._dynamo":
    assert rustloader.DataLoader and "torch._dynamo" not in sys.modules
    with_dynamo()
batches = batches or rustloader.DataLoader(Rows(), **given())
frames = traced(batches)[0]
assert not [frame for frame in frames if "/rustloader/" in frame], frames
assert sys.modules["torch._dynamo.trace_rules"].check(rustloader.DataLoader.__iter__)
# The hook that waited for the import is gone.
assert not [it for it in sys.meta_path if type(it).__module__ == "rustloader.system.after_import"]
print("done")
""",
        head="",
    )
    assert status == 0 and out.endswith("done\n"), err[-3000:]


def test_t30_programs_without_torch_compile_do_not_import_dynamo():
    status, out, err = run_script(
        GIVEN
        + """
import rustloader
for workers in (0, 1):
    for cls in (rustloader.DataLoader, rustloader.StatefulDataLoader):
        for _ in rustloader.prefetch_to_device(cls(Rows(), **given(num_workers=workers)), "cpu"):
            pass
print([it for it in sys.modules if it.startswith("torch._dynamo")])
"""
    )
    assert (status, out) == (0, "[]\n"), err[-3000:]
