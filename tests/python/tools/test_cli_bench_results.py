"""`python -m rustloader bench`: intervals, verdicts, recommendations and texts. No loader is measured here."""

import dataclasses
import difflib
import json
import random

import pytest
import snapshots
from bench_figures import a_pass, a_point
from support import rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader import Stats, WorkerStats
    from rustloader.tools import cli
    from rustloader.tools.bench import command, comparison, plan, recommendation, results
    from rustloader.tools.bench.settings import Setting
    from rustloader.tools.bench.summary import Summary
    from rustloader.tools.cli import parser
    from rustloader.tools.harness import layout as text
    from rustloader.tools.harness import rounds
    from rustloader.tools.probe.factory import Unusable

# Rates of three epochs: of torch, and of rustloader, which is three times as fast.
SLOW, FAST = (10.0, 11, 12), (30.0, 33, 36)


# Intervals


def coverage(n, k):
    """The probability that the k-th smallest and largest of n values enclose the median, from all sign patterns."""
    counts = [pattern.bit_count() for pattern in range(2**n)]
    return sum(k <= below <= n - k for below in counts) / 2**n


@pytest.mark.parametrize("n", range(1, 14))
def test_an_interval_is_the_narrowest_with_its_confidence(n):
    values = [float(value) for value in random.Random(n).sample(range(100), n)]
    interval = rounds.median_interval(values)
    k = sorted(values).index(interval.low) + 1
    assert interval.high == sorted(values)[n - k]
    assert interval.confidence == pytest.approx(coverage(n, k))
    assert coverage(n, k) >= 0.95 or k == 1
    assert k + 1 > n - k or coverage(n, k + 1) < 0.95
    assert (interval.confidence >= rounds.CONFIDENCE) == (n > 5)


# Comparisons


# Their verdicts are in snapshots/bench_tables.txt: rates of torch and of rustloader, and the number of batches.
COMPARISONS = [
    (SLOW, FAST, 1000),
    (SLOW, (5, 5.5, 6), 1000),
    (SLOW, SLOW, 1000),
    (SLOW, (10, 11.5, 12), 1000),
    ((10, 10.1, 10.2), (10.2, 10.3, 10.4), 1000),  # within the 3 % by which processes may differ
    ((10,), (30,), 1000),
    ((10, 11), (30, 33), 1000),
    ((10, 11, 14), (12, 13, 15), 1000),  # the pairs agree, the rates overlap
    ((10, 20, 30), (20, 10, 45), 1000),
    (SLOW, FAST, 50),
    (SLOW, FAST, 49),
]


@pytest.mark.parametrize(
    "ours, decided",
    [
        ([30.0] * 5, False),  # below 95 %
        ([30.0] * 6, True),
        ([20.0, 30.0] * 3, True),  # wide, but clearly away from 1
        ([10.0, 10.5] * 3, True),  # narrow about 1
        ([10.0, 12.0] * 3, False),
    ],
)
def test_an_interval_that_is_small_or_clear_decides(ours, decided):
    assert comparison.compare([10.0] * len(ours), ours, 1000).is_decided == decided


# Points


def test_only_rates_of_one_kind_are_compared():
    one, other = a_point(1, (10,), (20,)), a_point(2, (10,), (20,))
    results.make_comparable([one, other])
    assert [one.torch.rate, one.rustloader.rate, one.torch.median("cpu_seconds_per_batch")] == [20, 40, 0.001]
    other.torch.passes.append(a_pass(10, steady_batches_per_second=None))
    results.make_comparable([one, other])
    assert [one.torch.rate, one.rustloader.rate, one.torch.median("cpu_seconds_per_batch")] == [10, 20, 0.002]


def test_the_ratio_of_the_rates_is_that_of_the_pairs():
    point = a_point(2, (10.0, 20.0, 40.0), (20.0, 40.0, 20.0))
    assert point.ratios["batches_per_second"] == point.comparison.ratio == 2.0
    assert point.comparison.batches == 300 and point.comparison.pairs == 3


