"""The package's steps around a fork run in one order, which `rustloader.system.forks` lists."""

import ast
import itertools
from pathlib import Path

import pytest
from support import run_script

import rustloader
from rustloader.system import forks

PACKAGE = Path(rustloader.__file__).parent

ORDER = """
import os, sys
from rustloader.system import forks

calls = []
def hook(it):
    # Python 3.14 names the function in the message.
    function = repr(it.object) if it.object else "".join(it.err_msg.partition("<")[1:])
    calls.append((function, str(it.exc_value)))
sys.unraisablehook = hook

def note(call):
    calls.append(call)
    if call == ("after_in_child", "reports"):
        raise SystemExit("an error")

for name in reversed(forks.STEPS):
    forks.at_fork(name, **{part: (lambda call=(part, name): note(call)) for part in PARTS})
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, repr(calls).encode())
    os._exit(0)
os.wait()
print(calls)
print(os.read(reader, 10_000).decode())
"""
PARTS = ("before", "after_in_parent", "after_in_child")


def lines_of(source):
    """The lines that a script prints in a new interpreter."""
    status, out, err = run_script(source, head="", fresh=True)
    assert (status, err) == (0, ""), err
    return out.splitlines()


def test_steps_run_in_the_order_of_the_list_and_an_error_stops_none():
    parent, child = map(ast.literal_eval, lines_of(f"{PARTS = }\n{ORDER}"))
    steps = ("ledgers", "ranks", "reports", "metrics", "workers", "pages", "numpy")
    assert steps == forks.STEPS
    before = [("before", name) for name in reversed(steps)]
    assert parent == [*before, *(("after_in_parent", name) for name in steps)]
    in_child = [("after_in_child", name) for name in steps]
    in_child.insert(3, ("<rustloader's step at a fork: reports, after_in_child>", "an error"))
    assert child == [*before, *in_child]


def test_a_step_that_is_not_in_the_list_is_refused():
    with pytest.raises(ValueError, match=r"^no step at a fork is called 'others': add it to rustloader"):
        forks.at_fork("others", before=print)


def test_a_module_without_a_step_forks_as_before():
    """Only the list is imported."""
    script = """
import os, sys
import rustloader.system.forks as forks
assert not any(map(forks.registered, forks.STEPS))
os.fork() or os._exit(0)
print(os.wait()[1], "torch" in sys.modules)
"""
    assert lines_of(script) == ["0 False"]


def test_each_step_has_the_parts_that_it_needs():
    script = """
import rustloader
from rustloader.system import forks
from rustloader.sharing import ranks
rustloader.DataLoader, rustloader.report, rustloader.share, rustloader.serve_metrics
print({name: forks.registered(name) for name in forks.STEPS})
"""
    (line,) = lines_of(script)
    registered = ast.literal_eval(line)
    assert registered.pop("pages") in ((), ("after_in_parent",))  # not in Python 3.13
    assert registered == {
        "ledgers": ("after_in_child",),
        "ranks": PARTS,
        "reports": ("after_in_child",),
        "metrics": ("after_in_child",),
        "workers": ("after_in_child",),
        "numpy": (),  # only in the fork server
    }


def calls_in(path):
    """The function calls in a file: (name, first argument if it is a literal)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            first = node.args[0] if node.args else None
            yield ast.unparse(node.func).rpartition(".")[2], getattr(first, "value", None)


def test_each_step_of_the_list_has_one_module_and_no_module_has_another_hook():
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "forks.py"]
    calls = list(itertools.chain.from_iterable(map(calls_in, paths)))
    assert "register_at_fork" not in {name for name, _ in calls}
    assert sorted(step for name, step in calls if name == "at_fork") == sorted(forks.STEPS)
