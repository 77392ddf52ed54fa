"""Puts one fault at a time into a copy of the code and looks whether a test fails.

The faults stand in the `*.toml` files beside this one; README.md explains how to add one. Everything happens in
`target/mutants`: the copy (`tree`), what cargo builds of it, the output of each mutant's last run (`logs`), and
`results.jsonl`, which gets a line after each mutant. A further run goes on where the last one ended, and does again
what a change of code or tests has put in doubt.
"""

import argparse
import functools
import json
import re
import signal
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import bench
import sources
import syntax
from bench import TREE, WORK
from sources import PYTHON, RUST, Dialect, NotFound
from syntax import Change

HERE = Path(__file__).parent
RESULTS = WORK / "results.jsonl"
WANTED = 0.95


@dataclass
class Mutant:
    """One fault."""

    name: str
    dialect: Dialect
    # What a developer has done wrong, in one sentence.
    fault: str
    # A pattern that fits one piece of the code, and what replaces it; or the statement to leave out.
    find: str = ""
    put: str = ""
    drop: str = ""
    # The function, class or constant that it is in; empty: any.
    at: str = ""
    # What to run first: test files or node ids in tests/python; `cargo ...`, `loom ...`: the arguments of `cargo test`.
    tests: list[str] = field(default_factory=list)
    # Why no test can see it; for survivors alone.
    equivalent: str = ""

    @property
    def is_rust(self) -> bool:
        return self.dialect is RUST

    @functools.cached_property
    def change(self) -> Change:
        """What it does to a file of the repository. Raises NotFound if it does not apply."""
        return self.change_in(bench.ROOT)

    def change_in(self, root: Path) -> Change:
        if bool(self.find) == bool(self.drop):
            raise NotFound("it needs one of `find` and `drop`")
        if self.drop:
            change = syntax.drop(self.dialect, self.at, self.drop, root)
        else:
            change = syntax.replace(self.dialect, self.at, self.find, self.put, root)
        if change.after == change.before:
            raise NotFound("it changes nothing")
        if not sources.is_code(self.dialect, change.after):
            raise NotFound("what it makes is no code")
        return change

    def why_not(self) -> str:
        """Why it cannot be put into the code; empty when it can."""
        try:
            _ = self.change
        except NotFound as error:
            return str(error)
        missing = [t for t in self.tests if not bench.exists(t)]
        return f"there is no test {missing[0]}" if missing else ""