def test_a_loader_that_mostly_starts_has_a_verdict_on_that():
    short = results.starting_verdict(results.SideRates([a_pass(100, first_batch_seconds=0.9)] * 3))
    assert short["kind"] == "starting" and "persistent_workers=True" in short["sentence"]
    for other in ({"first_batch_seconds": 0.4}, {"first_batch_seconds": 0.9, "complete": False}):
        assert results.starting_verdict(results.SideRates([a_pass(100, **other)] * 3)) == {}


# Recommendations


OPTIONS = [(("dispatch", dispatch), ("worker_threads", 4)) for dispatch in ("round_robin", "shared_queue")]
NOISY = {1: SLOW, 2: [80.0, 90, 105], 4: [85.0, 110, 120]}
STORAGE = {1: [50.0] * 3, 2: [100.0] * 3, 4: [150.0] * 3}


def sweep(rates, cpu=0.001, workers=None, batches=100):
    """A point for each number of workers, with the same rates on both engines. `workers` are their statistics."""
    verdict = {"stats": {"workers": workers}} if workers else None
    points = []
    for count, of_count in rates.items():
        passes = [a_pass(rate, cpu_seconds_per_batch=cpu, batches=batches) for rate in of_count]
        points.append(results.Point(count, results.SideRates(passes), results.SideRates(passes), verdict))
    return points


def with_options(*rates, workers=2, theirs=SLOW, **kw):
    """A point for each combination of rustloader's options; torch's rates are the same in all points."""
    return [a_point(workers, theirs, of, options=opts, **kw) for opts, of in zip(OPTIONS, rates, strict=True)]


def without_workers(*rates):
    """torch's own loop."""
    point = a_point(0, rates, ())
    point.rustloader = point.torch
    return point


def busy(point, share):
    """The same point, measured while other processes used a share of the cores."""
    for side in (point.torch, point.rustloader):
        side.passes = [dataclasses.replace(one, others_share=share) for one in side.passes]
    return point


def recommended(points, cores=8):
    return recommendation.recommend(points, "rustloader", cores)


@pytest.mark.parametrize(
    "rates, workers",
    [
        ({1: [10.0] * 3, 2: [95.0] * 3, 4: [100.0] * 3, 8: [99.0] * 3}, 2),
        ({1: [10.0] * 3, 2: [94.9] * 3, 4: [100.0] * 3, 8: [99.0] * 3}, 4),
        ({0: [5.0] * 10}, 0),
        (NOISY, 2),
        (NOISY | {4: [110.0, 115, 120]}, 4),
        ({1: [10.0] * 2, 2: [20.0] * 2}, None),
        ({1: [10.0] * 3, 2: [20.0] * 2}, None),
    ],
)
def test_the_fewest_workers_that_do_as_well(rates, workers):
    choice = recommended(sweep(rates))
    assert choice.workers == workers
    assert ("no measurable difference between 2 and 4 workers" in choice.reason) == (rates is NOISY)
    assert ("too few epochs" in choice.reason) == (workers is None)


def test_too_few_batches_or_epochs_recommend_nothing():
    assert recommended(sweep({2: [10.0] * 3}, batches=16)).workers is None
    # torch's own loop with too few epochs does not take the recommendation.
    assert recommended([without_workers(155.0, 156), *sweep({1: [10.0] * 3, 2: [20.0] * 3})]).workers == 2
    assert recommended([without_workers(155.0, 156)]).workers is None


def test_a_busy_machine_gets_no_recommendation():
    calm = a_point(2, SLOW, FAST)
    choice = recommended([calm, busy(a_point(1, SLOW, FAST), 0.6)])
    assert choice.workers is None and "other processes used 60% of the cores during the run: end" in choice.reason
    assert recommended([calm, busy(a_point(1, SLOW, FAST), 0.2)]).workers == 1
    assert calm.others_share == 0.0  # unknown is not busy


def test_more_workers_than_cores_only_where_they_wait_for_storage():
    computing = sweep(STORAGE, cpu=0.019)  # 150 batches/s keep 2.85 cores at work
    assert recommended(computing, cores=2) == recommendation.Choice(2, "more than 2 workers would compete for 2 cores")
    assert recommended(sweep(STORAGE), cores=2).workers == 4
    assert recommended(computing, cores=4).workers == 4


