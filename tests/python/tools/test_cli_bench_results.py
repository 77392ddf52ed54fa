"""`python -m rustloader bench`: intervals, verdicts, recommendations and texts. No loader is measured here."""

import dataclasses
import json
import random

import pytest
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


def test_an_interval_takes_six_values_for_its_confidence():
    assert [rounds.median_interval([1.0] * n).confidence >= rounds.CONFIDENCE for n in (5, 6)] == [False, True]
    assert rounds.median_interval([5.0, 1.0, 9.0, 2.0, 3.0, 4.0]) == (1.0, 9.0, 1 - 2 / 64)


# Comparisons


def compared(torch_rates, rustloader_rates, batches=1000):
    return comparison.compare(torch_rates, rustloader_rates, batches)


@pytest.mark.parametrize(
    "theirs, ours, verdict",
    [
        ((10, 11, 12), (30, 33, 36), "faster"),
        ((10, 11, 12), (5, 5.5, 6), "slower"),
        ((10, 11, 12), (10, 11.5, 12), "no measurable difference"),
        (
            (10, 10.1, 10.2),
            (10.2, 10.3, 10.4),
            "no measurable difference",
        ),  # within the 3 % by which processes may differ
        ((10, 11, 14), (12, 13, 15), "too few to tell"),  # the pairs agree, the rates overlap
        ((10, 20, 30), (20, 10, 45), "too few to tell"),
        ((10, 11), (30, 33), "too few to tell"),
    ],
)
def test_verdicts_of_comparisons(theirs, ours, verdict):
    assert compared(theirs, ours).verdict == verdict


def test_few_batches_have_no_winner():
    assert compared((10, 11, 12), (30, 33, 36), 50).verdict == "faster"
    few = compared((10, 11, 12), (30, 33, 36), 49)
    assert few.verdict == "too few to tell" and not few.is_decided
    assert str(few) == "Too few to tell: 49 batches of each loader, but at least 50 are needed."


@pytest.mark.parametrize(
    "theirs, ours, words",
    [
        ((10, 11, 12), (30, 33, 36), "3.00x as fast as torch (between 3.00x and 3.00x; 3 pairs of epochs, 75% confid"),
        ((10, 11, 12), (5, 5.5, 6), "rustloader is slower: 0.50x as fast as torch (between 0.50x and 0.50x; 3 pairs"),
        ((10, 11, 12), (10, 11, 12), "No measurable difference: rustloader is 1.00x as fast as torch (between 1.00x"),
        ((10,), (30,), "Too few to tell: 1 epoch of each loader, but at least 3 are needed."),
        ((10, 11, 14), (12, 13, 15), "Too few to tell: rustloader was faster in most pairs of epochs, but the rates"),
        (
            (10, 20, 30),
            (20, 10, 45),
            "Too few to tell: rustloader is 0.50x to 2.00x as fast as torch, based on 3 pairs of",
        ),
    ],
)
def test_sentences_of_comparisons(theirs, ours, words):
    assert words in str(compared(theirs, ours))


def test_measuring_goes_on_until_the_interval_is_small_or_clear():
    assert not compared([10.0] * 5, [30.0] * 5).is_decided  # below 95 %
    assert compared([10.0] * 6, [30.0] * 6).is_decided
    assert compared([10.0] * 6, [20.0, 30.0] * 3).is_decided  # wide, but clearly away from 1
    assert compared([10.0] * 6, [10.0, 10.5] * 3).is_decided  # narrow about 1
    assert not compared([10.0] * 6, [10.0, 12.0] * 3).is_decided


def outcome(rng, effect, noise, max_pairs):
    """The verdict of a measurement that continues as the command does, with log-normal noise around a true ratio."""
    torch_rates, rustloader_rates = [], []
    for pairs in range(1, max_pairs + 1):
        torch_rates.append(rng.lognormvariate(0, noise))
        rustloader_rates.append(effect * rng.lognormvariate(0, noise))
        result = comparison.compare(torch_rates, rustloader_rates, 100 * pairs)
        if result.is_decided:
            break
    return result.verdict


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_equal_engines_have_hardly_ever_a_winner(noise):
    """Even though the interval is checked after each pair."""
    rng = random.Random(7)
    verdicts = [outcome(rng, 1.0, noise, 20) for _ in range(400)]
    assert verdicts.count("faster") + verdicts.count("slower") <= 0.02 * len(verdicts)


def test_a_difference_is_found():
    rng = random.Random(7)
    verdicts = [outcome(rng, 1.5, 0.1, 20) for _ in range(200)]
    assert verdicts.count("faster") >= 0.95 * len(verdicts) and "slower" not in verdicts


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


