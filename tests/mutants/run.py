"""Puts one fault at a time into a copy of the code, and checks whether a test fails.

The faults are in the `*.toml` files of this folder; README.md explains how to add one. Everything happens in
`target/mutants`: the copy (`tree`), cargo's builds, the output of each mutant's last run (`logs`), and `results.jsonl`,
which gets a line per mutant. The next run continues where the last one ended, and repeats mutants whose results are
invalid after a change of code or tests.
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
REQUIRED = 0.95


@dataclass
class Mutant:
    """One fault."""

    name: str
    dialect: Dialect
    # The wrong behavior, in one sentence.
    fault: str
    # A pattern that fits one piece of code, and its replacement; or a pattern for statements to remove.
    find: str = ""
    put: str = ""
    drop: str = ""
    # The function, class or constant that contains it; any if empty.
    at: str = ""
    # Tests to run first: test files or node ids in tests/python, or `cargo ...` or `loom ...` with the arguments of
    # `cargo test`.
    tests: list[str] = field(default_factory=list)
    # For survivors only: why no test can see the fault.
    equivalent: str = ""

    @property
    def is_rust(self) -> bool:
        return self.dialect is RUST

    @functools.cached_property
    def change(self) -> Change:
        """The change of a file of the repository. Raises NotFound if it does not apply."""
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
            raise NotFound("its result is no code")
        return change

    def why_not(self) -> str:
        """Returns why it does not apply, or an empty string."""
        try:
            _ = self.change
        except NotFound as error:
            return str(error)
        missing = [t for t in self.tests if not bench.exists(t)]
        return f"there is no test {missing[0]}" if missing else ""


def table() -> list[Mutant]:
    """Returns all mutants, those in Python first: they need no build."""
    mutants = []
    for file, dialect in (("python.toml", PYTHON), ("rust.toml", RUST)):
        for group in tomllib.loads((HERE / file).read_text()).values():
            tests = group.pop("tests", [])
            mutants += [Mutant(name, dialect, **{"tests": tests, **fields}) for name, fields in group.items()]
    names = [m.name for m in mutants]
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
        sys.exit(f"error: duplicate names of mutants: {', '.join(sorted(duplicates))}")
    return mutants


# --- results --------------------------------------------------------------------------------------------------------


def key_of(mutant: Mutant, product: str) -> str:
    return bench.digest([product, mutant.change.path, mutant.change.after])


def results() -> dict[str, dict]:
    """Returns the last result of each mutant and of each baseline, by name."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {line["name"]: line for line in map(json.loads, lines)}


def record(line: dict) -> dict:
    with RESULTS.open("a") as out:
        out.write(json.dumps(line) + "\n")
    return line


def is_valid(line: dict | None, key: str) -> bool:
    """Whether a result is valid for the current code and tests."""
    if line is None or line["key"] != key or line["verdict"] == "error":
        return False
    # A caught mutant depends on the file of the test that caught it, any other on all tests.
    return line["tests"] == bench.tests_digest(line["by"] if line["verdict"] == "caught" else None)


# --- one mutant -----------------------------------------------------------------------------------------------------


def is_known_to_pass(target: str, product: str) -> bool:
    """Whether a test, or its whole file, has passed with the current code."""
    known = results()
    lines = [known.get(f"baseline {name}") for name in (bench.file_of(target), target)]
    return any(line and line["key"] == baseline_key(target, product) and line["verdict"] == "passed" for line in lines)


def baseline_key(target: str, product: str) -> str:
    return bench.digest([product, bench.tests_digest(bench.file_of(target))])


def check(targets: list[str], product: str) -> None:
    """Raises RuntimeError if tests fail without a mutant."""
    for target in targets:
        if is_known_to_pass(target, product):
            continue
        line = baseline(target, baseline_key(target, product))
        if line["verdict"] != "passed":
            raise RuntimeError(f"{line['by'] or target} fails without the mutant")


def check_together(mutants: list[Mutant], product: str) -> None:
    """Runs the Python tests that mutants name in one process, which saves imports. If one of them fails, each of them
    runs later, before its mutant."""
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
            record({"name": f"baseline {target}", "key": key, "verdict": "passed", "by": "", "seconds": seconds})


def baseline(target: str, key: str) -> dict:
    """Runs tests without a mutant."""
    name = f"baseline {target}"
    start = time.monotonic()
    bench.sync()
    bench.forget_log(name)
    if not bench.build(name, [target]):
        raise RuntimeError("the code does not compile without the mutant")
    outcome = bench.run_tests([target], name)
    verdict, seconds = "passed" if outcome.passed else "failed", round(time.monotonic() - start, 1)
    print(f"{verdict:9} {name} ({seconds:.0f} s)", flush=True)
    return record({"name": name, "key": key, "verdict": verdict, "by": outcome.by, "seconds": seconds})