@pytest.mark.parametrize(
    "figures, workers",
    [
        # fetch, CPU, queued, and unmeasured seconds of each worker
        ([(10.0, 0.5, 0.0, 0.0)], 4),
        ([(10.0, 0.5, 8.0, 0.0)], 4),
        ([(10.0, 4.0, 5.5, 0.0)], 2),
        ([(10.0, 9.0, 0.5, 0.0)], 2),
        ([(10.0, None, None, 0.0)], 4),
        # A killed worker: the CPU time is unknown for 50 s of the first worker's work, and for all of the second one's.
        ([(60.0, 8.0, 0.0, 50.0), (90.0, None, 0.0, 90.0)], 2),
        ([(60.0, 2.0, 0.0, 50.0), (90.0, None, 0.0, 90.0)], 4),
    ],
)
def test_the_statistics_say_whether_workers_wait(figures, workers):
    """They wait for the wall time of their work, less CPU time and the time in the queue for a core."""
    names = ("fetch_seconds", "cpu_seconds", "queued_seconds", "unmeasured_seconds")
    of_workers = [dict(zip(names, one, strict=True), collate_seconds=0.0, pack_seconds=0.0) for one in figures]
    points = sweep({2: [100.0] * 3, 4: [150.0] * 3}, workers=of_workers)
    assert recommended(points, cores=2).workers == workers


def test_the_first_of_the_fastest_options_is_recommended():
    points = with_options((30.0, 31, 32), (60.0, 61, 62))
    assert recommended(points) == recommended(points[::-1]) == recommendation.Choice(2, "", OPTIONS[1])
    choice = recommended(with_options((30.0, 31, 32), (30.0, 31, 33)))
    assert choice.options == OPTIONS[0]
    assert choice.reason == (
        "no measurable difference between (2 workers, dispatch=round_robin, worker_threads=4) and "
        "(2 workers, dispatch=shared_queue, worker_threads=4)"
    )
    # Fewer workers come first.
    more = [*with_options((29.9, 31, 32), (30.0, 31, 33), workers=4), *with_options(*[(30.0, 31, 33)] * 2)]
    assert (recommended(more).workers, recommended(more).options) == (2, OPTIONS[0])


def test_torch_has_one_measurement_for_each_number_of_workers():
    points = [*with_options(*[(1.0, 1, 1)] * 2), *with_options(*[(2.0, 2, 2)] * 2, workers=4)]
    points[1].torch.passes = points[1].torch.passes[:2]
    assert recommendation.recommend(points, "torch", 8).setting == Setting(2)
    merged = [(point.workers, len(point.torch.passes), point.options) for point in results.merge_by_workers(points)]
    assert merged == [(2, 5, ()), (4, 6, ())] and [len(point.torch.passes) for point in points] == [3, 2, 3, 3]
    short = [point for point in points if point.workers == 4] + points[1:2]
    assert "too few epochs or batches with 2 workers" in recommendation.recommend(short, "torch", 8).reason


# Texts, which are in snapshots/bench.txt


FACTORY = "train.py:make_loader"
ABOUT = {
    "machine": {"cores": 2},
    "num_workers": 2,
    "prefetch_factor": 2,
    "persistent_workers": False,
    "start_method": "fork",
}
VERDICT = {
    "kind": "transport",
    "sentence": "Transport is the bottleneck.",
    "reason": "it waits",
    "workers_needed": None,
}


def options(*arguments):
    return parser.make_parser().parse_args(["bench", FACTORY, *arguments])


def judged(workers, theirs=SLOW, ours=FAST, **kw):
    return a_point(workers, theirs, ours, verdict=VERDICT, **kw)


def others(point, about=None, **rates):
    """Adds the loaders of other factories to a point."""
    for name, measured in rates.items():
        passes = [a_pass(rate) for rate in measured]
        point.others[f"train.py:{name}"] = results.SideRates(passes, 1e6, 50_000_000, about=about or {})
        sentence = f"The {name} loader is the bottleneck."
        cached = 0.9 if name == "cached" else None
        point.verdicts[f"train.py:{name}"] = VERDICT | {"sentence": sentence, "cached_share": cached}
    return point