def test_a_loader_that_mostly_starts_is_told_so():
    short = results.SideRates([a_pass(100, first_batch_seconds=0.9)] * 3)
    assert results.starting_verdict(short)["kind"] == "starting"
    assert "persistent_workers=True" in results.starting_verdict(short)["sentence"]
    assert results.starting_verdict(results.SideRates([a_pass(100, first_batch_seconds=0.4)] * 3)) == {}
    assert results.starting_verdict(results.SideRates([a_pass(100, first_batch_seconds=0.9, complete=False)] * 3)) == {}


# Recommendations


def sweep(rates, cpu=0.001, verdict=None):
    """A point for each number of workers, with the same rates on both engines."""
    points = []
    for workers, worker_rates in rates.items():
        side = results.SideRates([a_pass(rate, cpu_seconds_per_batch=cpu) for rate in worker_rates])
        points.append(results.Point(workers, side, side, verdict))
    return points


def recommended(points, cores=8):
    return recommendation.recommend(points, "rustloader", cores)


def test_the_fewest_workers_that_do_as_well():
    assert recommended(sweep({1: [10.0] * 3, 2: [95.0] * 3, 4: [100.0] * 3, 8: [99.0] * 3})).workers == 2
    assert recommended(sweep({1: [10.0] * 3, 2: [94.9] * 3, 4: [100.0] * 3, 8: [99.0] * 3})).workers == 4
    assert recommended(sweep({0: [5.0] * 10})).workers == 0


def test_noise_is_no_recommendation_for_more_workers():
    noisy = {1: [10.0, 11, 12], 2: [80.0, 90, 105], 4: [85.0, 110, 120]}
    choice = recommended(sweep(noisy))
    assert choice == recommendation.Choice(2, "no measurable difference between 2 and 4 workers")
    assert recommended(sweep(noisy | {4: [110.0, 115, 120]})).workers == 4


@pytest.mark.parametrize("rates", [{1: [10.0] * 2, 2: [20.0] * 2}, {1: [10.0] * 3, 2: [20.0] * 2}])
def test_too_few_epochs_recommend_nothing(rates):
    choice = recommended(sweep(rates))
    assert choice.workers is None and "too few epochs" in choice.reason


def test_too_few_batches_recommend_nothing():
    short = results.SideRates([a_pass(10.0, batches=16)] * 3)
    assert recommended([results.Point(2, short, short)]).workers is None


def test_more_workers_than_cores_only_where_they_wait_for_storage():
    rates = {1: [50.0] * 3, 2: [100.0] * 3, 4: [150.0] * 3}
    computing = sweep(rates, cpu=0.019)  # 150 batches/s keep 2.85 cores at work
    assert recommended(computing, cores=2) == recommendation.Choice(2, "more than 2 workers would compete for 2 cores")
    assert recommended(sweep(rates, cpu=0.001), cores=2).workers == 4
    assert recommended(computing, cores=4).workers == 4


@pytest.mark.parametrize(
    "cpu, queued, workers", [(0.5, 0.0, 4), (0.5, 8.0, 4), (4.0, 5.5, 2), (9.0, 0.5, 2), (None, None, 4)]
)
def test_the_statistics_say_whether_workers_wait(cpu, queued, workers):
    """They wait for the wall time of their work, less CPU time and the time in the queue for a core."""
    worker = {"fetch_seconds": 9.0, "collate_seconds": 0.5, "pack_seconds": 0.5}
    worker |= {"cpu_seconds": cpu, "queued_seconds": queued}
    points = sweep({2: [100.0] * 3, 4: [150.0] * 3}, verdict={"stats": {"workers": [worker] * 4}})
    assert recommended(points, cores=2).workers == workers


def test_a_killed_worker_does_not_hide_that_the_others_wait():
    parts = {"collate_seconds": 0.0, "pack_seconds": 0.0, "queued_seconds": 0.0}
    # The CPU time is unknown for 50 s of the first worker's work, and for all of the second one's.
    first = parts | {"fetch_seconds": 60.0, "cpu_seconds": 8.0, "unmeasured_seconds": 50.0}
    second = parts | {"fetch_seconds": 90.0, "cpu_seconds": None, "unmeasured_seconds": 90.0}
    points = sweep({2: [100.0] * 3, 4: [150.0] * 3}, verdict={"stats": {"workers": [first, second]}})
    assert recommended(points, cores=2).workers == 2
    waits = first | {"cpu_seconds": 2.0}
    points = sweep({2: [100.0] * 3, 4: [150.0] * 3}, verdict={"stats": {"workers": [waits, second]}})
    assert recommended(points, cores=2).workers == 4


def with_options(rates, workers=2):
    """A point for each combination of rustloader's options; torch's rates are the same in all points."""
    points = []
    for options, option_rates in zip(OPTIONS, rates, strict=True):
        points.append(a_point(workers, (10.0, 11, 12), option_rates, options=options))
    return points


def test_the_fastest_options_are_recommended():
    points = with_options([(30.0, 31, 32), (60.0, 61, 62)])
    assert recommended(points) == recommendation.Choice(2, "", OPTIONS[1])
    assert recommended(points[::-1]) == recommendation.Choice(2, "", OPTIONS[1])