def attempt(mutant: Mutant, product: str, named: bool) -> dict:
    """Puts the fault into the tree and runs tests, the named ones first. Returns the result."""
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


def run_mutant(mutant: Mutant, product: str, named: bool) -> dict:
    start = time.monotonic()
    try:
        result = attempt(mutant, product, named)
    except RuntimeError as error:
        result = {"verdict": "error", "by": "", "how": str(error)}
    tests = bench.tests_digest(result["by"] if result["verdict"] == "caught" else None)
    seconds = round(time.monotonic() - start, 1)
    return record({"name": mutant.name, "key": key_of(mutant, product), **result, "tests": tests, "seconds": seconds})


# --- all mutants ----------------------------------------------------------------------------------------------------


def report(mutants: list[Mutant], broken: dict[str, str], product: str, diffs: bool = False) -> int:
    """Prints the result of each mutant, and its diff if `diffs`. Returns the exit status."""
    known = results()
    by_verdict: dict[str, list[tuple[Mutant, dict]]] = {
        verdict: [] for verdict in ("caught", "survived", "open", "error", "not run")
    }
    for mutant in mutants:
        line = known.get(mutant.name)
        if mutant.name in broken:
            line = {"verdict": "error", "by": "", "how": broken[mutant.name]}
        elif line is None or line["key"] != key_of(mutant, product):
            line = {"verdict": "not run", "by": "", "how": ""}
        by_verdict[line["verdict"]].append((mutant, line))
        print(f"{line['verdict']:9} {mutant.name:37} {mutant.at:27} {line['how']} {short(line['by'])}".rstrip())
        if diffs and mutant.name not in broken:
            print(mutant.change.diff())
    caught, survived = by_verdict["caught"], by_verdict["survived"]
    share = len(caught) / len(mutants)
    in_python = sum(not m.is_rust for m in mutants)
    print(f"\n{len(mutants)} mutants, {in_python} of them in Python: {len(caught)} caught ({share:.1%})")
    for mutant, line in survived:
        reason = mutant.equivalent or f"NO REASON GIVEN. {mutant.fault}"
        print(f"  survived: {mutant.name}: {reason} {line['how']}".rstrip())
    for mutant, line in by_verdict["error"]:
        print(f"  error: {mutant.name}: {line['how']}")
    for mutant, _ in by_verdict["open"]:
        print(f"  open: {mutant.name}: its named tests pass. {mutant.fault}")
    if by_verdict["not run"]:
        print(f"  not run: {len(by_verdict['not run'])}")
    for mutant, _ in caught:
        if mutant.equivalent:
            print(f"  {mutant.name} is caught now; remove its field `equivalent`")
    bad = (
        [m for m, _ in survived if not m.equivalent]
        or by_verdict["open"]
        or by_verdict["error"]
        or by_verdict["not run"]
    )
    return 1 if bad or share < REQUIRED else 0


def short(by: str) -> str:
    return re.sub(r"^tests/python/(\w+/)?", "", by)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        help="run only this mutant, whatever its last result; may be repeated",
    )
    parser.add_argument(
        "--list", action="store_true", help="print each mutant as a diff, and its last result; run nothing"
    )
    parser.add_argument("--check", action="store_true", help="check that each mutant applies to the code; run nothing")
    parser.add_argument("--python-only", action="store_true", help="run only mutants in Python")
    parser.add_argument(
        "--named", action="store_true", help="run only the tests that each mutant names, for a quick check"
    )
    parser.add_argument(
        "--again", action="store_true", help="run all mutants again instead of continuing the last run (--resume)"
    )
    parser.add_argument("--resume", action="store_false", dest="again", help=argparse.SUPPRESS)
    parser.add_argument(
        "--jobs", metavar="N", help="cargo's jobs; mutants run one at a time, because tests look at the whole machine"
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
    # If a shell has started this in the background, SIGINT would be ignored here and in every test.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    known = results()

    def is_to_run(mutant: Mutant) -> bool:
        line = known.get(mutant.name)
        reuses = not (chosen.again or chosen.only) and not (line and line["verdict"] == "open" and not chosen.named)
        return mutant.name not in broken and not (reuses and is_valid(line, key_of(mutant, product)))

    check_together([m for m in mutants if is_to_run(m)], product)
    for number, mutant in enumerate(mutants, 1):
        if not is_to_run(mutant):
            continue
        line = run_mutant(mutant, product, chosen.named)
        reason = f"{line['how']} {short(line['by'])}".strip()
        print(
            f"{line['verdict']:9} {number}/{len(mutants)} {mutant.name}: {reason} ({line['seconds']:.0f} s)", flush=True
        )
    return report(mutants, broken, product)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the next run continues here")
    finally:
        bench.kill_descendants()