def summary(points, *arguments, error=""):
    """The summary, with recommendations where the command makes them."""
    given = options(*arguments)
    bench_plan = plan.BenchPlan(given)
    engines = ("rustloader",) if any(point.options for point in points) else ("torch", "rustloader")
    choices = {engine: recommendation.recommend(points, engine, 2) for engine in engines}
    return Summary(given, bench_plan, ABOUT, points, choices if bench_plan.requested > 1 else {}, error)


SIX = [10.0 + k for k in range(6)], [30.0 + 3 * k for k in range(6)]
CACHED = {"cached": [60.0 + 6 * k for k in range(6)], "same": SIX[1]}


def one(**kw):
    return judged(2, *SIX, **kw)


def summaries():
    """By title: the title of the summary with which a reader compares it, if any, and the summary."""
    few = judged(2, (10.0, 11), (30.0, 33))
    faster, slower, even = without_workers(90.0, 91, 92), without_workers(6.0, 6.5, 7), without_workers(*SIX[1])
    factories = ("train.py:cached", "train.py:same")
    options = with_options(SIX[1], CACHED["cached"], theirs=SIX[0], verdict=VERDICT)
    return {
        "one loader": ("", summary([one()])),
        "a step": ("one loader", summary([one()], "--step", "0.1")),
        "one setting": ("one loader", summary([one(options=(("reorder_window", "64MiB"),))])),
        "too few": ("one loader", summary([few])),
        "too few, with a budget": ("too few", summary([few], "--budget", "30")),
        "too few, with epochs": ("too few", summary([few], "--epochs", "2")),
        # As seen by a user: 6.4x torch with workers, although no workers at all were another 2.4x as fast.
        "torch's loop is faster": ("one loader", summary([faster, one()])),
        "torch's loop is faster, with a step": ("a step", summary([faster, one()], "--step", "0.1")),
        "torch's loop is slower": ("one loader", summary([slower, one()])),
        "torch's loop is as fast": ("one loader", summary([even, one()])),
        "torch's loop has too few epochs": ("one loader", summary([without_workers(90.0, 91), one()])),
        "torch's loop fails": ("one loader", summary([one()], error="KeyError: 'worker'")),
        # As seen by a user: a load of 3.5 on 2 cores, and yet "97 % confidence".
        "others use few of the cores": ("one loader", summary([busy(one(), 0.05)])),
        "others use some of the cores": ("one loader", summary([busy(one(), 0.15)])),
        "others use most of the cores": ("one loader", summary([slower, busy(one(), 0.6)])),
        "factories": ("one loader", summary([others(one(), **CACHED)], *factories)),
        "factories on a busy machine": ("factories", summary([busy(others(one(), **CACHED), 0.6)], *factories)),
        "a sweep": ("", summary([slower, *(judged(n, *SIX) for n in (1, 2))], "--workers", "0,1,2")),
        "a sweep, torch's loop faster": (
            "a sweep",
            summary([faster, *(judged(n, *SIX) for n in (1, 2))], "--workers", "1,2"),
        ),
        "a sweep of options": (
            "a sweep",
            summary([slower, *options], "--dispatch", "round_robin,shared_queue", "--worker-threads", "4"),
        ),
    }


def changes(before, after):
    """The lines that are in one of two texts."""
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return "\n".join(line.rstrip() for line in lines if line[0] in "+-")


def test_texts_of_summaries():
    reports = {title: (base, report.text()) for title, (base, report) in summaries().items()}
    texts = {}
    for title, (base, report) in reports.items():
        name = f"{title}, unlike {base}" if base else title
        texts[name] = changes(reports[base][1], report) if base else report
        assert max(map(len, report.splitlines())) <= 100
    snapshots.check("bench", texts)