def test_of_options_that_are_as_good_the_first_ones_are_recommended():
    choice = recommended(with_options([(30.0, 31, 32), (30.0, 31, 33)]))
    assert choice.options == OPTIONS[0]
    assert choice.reason == (
        "no measurable difference between (2 workers, dispatch=round_robin, worker_threads=4) and "
        "(2 workers, dispatch=shared_queue, worker_threads=4)"
    )
    # Fewer workers come first.
    more = [*with_options([(29.9, 31, 32), (30.0, 31, 33)], workers=4), *with_options([(30.0, 31, 33)] * 2)]
    assert (recommended(more).workers, recommended(more).options) == (2, OPTIONS[0])


def test_torch_has_one_measurement_for_each_number_of_workers():
    points = [*with_options([(1.0, 1, 1)] * 2), *with_options([(2.0, 2, 2)] * 2, workers=4)]
    points[1].torch.passes = points[1].torch.passes[:2]
    assert recommendation.recommend(points, "torch", 8).setting == Setting(2)
    assert [(point.workers, len(point.torch.passes), point.options) for point in results.merge_by_workers(points)] == [
        (2, 5, ()),
        (4, 6, ()),
    ]
    assert [len(point.torch.passes) for point in points] == [3, 2, 3, 3]
    short = [point for point in points if point.workers == 4] + points[1:2]
    assert "too few epochs or batches with 2 workers" in recommendation.recommend(short, "torch", 8).reason


# Texts


def test_the_table():
    point = a_point(2, (1000.0, 1200.0, 900.0), (4.0, 5.0, 6.0))
    assert results.table(point).splitlines() == [
        "                               torch     rustloader            ratio",
        "batches/s                      1,000           5.00            0.00x",
        "  lowest to highest   900.0 to 1,200   4.00 to 6.00   0.00x to 0.01x",
        "MB/s                           1,000           5.00            0.00x",
        "CPU per batch                   2 ms           2 ms            1.00x",
        "first batch                   500 ms         500 ms            1.00x",
        "memory                       50.0 MB        50.0 MB            1.00x",
    ]
    alone = results.Point(0, point.torch, point.torch)
    assert "torch's own loop" in results.table(alone) and "ratio" not in results.table(alone)
    many = a_point(2, [10.0] * 9, [float(rate) for rate in range(20, 29)])
    row = next(line for line in results.table(many).splitlines() if "96% confidence" in line)
    assert row.split("confidence")[1].split() == "10.0 to 10.0 21.0 to 27.0 2.10x to 2.70x".split()


def test_the_table_of_a_sweep_fits_a_terminal():
    rates = (123456.0, 123999.0, 124999.0)
    points = [a_point(count, rates, rates) for count in (2, 128)]
    alone = results.Point(0, points[0].torch, points[0].torch)
    lines = results.sweep_table([alone, *points], Setting(2)).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[1].split()[:3] == ["0", "torch's", "loop"]
    assert [line.split()[0] for line in lines[2:]] == ["2", "rustloader", "128", "rustloader"]
    assert [line.endswith("<-") for line in lines] == [False, False, False, True, False, False]


OPTIONS = [(("dispatch", dispatch), ("worker_threads", 4)) for dispatch in ("round_robin", "shared_queue")]


def test_swept_options_have_columns_in_the_table():
    points = [a_point(2, (10.0, 11, 12), (30.0, 33, 36), options=options) for options in OPTIONS]
    alone = results.Point(0, points[0].torch, points[0].torch)
    lines = results.sweep_table([alone, *points], points[1].setting).splitlines()
    assert lines[0].split()[:5] == ["workers", "engine", "dispatch", "threads", "batches/s"]
    assert "window" not in lines[0] and max(map(len, lines)) <= 100
    assert [line.split()[:3] for line in lines[3::2]] == [
        ["rustloader", "round_robin", "4"],
        ["rustloader", "shared_queue", "4"],
    ]
    assert [line.split()[:2] for line in lines[2::2]] == [["2", "torch"]] * 2
    assert [line.endswith("<-") for line in lines] == [False] * 5 + [True]


def test_a_table_with_many_columns_leaves_out_the_least():
    rates = (123456.0, 123999.0, 124999.0)
    options = (("dispatch", "shared_queue"), ("reorder_window", "512MiB"), ("worker_threads", 16))
    lines = results.sweep_table([a_point(128, rates, rates, options=options)], Setting(None)).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].split()[:7] == ["workers", "engine", "dispatch", "window", "threads", "batches/s", "ratio"]
    assert lines[0].endswith("memory") and "lowest" not in lines[0]
    without = results.sweep_table([a_point(128, rates, rates)], Setting(None))
    assert "lowest to highest" in without and "first batch" in without


