"""Selects the tests of a run: a short form of all tests (`--short`), or one of several equal shares (`--shard 2/4`).

Both depend on tests/durations.json: the seconds that one case of each test function takes on two cores, while other
tests run. A function that is not listed counts as quick. `--record-durations` writes the file from a run.
"""

import itertools
import json
import math
from collections import defaultdict
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "durations.json"

# In a short run, the limit for all cases of a function, and the limit for one case, above which a function is left out.
SECONDS_OF_A_FUNCTION = 2.0
SECONDS_OF_A_CASE = 5.0
# The share of a function's cases that may take longer than that in all: a table stands for many functions.
SHARE_OF_CASES = 0.1
# The limit for one case up to which a function may take longer, to use each value of each parameter.
SECONDS_OF_A_QUICK_CASE = 0.2
# The file lists functions whose cases take at least `RECORDED` seconds; others count as `QUICK`.
RECORDED, QUICK = 0.1, 0.02


def pytest_addoption(parser):
    group = parser.getgroup("lanes")
    group.addoption("--short", action="store_true", help="run a short form of all tests")
    group.addoption("--shard", metavar="I/N", type=shard, help="run one of N shares that take about the same time")
    group.addoption("--quarantined", action="store_true", help="run the tests marked quarantined, too")
    group.addoption("--record-durations", action="store_true", help=f"write {FILE.name} from this run")


def pytest_configure(config):
    if config.option.record_durations and not hasattr(config, "workerinput"):  # not in pytest-xdist's workers
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    for item in items:
        if (marker := item.get_closest_marker("quarantined")) and not config.option.quarantined:
            if len(marker.args) != 1:
                raise pytest.UsageError(f"{item.nodeid}: give the marker `quarantined` one argument, the reason")
            (reason,) = marker.args
            item.add_marker(pytest.mark.skip(reason=f"quarantined: {reason}"))
    functions = defaultdict(list)
    for item in items:
        functions[function_of(item.nodeid)].append(item)
    seconds, kept = read(), set(items)
    if config.option.short:
        kept = {item for name, cases in functions.items() for item in short(cases, seconds.get(name, QUICK))}
    if config.option.shard:
        number, count = config.option.shard
        costs = {name: len(kept & set(cases)) * seconds.get(name, QUICK) for name, cases in functions.items()}
        selected = share(costs, number, count)
        kept = {item for name in selected for item in functions[name] if item in kept}
    left_out = [item for item in items if item not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]


class Recorder:
    """Records the average duration of each function's cases."""

    def __init__(self):
        self.cases, self.passed = defaultdict(float), set()

    def pytest_runtest_logreport(self, report):
        self.cases[report.nodeid] += report.duration
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self):
        functions = defaultdict(list)
        for nodeid in self.passed:
            functions[function_of(nodeid)].append(self.cases[nodeid])
        write({name: sum(cases) / len(cases) for name, cases in functions.items()})


# --- selection ------------------------------------------------------------------------------------


def short(cases, seconds):
    """Returns the cases of a test function for a short run: as many as there is time for, at least one. Quick cases
    use each value of each parameter at least once, even if that takes longer. If a single case takes too long, there
    are none, or one if the function is marked `random`. There are none if the set-up takes long."""
    if cases[0].get_closest_marker("long_setup"):
        return []
    if seconds > SECONDS_OF_A_CASE:
        return cases[:1] if cases[0].get_closest_marker("random") else []
    count = max(int(SECONDS_OF_A_FUNCTION / seconds), math.ceil(SHARE_OF_CASES * len(cases)))
    if len(cases) <= count:
        return cases
    values = [{name: distinct(value) for name, value in parameters(case).items()} for case in cases]
    return [cases[i] for i in cover(values, count, every_value=seconds <= SECONDS_OF_A_QUICK_CASE)]


def cover(cases, count, every_value=False):
    """Returns the positions of at most `count` of `cases`, which are dicts with the same keys. Greedily covers as many
    values as it can, and then as many pairs of values. With `every_value`, covers all values even if that takes more
    than `count` cases."""
    chosen = []
    for size in (1, 2):
        of_case = [set(itertools.combinations(case.items(), min(size, len(case)))) for case in cases]
        missing = set().union(*of_case) - set().union(*(of_case[i] for i in chosen))
        while missing and (len(chosen) < count or (every_value and size == 1)):
            best = max(range(len(cases)), key=lambda i: len(of_case[i] & missing))
            chosen.append(best)
            missing -= of_case[best]
    return chosen


def share(costs, number, count):
    """Returns the names in share `number` (from 1) of `count`. Each name, longest first, goes to the share with the
    lowest total."""
    totals, names = [0.0] * count, [[] for _ in range(count)]
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        least = totals.index(min(totals))
        totals[least] += costs[name]
        names[least].append(name)
    return names[number - 1]


# --- helpers --------------------------------------------------------------------------------------


def shard(text):
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError(text)
    return int(number), int(count)


def function_of(nodeid):
    """Returns a test's file and function, without its folder, since files may move, and without its parameters."""
    return nodeid.partition("[")[0].rpartition("/")[2]


def parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def distinct(value):
    """Returns the value if its type is simple, else its id: other types may not support `==`."""
    return value if isinstance(value, (str, bytes, int, float, type(None))) else id(value)


def existing(names):
    """Returns the names of those test functions that still exist."""
    texts = {path.name: path.read_text() for path in FILE.with_name("python").glob("*/test_*.py")}
    parts = {name: name.split("::") for name in names}
    return {name for name, (file, function) in parts.items() if f"def {function}(" in texts.get(file, "")}


def read():
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def write(seconds):
    """Updates the file. Functions that did not run keep their entries; removed functions lose them."""
    known = {name: round(s, 1) for name, s in (read() | seconds).items() if s >= RECORDED}
    FILE.write_text(json.dumps({name: known[name] for name in sorted(existing(known))}, indent=0) + "\n")