def test_summaries_as_json():
    reports = {title: json.loads(json.dumps(report.as_dict())) for title, (_, report) in summaries().items()}
    sweep, of_options, several = (reports[title] for title in ("a sweep", "a sweep of options", "factories"))
    assert sweep["recommendation"]["rustloader"] == 1 and sweep["recommendation"]["step"] == 0.0
    assert "options" not in sweep["recommendation"] and not any("options" in one for one in sweep["results"])
    assert [one["comparison"] and one["comparison"]["verdict"] for one in sweep["results"]] == [None, *["faster"] * 2]
    interval = {"low": 3.0, "high": 3.0, "confidence": 0.96875, "pairs": 6, "batches": 600, "reason": ""}
    interval |= {"name": "rustloader", "baseline": "torch"}
    assert sweep["results"][1]["comparison"] == {"verdict": "faster", "ratio": 3.0} | interval
    assert sweep["settings"]["budget"] == 180.0 and sweep["settings"]["epochs"] is None
    swept = [{"dispatch": name, "worker_threads": 4} for name in ("round_robin", "shared_queue")]
    assert [one["options"] for one in of_options["results"][1:]] == swept
    assert "torch" not in of_options["recommendation"]
    assert of_options["recommendation"]["options"] == {"rustloader": swept[1]}
    assert several["factories"] == [FACTORY, "train.py:cached", "train.py:same"]
    other = several["results"][0]["others"]["train.py:cached"]
    assert (other["comparison"]["ratio"], other["comparison"]["baseline"], other["batch_bytes"]) == (2.0, FACTORY, 1e6)
    assert other["verdict"]["kind"] == "transport" and len(other["epochs"]) == 6
    assert reports["others use most of the cores"]["results"][1]["others_share"] == 0.6


def test_a_sweep_without_figures_recommends_nothing():
    text = summary([judged(n, (10.0,), (30.0,)) for n in (1, 2)], "--workers", "1,2", "--epochs", "1").text()
    assert "No recommendation for rustloader: too few epochs or batches with 1 worker." in text
    assert "Recommended" not in text and "<-" not in text and "Rule" not in text


def test_texts_of_tables():
    large = (123456.0, 123999.0, 124999.0)
    many = (("dispatch", "shared_queue"), ("reorder_window", "512MiB"), ("worker_threads", 16))
    named = [others(a_point(n, SLOW, FAST, options=many[:1]), cached=(60.0, 66, 72)) for n in (1, 2)]
    alone, point = without_workers(*large), a_point(2, (1000.0, 1200.0, 900.0), (4.0, 5.0, 6.0))
    large_sweep = [alone, *(a_point(count, large, large) for count in (2, 128))]
    comparisons = [comparison.compare(*case) for case in COMPARISONS]
    texts = {
        "comparisons": "\n".join(f"[{it.verdict}] {it}" for it in comparisons),
        "one point": results.table(point),
        "torch's own loop": results.table(alone),
        "many epochs": results.table(a_point(2, [10.0] * 9, [float(rate) for rate in range(20, 29)])),
        "a sweep": results.sweep_table(large_sweep, Setting(2)),
        "many columns": results.sweep_table([a_point(128, large, large, options=many)], Setting(None)),
        "factories": results.factories_table([without_workers(6.0, 6.5, 7), *named], FACTORY),
    }
    assert all(len(line) <= 100 for title in texts if title != "comparisons" for line in texts[title].splitlines())
    snapshots.check("bench_tables", texts)
    assert results.factories_table([a_point(2, (10.0,), (30.0,))], FACTORY) == ""


def test_figures_in_words():
    assert [text.number(value) for value in (0.1234, 12345.6)] == ["0.123", "12,346"]
    assert [text.times(value) for value in (None, 13.64)] == ["-", "13.6x"]
    assert [results._memory(results.SideRates(memory_bytes=size)) for size in (None, 28_000_000)] == ["-", "28.0 MB"]
    assert [text.listed(values) for values in ([1], [1, 2, 4])] == ["1", "1, 2 and 4"]
    lines = text.wrapped("word " * 18 + "--step SECONDS and so on", "  ").splitlines()
    assert len(lines) == 2 and lines[1] == "  --step SECONDS and so on" and max(map(len, lines)) <= 100


# Other factories, and verdicts