@pytest.mark.parametrize(
    "render, words",
    [
        (lambda: text.number(0.1234), "0.123"),
        (lambda: text.number(12345.6), "12,346"),
        (lambda: text.times(None), "-"),
        (lambda: text.times(13.64), "13.6x"),
        (lambda: results._memory(results.SideRates()), "-"),
        (lambda: results._memory(results.SideRates(memory_bytes=28_000_000)), "28.0 MB"),
        (lambda: text.listed([1]), "1"),
        (lambda: text.listed([1, 2, 4]), "1, 2 and 4"),
    ],
)
def test_figures_in_words(render, words):
    assert render() == words


def test_lines_fit_and_an_option_keeps_its_value():
    lines = text.wrapped("word " * 18 + "--step SECONDS and so on", "  ").splitlines()
    assert len(lines) == 2 and lines[1] == "  --step SECONDS and so on" and max(map(len, lines)) <= 100


FACTORY = "train.py:make_loader"


def options(*arguments):
    return parser.make_parser().parse_args(["bench", FACTORY, *arguments])


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


def summary(points, *arguments, choices=None):
    given = options(*arguments)
    return Summary(given, plan.BenchPlan(given), ABOUT, points, choices or {})


def test_the_summary_of_a_loader():
    point = a_point(2, (10.0, 11, 12), (30.0, 33, 36), verdict=VERDICT)
    lines = summary([point]).text().splitlines()
    assert lines[0] == "2 workers (fork, started for each epoch), prefetch_factor=2"
    assert "Verdict on rustloader's iterator: Transport is the bottleneck." in lines
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    assert "rustloader is 3.00x as fast as torch" in text and "To measure longer" not in text
    assert (
        "The verdict applies to loading only. To include your training step, pass its duration: --step SECONDS" in text
    )
    # Each note appears once.
    assert text.count("A ratio above 1") == text.count("Rates and CPU") == text.count("--step") == 1
    assert "--step" not in summary([point], "--step", "0.1").text()


@pytest.mark.parametrize(
    "arguments, longer",
    [((), "--budget 240"), (("--budget", "30"), "--budget 60"), (("--epochs", "2"), "omit --epochs")],
)
def test_too_few_to_tell_has_a_remedy(arguments, longer):
    point = a_point(2, (10.0, 11), (30.0, 33), verdict=VERDICT)
    assert f"To measure longer: {longer}" in summary([point], *arguments).text()


def test_the_summary_of_a_sweep():
    alone = a_point(0, (10.0, 11, 12), ())
    alone.rustloader = alone.torch
    points = [alone, *(a_point(count, (10.0, 11, 12), (30.0, 33, 36), verdict=VERDICT) for count in (1, 2))]
    choices = {engine: recommendation.recommend(points, engine, 2) for engine in ("torch", "rustloader")}
    report = summary(points, "--workers", "0,1,2", choices=choices)
    lines = report.text().splitlines()
    assert "Recommended with rustloader: num_workers=1 (no measurable difference between 1 and 2 workers)." in lines
    assert "With 1 worker:" in lines and max(map(len, lines)) <= 100
    assert " ".join(lines).count(
        "A ratio above 1"
    ) == 1 and "The verdict and the recommendation apply to loading only." in " ".join(lines)
    parsed = json.loads(json.dumps(report.as_dict()))
    assert parsed["recommendation"]["rustloader"] == 1 and parsed["recommendation"]["step"] == 0.0
    assert [one["comparison"] and one["comparison"]["verdict"] for one in parsed["results"]] == [
        None,
        "faster",
        "faster",
    ]
    interval = {"low": 3.0, "high": 3.0, "confidence": 0.75, "pairs": 3, "batches": 300, "reason": ""}
    interval |= {"name": "rustloader", "baseline": "torch"}
    assert parsed["results"][1]["comparison"] == {"verdict": "faster", "ratio": 3.0} | interval
    assert parsed["settings"]["budget"] == 180.0 and parsed["settings"]["epochs"] is None


def test_the_summary_of_swept_options():
    points = with_options([(30.0, 31, 32), (60.0, 61, 62)])
    for point in points:
        point.verdict = VERDICT
    choices = {"rustloader": recommendation.recommend(points, "rustloader", 2)}
    arguments = ("--dispatch", "round_robin,shared_queue", "--worker-threads", "4")
    report = summary(points, *arguments, choices=choices)
    lines = report.text().splitlines()
    recommended = "Recommended with rustloader: num_workers=2, dispatch='shared_queue', worker_threads=4."
    assert recommended in lines and not any("with torch" in line for line in lines)
    assert "With 2 workers, dispatch=shared_queue, worker_threads=4:" in lines and max(map(len, lines)) <= 100
    assert "among settings with the same number of workers, the first one given." in " ".join(report.text().split())
    parsed = json.loads(json.dumps(report.as_dict()))
    options = [{"dispatch": name, "worker_threads": 4} for name in ("round_robin", "shared_queue")]
    assert [one["options"] for one in parsed["results"]] == options
    assert (
        parsed["recommendation"]["options"] == {"rustloader": options[1]}
        and parsed["recommendation"]["rustloader"] == 2
    )
    assert "torch" not in parsed["recommendation"]


