"""What `rustloader bench` and the programs of benches/ share: rounds, processes, tables and exit statuses."""

import itertools
import os
import sys

import pytest
from support import ROOT, rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    sys.path.append(str(ROOT / "benches"))
    from harness import processes, report

    from rustloader.tools.harness import rounds


@pytest.mark.parametrize(("sides", "period"), [(1, 2), (2, 4), (3, 6)])
def test_each_order_of_the_sides_comes_up_as_often_as_any_other(sides, period):
    orders = [tuple(rounds.in_turn(range(sides), number)) for number in range(2 * period)]
    counts = {orders.count(order) for order in itertools.permutations(range(sides))}
    assert len(counts) == 1 and orders[:period] == orders[period:]


def test_all_sides_take_turns_and_bounds_come_last():
    calls = []
    measure = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    after = {"bound": lambda: calls.append("bound") or 0}
    taken = rounds.interleave(measure, 3, references=after, after=lambda: calls.append("check"))
    assert "".join(name[0] for name in calls) == "abcb" + "bacb" + "bacb"
    assert taken == {"a": [1, 6, 10], "b": [2, 5, 9], "bound": [0, 0, 0]}


def test_a_ratio_is_the_median_of_those_of_the_rounds():
    taken = rounds.Rounds({"a": [{"s": 2.0}, {"s": 20.0}, {"s": 3.0}], "b": [{"s": 1.0}, {"s": 5.0}, {"s": 3.0}]})
    assert taken.ratios("a", "b", "s") == [2.0, 4.0, 1.0] and taken.ratio("a", "b", "s") == 2.0
    assert taken.median("a", "s") == 3.0
    assert rounds.spread(taken.ratios("a", "b", "s")) == "2.00 (1.00 to 4.00)"
    assert rounds.spread([2.0], "{:.1f} s".format) == "2.0 s"


def test_a_function_runs_in_another_process(tmp_path, monkeypatch, capfd):
    file = tmp_path / "fresh_of_test.py"
    file.write_text(
        "import os, sys\ndef power(a, b):\n    print('said')\n    return [os.getpid(), a**b, *sys.modules]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import fresh_of_test

    pid, value, *modules = processes.fresh(fresh_of_test.power, 2, 5)
    assert value == 32 and "torch" not in modules and pid != os.getpid()
    with pytest.raises(rounds.Failure, match="exited with status 1"):
        processes.fresh(fresh_of_test.power, 2, "no number")
    pid, value, *_ = processes.forked(lambda: fresh_of_test.power(2, 3))
    assert value == 8 and pid != os.getpid()
    with pytest.raises(rounds.Failure):
        processes.forked(lambda: 1 / 0)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_each_document_has_two_marks_for_each_table():
    for name in ("benches/RESULTS.md", "docs/performance.md", "docs/caching.md"):
        for mark in {line for line in (ROOT / name).read_text().splitlines() if line.startswith("<!-- ")}:
            report.around(ROOT / name, mark)