def test_batches_of_different_sizes_are_compared_by_samples():
    point = others(a_point(2, SLOW, FAST), {"batch_size": 64}, large=(15.0, 16.5, 18))
    point.rustloader.about = {"batch_size": 32}
    comparison = point.comparisons(FACTORY)["train.py:large"]
    assert (comparison.ratio, comparison.verdict) == (1.0, "no measurable difference")


def test_remote_workers_are_in_no_figure_of_this_machine():
    point = others(a_point(2, SLOW, FAST), {"remote": True}, remote=(60.0, 66, 72))
    side = point.others["train.py:remote"]
    side.passes = [dataclasses.replace(it, others_share=0.9) for it in side.passes]
    assert point.others_share == 0.0
    row = results.factories_table([point], FACTORY).splitlines()[2].split()
    assert (row[0], row[-1], row.count("-")) == ("train.py:remote", "-", 3)


@pytest.mark.parametrize("name", [None, "train.py:cached"])
def test_a_verdict_advises_no_workers_that_were_measured_and_are_slower(name):
    """As seen by a user: "Use num_workers=2" under a table in which 2 workers are slower."""
    of_cpu = dict(cpu_seconds=5.0, queued_seconds=0.0, fetch_cpu_seconds=5.0, fetch_measured_seconds=5.0)
    worker = WorkerStats(0, tasks=100, fetch_seconds=5.0, **of_cpu)
    times = dict(next_seconds=4.0, waited_seconds=4.0, step_seconds=1.0)
    stats = Stats(num_workers=1, cores=2, epochs=1, batches=100, workers=(worker,), **times)
    before = stats.verdict()
    assert before.workers_needed == 2 and "Use num_workers=2" in before.sentence
    for rates, needed in (((20.0, 21, 22), None), (FAST, None), ((60.0, 61, 62), 2)):
        one, two = (others(judged(n, SLOW, ours), cached=ours) for n, ours in ((1, FAST), (2, rates)))
        if name is None:
            one.judged, one.verdict = stats, dataclasses.asdict(before)
        else:
            one.judged_others[name], one.verdicts[name] = stats, dataclasses.asdict(before)
        results.revise_verdicts([one, two])
        verdict = one.verdict if name is None else one.verdicts[name]
        assert verdict["workers_needed"] == needed
        assert ("A measurement showed that more workers do not help." in verdict["sentence"]) == (needed is None)
        assert ("num_workers=2" in verdict["sentence"]) == (needed is not None)


# The plan, and what is checked before anything runs


@pytest.mark.parametrize(
    "arguments, text, budget, seconds, steps",
    [
        ("", "in turn, each at most 3 s; up to 2 min after a warm-up, or until the result is clear", 120, 3, 0),
        ("--workers 0,1,2", "with 0, 1 and 2 workers: epochs of torch and rustloader in turn", 180, 3, 0),
        ("--workers 1,2", "with 1 and 2 workers: epochs of torch and rustloader in turn", 180, 3, 0),
        ("--workers 1,2 --budget 24", "each at most 500 ms; up to 24 s", 24, 0.5, 0),
        ("--seconds 10", "each at most 10 s; up to 5 min", 320, 10, 0),
        ("--epochs 1 --batches 1", "1 epoch of torch and rustloader in turn", None, 3, 2 * 3),
        ("--workers 0,1 --epochs 3", "with 0 and 1 workers: 3 epochs of", None, 3, 3 * 4),
        ("train.py:cached --epochs 3", "3 epochs of", None, 3, 4 * 4),
        (
            "--dispatch round_robin,shared_queue --worker-threads 1,8",
            "with dispatch=round_robin and shared_queue, worker_threads=1 and 8: epochs of",
            300,
            3,
            0,
        ),
        ("--workers 2 --reorder-window 16", "with reorder_window=16: epochs of", 120, 3, 0),
        ("--workers 1,2 --budget 10", "with 1 and 2 workers", 10, None, 0),
        ("--budget 1", "up to 1 s", 1, None, 0),  # the output says how to measure longer
    ],
)
def test_plans(arguments, text, budget, seconds, steps):
    bench_plan = plan.BenchPlan(options(*arguments.split()))
    assert text in str(bench_plan) and (bench_plan.budget, bench_plan.steps) == (budget, steps)
    assert seconds is None or bench_plan.seconds == seconds