def test_without_swept_options_nothing_names_them():
    points = [a_point(count, (10.0, 11, 12), (30.0, 33, 36), verdict=VERDICT) for count in (1, 2)]
    choices = {engine: recommendation.recommend(points, engine, 2) for engine in ("torch", "rustloader")}
    report = summary(points, "--workers", "1,2", choices=choices)
    assert "first one given" not in report.text() and "options" not in report.as_dict()["recommendation"]
    assert all("options" not in one for one in report.as_dict()["results"])


def test_one_setting_is_named_without_a_sweep():
    point = a_point(2, (10.0, 11, 12), (30.0, 33, 36), verdict=VERDICT, options=(("reorder_window", "64MiB"),))
    lines = summary([point], "--reorder-window", "64MiB").text().splitlines()
    assert lines[0] == "2 workers, reorder_window=64MiB (fork, started for each epoch), prefetch_factor=2"


def test_a_sweep_without_figures_recommends_nothing():
    points = [a_point(count, (10.0,), (30.0,), verdict=VERDICT) for count in (1, 2)]
    choices = {engine: recommendation.recommend(points, engine, 2) for engine in ("torch", "rustloader")}
    text = summary(points, "--workers", "1,2", "--epochs", "1", choices=choices).text()
    assert "No recommendation for rustloader: too few epochs or batches with 1 worker." in text
    assert "Recommended" not in text and "<-" not in text and "Rule" not in text


def alone(*rates, batches=100):
    """torch's own loop."""
    point = a_point(0, rates, (), batches)
    point.rustloader = point.torch
    return point


def words_of(report):
    return " ".join(report.text().split())


def test_torchs_own_loop_is_beside_both_loaders():
    """As seen by a user: 6.4x torch with workers, although no workers at all were another 2.4x as fast."""
    point = a_point(2, (10.0, 11, 12), (64.0, 65, 66), verdict=VERDICT)
    faster = "Without workers, torch is 2.40x as fast as the faster loader with workers: use num_workers=0"
    assert f"{faster}, or measure with --step SECONDS." in words_of(summary([alone(155.0, 156, 157), point]))
    assert f"{faster}." in words_of(summary([alone(155.0, 156, 157), point], "--step", "0.1"))
    slower = words_of(summary([alone(6.0, 6.5, 7), point]))
    assert "Without workers, torch reaches 6.50 batches/s, 0.10x the rate of the faster loader with workers." in slower
    assert "use num_workers=0" not in words_of(summary([alone(60.0, 66, 72), point]))
    assert "Without workers" not in words_of(summary([alone(155.0, 156), point]))
    given = options()
    report = Summary(given, plan.BenchPlan(given), ABOUT, [point], {}, "KeyError: 'worker'")
    assert "torch's own loop, without workers, could not be measured: KeyError: 'worker'" in words_of(report)


def test_a_sweep_has_the_sentence_only_where_workers_cost():
    points = [alone(155.0, 156, 157), *(a_point(n, (10.0, 11, 12), (64.0, 65, 66), verdict=VERDICT) for n in (1, 2))]
    choices = {engine: recommendation.recommend(points, engine, 2) for engine in ("torch", "rustloader")}
    assert {choice.workers for choice in choices.values()} == {0}
    assert "use num_workers=0, or" in words_of(summary(points, "--workers", "1,2", choices=choices))
    points[0] = alone(6.0, 6.5, 7)
    choices = {engine: recommendation.recommend(points, engine, 2) for engine in ("torch", "rustloader")}
    assert {choice.workers for choice in choices.values()} == {1}
    assert "Without workers" not in words_of(summary(points, "--workers", "1,2", choices=choices))


def test_torchs_own_loop_with_too_few_epochs_does_not_take_the_recommendation():
    points = [alone(155.0, 156), *sweep({1: [10.0] * 3, 2: [20.0] * 3})]
    assert recommended(points).workers == 2
    assert recommended([alone(155.0, 156)]).workers is None


def busy(point, share):
    """The same point, measured while other processes used a share of the cores."""
    for side in (point.torch, point.rustloader):
        side.passes = [dataclasses.replace(one, others_share=share) for one in side.passes]
    return point