def table() -> list[Mutant]:
    """All mutants, those in Python first: they need no build."""
    found = []
    for file, dialect in (("python.toml", PYTHON), ("rust.toml", RUST)):
        for group in tomllib.loads((HERE / file).read_text()).values():
            tests = group.pop("tests", [])
            found += [Mutant(name, dialect, **{"tests": tests, **fields}) for name, fields in group.items()]
    names = [m.name for m in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        sys.exit(f"error: mutants of the same name: {', '.join(sorted(twice))}")
    return found


# --- results --------------------------------------------------------------------------------------------------------


def key_of(mutant: Mutant, product: str) -> str:
    return bench.digest([product, mutant.change.path, mutant.change.after])


def results() -> dict[str, dict]:
    """The last result of each mutant, and of each baseline."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {line["name"]: line for line in map(json.loads, lines)}


def note(line: dict) -> dict:
    with RESULTS.open("a") as out:
        out.write(json.dumps(line) + "\n")
    return line


def still_true(line: dict | None, key: str) -> bool:
    """Whether a result holds for the code and the tests as they are now."""
    if line is None or line["key"] != key or line["verdict"] == "error":
        return False
    # For a catch the file of the test that caught it counts, for all else every test.
    return line["tests"] == bench.tests_digest(line["by"] if line["verdict"] == "caught" else None)


# --- one mutant -----------------------------------------------------------------------------------------------------


def is_known_to_pass(target: str, product: str) -> bool:
    """Whether a test, or its whole file, has passed in the code as it is."""
    known = results()
    lines = [known.get(f"baseline {name}") for name in (bench.file_of(target), target)]
    return any(line and line["key"] == baseline_key(target, product) and line["verdict"] == "passed" for line in lines)


def baseline_key(target: str, product: str) -> str:
    return bench.digest([product, bench.tests_digest(bench.file_of(target))])


def check(targets: list[str], product: str) -> None:
    """Raises RuntimeError if tests fail in the code as it is."""
    for target in targets:
        if is_known_to_pass(target, product):
            continue
        line = baseline(target, baseline_key(target, product))
        if line["verdict"] != "passed":
            raise RuntimeError(f"{line['by'] or target} fails without the mutant")


def check_together(mutants: list[Mutant], product: str) -> None:
    """Runs the Python tests that are named beside mutants once, all in one process: each by itself would cost the
    imports. If one of them fails, each is run when its mutant is at hand."""
    named = dict.fromkeys(t for m in mutants for t in m.tests if not bench.is_cargo(t))
    targets = [t for t in named if not is_known_to_pass(t, product)]
    if len(targets) < 2:
        return
    start = time.monotonic()
    bench.sync()
    bench.forget_log("baselines")
    if bench.build("baselines", targets) and bench.run_tests(targets, "baselines").passed:
        seconds = round(time.monotonic() - start, 1)
        print(f"passed    {len(targets)} baselines ({seconds:.0f} s)", flush=True)
        for target in targets:
            key = baseline_key(target, product)
            note({"name": f"baseline {target}", "key": key, "verdict": "passed", "by": "", "seconds": seconds})


def baseline(target: str, key: str) -> dict:
    """Runs tests on the code as it is."""
    name = f"baseline {target}"
    start = time.monotonic()
    bench.sync()
    bench.forget_log(name)
    if not bench.build(name, [target]):
        raise RuntimeError("the code does not compile without the mutant")
    outcome = bench.run_tests([target], name)
    verdict, seconds = "passed" if outcome.passed else "failed", round(time.monotonic() - start, 1)
    print(f"{verdict:9} {name} ({seconds:.0f} s)", flush=True)
    return note({"name": name, "key": key, "verdict": verdict, "by": outcome.by, "seconds": seconds})


def attempt(mutant: Mutant, product: str, named: bool) -> dict:
    """Puts the fault into the tree and runs the tests, the named ones first; what came of it."""
    steps = [mutant.tests]
    if not named:
        steps += bench.all_others(mutant.tests, mutant.is_rust)
    bench.forget_log(mutant.name)
    for targets in filter(None, steps):
        check(targets, product)
        bench.sync()
        (TREE / mutant.change.path).write_text(mutant.change.after)
        if not bench.build(mutant.name, targets):
            return {"verdict": "error", "by": "", "how": "it does not compile"}
        outcome = bench.run_tests(targets, mutant.name)
        if not outcome.passed:
            return {"verdict": "caught", "by": outcome.by or targets[0], "how": outcome.how}
    return {"verdict": "open" if named else "survived", "by": "", "how": ""}


def one(mutant: Mutant, product: str, named: bool) -> dict:
    start = time.monotonic()
    try:
        found = attempt(mutant, product, named)
    except RuntimeError as error:
        found = {"verdict": "error", "by": "", "how": str(error)}
    tests = bench.tests_digest(found["by"] if found["verdict"] == "caught" else None)
    seconds = round(time.monotonic() - start, 1)
    return note({"name": mutant.name, "key": key_of(mutant, product), **found, "tests": tests, "seconds": seconds})


# --- the whole ------------------------------------------------------------------------------------------------------


def report(mutants: list[Mutant], broken: dict[str, str], product: str, diffs: bool = False) -> int:
    """Prints what became of each mutant, and what it changes; the exit status."""
    known = results()
    found: dict[str, list[tuple[Mutant, dict]]] = {
        verdict: [] for verdict in ("caught", "survived", "open", "error", "not run")
    }
    for mutant in mutants:
        line = known.get(mutant.name)
        if mutant.name in broken:
            line = {"verdict": "error", "by": "", "how": broken[mutant.name]}
        elif line is None or line["key"] != key_of(mutant, product):
            line = {"verdict": "not run", "by": "", "how": ""}
        found[line["verdict"]].append((mutant, line))
        print(f"{line['verdict']:9} {mutant.name:37} {mutant.at:27} {line['how']} {short(line['by'])}".rstrip())
        if diffs and mutant.name not in broken:
            print(mutant.change.diff())
    caught, survived = found["caught"], found["survived"]
    share = len(caught) / len(mutants)
    in_python = sum(not m.is_rust for m in mutants)
    print(f"\n{len(mutants)} mutants, {in_python} of them in Python: {len(caught)} caught ({share:.1%})")
    for mutant, line in survived:
        reason = mutant.equivalent or f"NO REASON GIVEN. {mutant.fault}"
        print(f"  survived: {mutant.name}: {reason} {line['how']}".rstrip())
    for mutant, line in found["error"]:
        print(f"  error: {mutant.name}: {line['how']}")
    for mutant, _ in found["open"]:
        print(f"  open: {mutant.name}: passes the tests named beside it. {mutant.fault}")
    if found["not run"]:
        print(f"  not run: {len(found['not run'])}")
    for mutant, _ in caught:
        if mutant.equivalent:
            print(f"  {mutant.name} is caught now; its field `equivalent` can go")
    bad = [m for m, _ in survived if not m.equivalent] or found["open"] or found["error"] or found["not run"]
    return 1 if bad or share < WANTED else 0


def short(by: str) -> str:
    return re.sub(r"^tests/python/(\w+/)?", "", by)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", metavar="NAME", action="append", help="this mutant alone, whatever its last result; may be repeated"
    )
    parser.add_argument(
        "--list", action="store_true", help="each mutant as a diff, and what became of it; runs nothing"
    )
    parser.add_argument("--check", action="store_true", help="check that each mutant applies to the code; runs nothing")
    parser.add_argument("--python-only", action="store_true", help="only mutants in Python")
    parser.add_argument(
        "--named", action="store_true", help="only the tests named beside each mutant, for a quick look"
    )
    parser.add_argument(
        "--again", action="store_true", help="do not go on where the last run ended (--resume): do all again"
    )
    parser.add_argument("--resume", action="store_false", dest="again", help=argparse.SUPPRESS)
    parser.add_argument(
        "--jobs", metavar="N", help="cargo's jobs. Mutants run one at a time: tests look at the whole machine"
    )
    chosen = parser.parse_args()
    mutants = [m for m in table() if not (chosen.python_only and m.is_rust)]
    if chosen.only:
        unknown = set(chosen.only) - {m.name for m in mutants}
        if unknown:
            parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
        mutants = [m for m in mutants if m.name in chosen.only]
    broken = {m.name: why for m in mutants if (why := m.why_not())}
    if chosen.check:
        for name, why in broken.items():
            print(f"error: the mutant {name} does not apply: {why}")
        return bool(broken)
    bench.prepare(chosen.jobs)
    product = bench.product_digest()
    if chosen.list:
        return report(mutants, broken, product, diffs=True)
    # Where a shell has started this in the background, SIGINT would be ignored here and in every test.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    known = results()

    def is_to_run(mutant: Mutant) -> bool:
        line = known.get(mutant.name)
        goes_on = not (chosen.again or chosen.only) and not (line and line["verdict"] == "open" and not chosen.named)
        return mutant.name not in broken and not (goes_on and still_true(line, key_of(mutant, product)))

    check_together([m for m in mutants if is_to_run(m)], product)
    for number, mutant in enumerate(mutants, 1):
        if not is_to_run(mutant):
            continue
        line = one(mutant, product, chosen.named)
        told = f"{line['how']} {short(line['by'])}".strip()
        print(
            f"{line['verdict']:9} {number}/{len(mutants)} {mutant.name}: {told} ({line['seconds']:.0f} s)", flush=True
        )
    return report(mutants, broken, product)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; a further run goes on here")
    finally:
        bench.kill_the_rest()