@pytest.mark.parametrize(
    "arguments, error",
    [
        ("--workers 1,2,4,8,16 --budget 10", "10 s is not enough for 5 settings; pass --budget 60"),
        ("--workers 0,1 --budget 9.5", "9.5 s is not enough for 2 settings; pass --budget 24"),
        (
            "--workers 0",
            "With `num_workers=0`, torch's own loop runs; there is nothing to accelerate. "
            "To compare it with workers, pass --workers 0,2",
        ),
    ],
)
def test_plans_that_are_refused(arguments, error):
    with pytest.raises(Unusable) as raised:
        plan.BenchPlan(options(*arguments.split()))
    assert str(raised.value) == error


def test_a_sweep_divides_the_budget():
    bench_plan = plan.BenchPlan(options("--workers", "1,2,4", "--budget", "60"))
    assert bench_plan.share(0.0, 3) == 20 and bench_plan.share(10.0, 2) == 25 and bench_plan.share(70.0, 1) == 0


def test_every_combination_is_a_setting():
    arguments = ("--workers", "0,2,4", "--dispatch", "shared_queue,round_robin", "--reorder-window", "8,64MiB,8")
    settings = plan.BenchPlan(options(*arguments)).settings
    combined = [
        Setting(workers, (("dispatch", dispatch), ("reorder_window", window)))
        for workers in (2, 4)
        for dispatch in ("shared_queue", "round_robin")
        for window in (8, "64MiB")
    ]
    # Without workers the options have no effect.
    assert settings == [*combined, Setting(0)]
    assert plan.BenchPlan(options(*arguments, "--epochs", "3")).steps == 4 * (1 + 2 * 8)
    assert plan.BenchPlan(options()).settings == [Setting(None), Setting(0)]
    lines = (arguments, (), ("--workers", "0,1"), ("--workers", "1,2"))
    assert [plan.BenchPlan(options(*line)).requested for line in lines] == [9, 1, 2, 2]
    names = ["", "1 worker", "2 workers, dispatch=shared_queue, reorder_window=64MiB"]
    assert [str(setting) for setting in (Setting(None), Setting(1), combined[1])] == names


def test_measuring_ends_when_the_result_is_clear_or_the_budget_spent():
    """``_needs_more`` by pairs so far, seconds left, and seconds of the longest pair."""
    run = command._Bench(options())
    clear, unclear = a_point(2, [10.0] * 6, [30.0] * 6), a_point(2, [10.0] * 6, [10.0, 14.0] * 3)
    few = a_point(2, [10.0] * 6, [30.0] * 6, batches=4)
    assert run._needs_more(results.Point(2), 0, -1.0, 0.0)  # one pair in any case
    assert not run._needs_more(clear, 6, 50.0, 5.0)
    assert run._needs_more(unclear, 6, 50.0, 5.0)
    assert not run._needs_more(unclear, 6, 4.0, 5.0)  # the next pair would not fit
    assert run._needs_more(few, 6, 0.1, 5.0) and not run._needs_more(few, 6, 0.0, 5.0)
    assert not run._needs_more(without_workers(*[10.0] * 6), 6, 50.0, 5.0)
    fixed = command._Bench(options("--epochs", "2"))
    assert fixed._needs_more(unclear, 1, 0.0, 5.0) and not fixed._needs_more(unclear, 2, 50.0, 5.0)
    # All factories must be compared.
    several = command._Bench(options("train.py:cached"))
    assert not several._needs_more(others(clear, cached=[90.0] * 6), 6, 50.0, 5.0)
    assert several._needs_more(others(clear, cached=[30.0, 40.0] * 3), 6, 50.0, 5.0)


def test_a_factory_that_is_named_twice_is_refused(capsys):
    assert cli.main(["bench", "x:y", "x:z", "x:y"]) == 2
    error = "rustloader bench: x:y is named twice; write a second function that returns the other loader\n"
    assert capsys.readouterr() == ("", error)