def test_a_busy_machine_is_named_and_gets_no_recommendation():
    """As seen by a user: a load of 3.5 on 2 cores, and yet "97 % confidence"."""
    rates = [10.0 + k for k in range(6)], [30.0 + 3 * k for k in range(6)]
    calm, some, much = (busy(a_point(2, *rates, verdict=VERDICT), share) for share in (0.05, 0.15, 0.6))
    assert "97% confidence" in words_of(summary([calm])) and "Other processes" not in words_of(summary([calm]))
    assert "Other processes used 15% of the cores during the run." in words_of(summary([some]))
    assert "97% confidence" in words_of(summary([some]))
    text = words_of(summary([much]))
    assert "Other processes used 60% of the cores during the run: end them and measure again." in text
    assert "confidence)" not in text and "as fast" not in text
    assert "Without workers" not in words_of(summary([busy(alone(6.0, 6.5, 7), 0.0), much]))
    choice = recommended([calm, busy(a_point(1, *rates), 0.6)])
    assert choice.workers is None and choice.reason.startswith(
        "other processes used 60% of the cores during the run: end"
    )
    assert recommended([calm, busy(a_point(1, *rates), 0.2)]).workers == 1
    assert json.loads(json.dumps(much.as_dict("a:b")))["others_share"] == 0.6
    # Unknown is not busy.
    assert a_point(1, *rates).others_share == 0.0


def test_no_ratio_where_there_are_too_few_to_tell():
    for rates in (((10.0, 11), (30.0, 33)), ((10.0, 20, 30), (20.0, 10, 45))):
        point = a_point(2, *rates)
        assert point.comparison.verdict == "too few to tell"
        rows = [line.split() for line in results.table(point).splitlines()]
        assert [row[-1] for row in rows[1:] if row[0] in ("batches/s", "MB/s", "CPU", "first", "memory")] == ["-"] * 5
        assert "x" not in results.table(point).replace("lowest to highest", "")
        rustloader_row = results.sweep_table([point], Setting(None)).splitlines()[2].split()
        assert rustloader_row[5] == "-", rustloader_row


def test_a_verdict_advises_no_workers_that_were_measured_and_are_slower():
    """As seen by a user: "Use num_workers=2" under a table in which 2 workers are slower."""
    worker = WorkerStats(0, tasks=100, fetch_seconds=5.0, cpu_seconds=5.0, queued_seconds=0.0)
    worker = dataclasses.replace(worker, fetch_cpu_seconds=5.0, fetch_measured_seconds=5.0)
    stats = Stats(
        num_workers=1,
        cores=2,
        epochs=1,
        batches=100,
        next_seconds=4.0,
        waited_seconds=4.0,
        step_seconds=1.0,
        workers=(worker,),
    )
    one = a_point(1, (10.0, 11, 12), (30.0, 33, 36), verdict=VERDICT)
    one.judged = stats
    before = stats.verdict()
    assert before.workers_needed == 2 and "Use num_workers=2" in before.sentence
    for rates, needed in (((20.0, 21, 22), None), ((30.0, 33, 36), None), ((60.0, 61, 62), 2)):
        one.verdict = dataclasses.asdict(before)
        results.revise_verdicts([one, a_point(2, (10.0, 11, 12), rates)])
        assert one.verdict["workers_needed"] == needed
        assert ("A measurement showed that more workers do not help." in one.verdict["sentence"]) == (needed is None)
        assert ("num_workers=2" in one.verdict["sentence"]) == (needed is not None)


def others(point, about=None, **rates):
    """Adds the loaders of other factories to a point."""
    for name, measured in rates.items():
        passes = [a_pass(rate) for rate in measured]
        point.others[f"train.py:{name}"] = results.SideRates(passes, 1e6, 50_000_000, about=about or {})
        point.verdicts[f"train.py:{name}"] = VERDICT | {
            "sentence": f"The {name} loader is the bottleneck.",
            "cached_share": 0.9 if name == "cached" else None,
        }
    return point


def test_loaders_of_other_factories_are_compared_with_the_first_one():
    rates = [[speed * (10.0 + k) for k in range(6)] for speed in (1, 3, 6)]
    point = others(a_point(2, *rates[:2], verdict=VERDICT), cached=rates[2], same=rates[1])
    report = summary([point], "train.py:cached", "train.py:same")
    lines = report.text().splitlines()
    first = next(
        k for k, line in enumerate(lines) if line.startswith("The loaders on the engine; the ratio is that to")
    )
    assert FACTORY in lines[first] and max(map(len, lines)) <= 100
    head, plain, cached, *_ = lines[first + 2 :]
    assert head.split()[:6] == ["workers", "batch", "batches/s", "ratio", "CPU/batch", "first"]
    assert plain.split()[:5] == [FACTORY, "2", "-", "37.5", "-"]
    assert cached.split()[:5] == ["train.py:cached", "2", "-", "75.0", "2.00x"]
    text = words_of(report)
    assert f"train.py:cached is 2.00x as fast as {FACTORY} (between 2.00x and 2.00x; 6 pairs" in text
    assert text.count("came from the cache") == 1
    verdict = "The cached loader is the bottleneck. After the warm-up, 90% of the samples came from the cache."
    assert f"Verdict on train.py:cached: {verdict}" in text
    parsed = json.loads(json.dumps(report.as_dict()))
    assert parsed["factories"] == [FACTORY, "train.py:cached", "train.py:same"]
    other = parsed["results"][0]["others"]["train.py:cached"]
    assert (other["comparison"]["ratio"], other["comparison"]["baseline"], other["batch_bytes"]) == (2.0, FACTORY, 1e6)
    assert other["verdict"]["kind"] == "transport" and len(other["epochs"]) == 6
    busy_text = words_of(summary([busy(point, 0.6)], "train.py:cached", "train.py:same"))
    assert "as fast" not in busy_text and "Verdict on train.py:cached" in busy_text


def test_batches_of_different_sizes_are_compared_by_samples():
    point = others(a_point(2, (10.0, 11, 12), (30.0, 33, 36)), {"batch_size": 64}, large=(15.0, 16.5, 18))
    point.rustloader.about = {"batch_size": 32}
    comparison = point.comparisons(FACTORY)["train.py:large"]
    assert (comparison.ratio, comparison.verdict) == (1.0, "no measurable difference")


def test_remote_workers_are_in_no_figure_of_this_machine():
    point = others(a_point(2, (10.0, 11, 12), (30.0, 33, 36)), {"remote": True}, remote=(60.0, 66, 72))
    side = point.others["train.py:remote"]
    side.passes = [dataclasses.replace(it, others_share=0.9) for it in side.passes]
    assert point.others_share == 0.0
    row = results.factories_table([point], FACTORY).splitlines()[2].split()
    assert (row[0], row[-1], row.count("-")) == ("train.py:remote", "-", 3)


def test_verdicts_on_other_factories_are_revised():
    points = [others(a_point(n, (10.0, 11, 12), (30.0, 33, 36)), cached=(60.0, 66, 72)) for n in (1, 2)]
    worker = WorkerStats(0, tasks=100, fetch_seconds=5.0, cpu_seconds=5.0, queued_seconds=0.0)
    worker = dataclasses.replace(worker, fetch_cpu_seconds=5.0, fetch_measured_seconds=5.0)
    times = dict(next_seconds=4.0, waited_seconds=4.0, step_seconds=1.0)
    points[0].judged_others["train.py:cached"] = Stats(
        num_workers=1, cores=2, epochs=1, batches=100, workers=(worker,), **times
    )
    results.revise_verdicts(points)
    sentence = points[0].verdicts["train.py:cached"]["sentence"]
    assert "A measurement showed that more workers do not help." in sentence


def test_a_sweep_names_the_setting_of_each_factory():
    swept = (("dispatch", "shared_queue"),)
    points = [others(a_point(n, (10.0, 11, 12), (30.0, 33, 36), options=swept), cached=(60.0, 66, 72)) for n in (1, 2)]
    lines = results.factories_table([alone(6.0, 6.5, 7), *points], FACTORY).splitlines()
    names = [[f"{name},", "dispatch=shared_queue", n] for n in "12" for name in (FACTORY, "train.py:cached")]
    assert [line.split()[:3] for line in lines[1:]] == names
    assert results.factories_table([a_point(2, (10.0,), (30.0,))], FACTORY) == ""


# The plan, and what is checked before anything runs


@pytest.mark.parametrize(
    "arguments, text, budget, seconds",
    [
        ((), "in turn, each at most 3 s; up to 2 min after a warm-up, or until the result is clear", 120, 3),
        (("--workers", "0,1,2"), "with 0, 1 and 2 workers: epochs of torch and rustloader in turn", 180, 3),
        (("--workers", "1,2"), "with 1 and 2 workers: epochs of torch and rustloader in turn", 180, 3),
        (("--workers", "1,2", "--budget", "24"), "each at most 500 ms; up to 24 s", 24, 0.5),
        (("--seconds", "10"), "each at most 10 s; up to 5 min", 320, 10),
        (("--epochs", "1", "--batches", "1"), "1 epoch of torch and rustloader in turn", None, 3),
        (
            ("--dispatch", "round_robin,shared_queue", "--worker-threads", "1,8"),
            "with dispatch=round_robin and shared_queue, worker_threads=1 and 8: epochs of",
            300,
            3,
        ),
        (("--workers", "2", "--reorder-window", "16"), "with reorder_window=16: epochs of", 120, 3),
    ],
)
def test_plans(arguments, text, budget, seconds):
    bench_plan = plan.BenchPlan(options(*arguments))
    assert text in str(bench_plan) and (bench_plan.budget, bench_plan.seconds) == (budget, seconds)


@pytest.mark.parametrize(
    "arguments, error",
    [
        (("--workers", "1,2,4,8,16", "--budget", "10"), "10 s is not enough for 5 settings; pass --budget 60"),
        (("--workers", "0,1", "--budget", "9.5"), "9.5 s is not enough for 2 settings; pass --budget 24"),
        (("--workers", "1,2", "--budget", "10"), None),
        (("--budget", "1"), None),  # the output says how to measure longer
    ],
)
def test_a_budget_that_is_too_small_for_a_sweep_is_refused_before_anything_runs(arguments, error):
    if error is None:
        plan.BenchPlan(options(*arguments))
        return
    with pytest.raises(Unusable) as raised:
        plan.BenchPlan(options(*arguments))
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
    asked = [plan.BenchPlan(options(*line)).requested for line in lines]
    assert asked == [9, 1, 2, 2]
    assert [str(setting) for setting in (Setting(None), Setting(1), combined[1])] == [
        "",
        "1 worker",
        "2 workers, dispatch=shared_queue, reorder_window=64MiB",
    ]


def test_steps_of_a_fixed_number_of_epochs():
    assert plan.BenchPlan(options("--workers", "0,1", "--epochs", "3")).steps == 3 * 4
    assert plan.BenchPlan(options("train.py:cached", "--epochs", "3")).steps == 4 * 4
    assert plan.BenchPlan(options()).steps == 0


def test_measuring_ends_when_all_factories_are_compared():
    run = command._Bench(options("train.py:cached"))
    clear = a_point(2, [10.0] * 6, [30.0] * 6)
    assert not run._needs_more(others(clear, cached=[90.0] * 6), 6, 50.0, 5.0)
    assert run._needs_more(others(clear, cached=[30.0, 40.0] * 3), 6, 50.0, 5.0)


def test_measuring_ends_when_the_result_is_clear_or_the_budget_spent(monkeypatch):
    """``_needs_more`` by pairs so far, seconds left, and seconds of the longest pair."""
    run = command._Bench(options())
    clear, unclear = a_point(2, [10.0] * 6, [30.0] * 6), a_point(2, [10.0] * 6, [10.0, 14.0] * 3)
    assert run._needs_more(results.Point(2), 0, -1.0, 0.0)  # one pair in any case
    assert not run._needs_more(clear, 6, 50.0, 5.0)
    assert run._needs_more(unclear, 6, 50.0, 5.0)
    assert not run._needs_more(unclear, 6, 4.0, 5.0)  # the next pair would not fit
    few = a_point(2, [10.0] * 6, [30.0] * 6, batches=4)
    assert run._needs_more(few, 6, 0.1, 5.0) and not run._needs_more(few, 6, 0.0, 5.0)
    alone = a_point(0, [10.0] * 6, [])
    alone.rustloader = alone.torch
    assert not run._needs_more(alone, 6, 50.0, 5.0)
    fixed = command._Bench(options("--epochs", "2"))
    assert fixed._needs_more(unclear, 1, 0.0, 5.0) and not fixed._needs_more(unclear, 2, 50.0, 5.0)


def test_a_factory_that_is_named_twice_is_refused(capsys):
    assert cli.main(["bench", "x:y", "x:z", "x:y"]) == 2
    error = "rustloader bench: x:y is named twice; write a second function that returns the other loader\n"
    assert capsys.readouterr() == ("", error)


def test_torchs_own_loop_alone_is_answered_with_what_to_do():
    with pytest.raises(Unusable) as raised:
        plan.BenchPlan(options("--workers", "0"))
    assert str(raised.value) == (
        "With `num_workers=0`, torch's own loop runs; there is nothing to accelerate. "
        "To compare it with workers, pass --workers 0,2"
    )


@pytest.fixture
def nothing_runs(monkeypatch):
    monkeypatch.setattr(command, "_Bench", None)


@pytest.mark.parametrize(
    "arguments, error",
    [
        ([], "required: factory"),
        (["x:y", "--workers", "1,a"], "argument --workers: must be a comma-separated list of integers"),
        (["x:y", "--workers", "-1"], "argument --workers"),
        (["x:y", "--seconds", "0"], "argument --seconds: must be a positive number of seconds, up to a year, got 0"),
        (
            ["x:y", "--budget", "nan"],
            "argument --budget: must be a positive number of seconds, up to a year, got 'nan'",
        ),
        (["x:y", "--timeout", "0"], "argument --timeout: must be a positive number of seconds, up to a year, got 0"),
        (["x:y", "--step=-1"], "argument --step: must be a number of seconds from 0 to a year, got -1"),
        (["x:y", "--dispatch", "round_robin,queue"], "argument --dispatch: must be round_robin or shared_queue, got"),
        (["x:y", "--reorder-window", "8,,16"], "argument --reorder-window: must be a positive integer (batches), or a"),
        (["x:y", "--worker-threads", "0"], "argument --worker-threads: must be a positive integer, got 0"),
        (["x:y", "--epochs", "0"], "argument --epochs: must be a positive integer, got 0"),
        (["x:y", "--batches", "0"], "argument --batches: must be a positive integer, got 0"),
        (["x:y", "--epochs", "3", "--budget", "9"], "argument --budget: not allowed with argument --epochs"),
    ],
)
def test_mistakes_are_usage_errors(arguments, error, nothing_runs, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments])
    assert ended.value.code == 2 and error in capsys.readouterr().err


def test_help_says_what_and_how(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "examples:\n  python -m rustloader bench train.py:make_loader" in out
