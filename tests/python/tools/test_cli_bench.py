"""`python -m rustloader bench`: what it measures, what it prints, and that it leaves nothing behind."""

import io
import json
import re
import signal
import sys
import textwrap
import types
import typing

import ending_commands
import pytest
import torch
from remote_support import LoopbackContext
from support import SOON, rustloader

pytestmark = [pytest.mark.ours, pytest.mark.timeout(400)]

if rustloader is not None:
    from forked_probes import fork_probes

    from rustloader.tools import cli
    from rustloader.tools.bench import command, comparison, passes
    from rustloader.tools.bench.side import BenchSide, _prepare_remote
    from rustloader.tools.harness import progress, rounds
    from rustloader.tools.probe import deaths
    from rustloader.tools.probe import process as probes
    from rustloader.tools.probe.factory import Unusable

# `--timeout` and `--seconds` in tests of other options.
PATIENT = "300"

LOADERS = """
    import os, signal, time, warnings
    import torch
    import rustloader
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        length = 96
        fails_at = None
        def __len__(self):
            return self.length
        def __getitem__(self, i):
            if i == self.fails_at:
                self.fail()
            return torch.full((8,), i)
        def fail(self):
            raise KeyError("on purpose")

    def torchs():
        print("the user's own words")
        return DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2)
    def cached():
        return DataLoader(rustloader.cache(Numbers()), batch_size=4, num_workers=2)
    def ours():
        return rustloader.DataLoader(Numbers(), batch_size=4, num_workers=2, persistent_workers=True)
    def without_any():
        dataset = Numbers()
        dataset.length = 0
        return DataLoader(dataset, num_workers=1)
    def failing():
        dataset = Numbers()
        dataset.fails_at = 30
        return DataLoader(dataset, batch_size=4, num_workers=1)
    def suicidal():
        os.kill(os.getpid(), 40)  # a signal without a name
    class Slow(Numbers):
        def __getitem__(self, i):
            open("working", "w").close()
            time.sleep(0.01)
            return i
    def slow():
        return DataLoader(Slow(), batch_size=4, num_workers=2, persistent_workers=True)
    class Sharded(Numbers):
        def __getitem__(self, i):
            return torch.utils.data.get_worker_info().id
    def sharded():
        return DataLoader(Sharded(), batch_size=4, num_workers=2)
    class Exiting(Numbers):
        def fail(self):
            os._exit(3)
    def exiting():
        dataset = Exiting()
        dataset.fails_at = 4
        return DataLoader(dataset, batch_size=4, num_workers=2)
    def tiny():
        dataset = Numbers()
        dataset.length = 32
        warnings.warn("a warning of the user's")
        return DataLoader(dataset, batch_size=4, num_workers=1)
    def hanging():
        for name in ("working", f"hanging-{os.getpid()}"):
            open(name, "w").close()
        time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the loaders above in loaders.py, which only forks of this process import."""
    fork_probes(monkeypatch)
    monkeypatch.setattr(command, "_MIN_SAMPLES", 1)  # one epoch to warm up, or a few
    monkeypatch.setattr(deaths, "_STACK_SECONDS", SOON)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loaders.py").write_text(textwrap.dedent(LOADERS))
    return tmp_path


def run(*arguments, capsys):
    status = cli.main(["bench", "--timeout", PATIENT, "--seconds", PATIENT, *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# The command


def test_a_loader_is_measured_on_both_engines(folder, capsys):
    status, out, err = run("loaders.py:torchs", "--epochs", "2", "--step", "0.002", capsys=capsys)
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("loaders.py:torchs: 2 epochs of torch and rustloader in turn")
    assert lines[1] == "2 workers (fork, started for each epoch), prefetch_factor=2"
    rows = {line[:19].strip(): line[19:].split() for line in lines if line}
    assert rows[""] == ["torch", "rustloader", "ratio"]
    for name in ("batches/s", "MB/s", "CPU per batch", "first batch", "memory"):
        assert name in rows, out
    assert "Too few to tell: 2 epochs of each loader, but at least 3 are needed.\n" in out
    assert "Verdict on rustloader's iterator: " in out and "--step" not in out
    assert max(map(len, lines[1:])) <= 100
    assert "the user's own words" not in out
    assert "%" not in err  # no bar in a pipe


def test_short_epochs_are_repeated_until_there_are_enough_batches(folder, capfd, monkeypatch):
    """An epoch has eight batches. Each process issues the warning, but it is shown once."""
    # More epochs would hardly change the result.
    monkeypatch.setattr(rounds.Interval, "narrow", True)
    monkeypatch.setattr(comparison.Comparison, "is_decided", True)
    status, out, err = run("loaders.py:tiny", "--budget", "200", "--json", capsys=capfd)
    assert status == 0, err
    alone, point = json.loads(out)["results"]
    assert alone["workers"] == 0 and alone["comparison"] is None
    assert (point["comparison"]["batches"], point["comparison"]["pairs"]) == (56, 7)
    assert [epoch["batches"] for epoch in point["torch"]["epochs"]] == [8] * 7
    assert err.count("UserWarning: a warning of the user's") == 1


class Terminal(io.StringIO):
    """What is written to a terminal or a pipe."""

    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("tqdm", [True, False])
def test_a_bar_only_on_a_terminal_and_with_tqdm(terminal, tqdm, monkeypatch):
    if tqdm:
        module = pytest.importorskip("tqdm", reason="the bar is optional, and tqdm is not installed")
        monkeypatch.setattr(module.tqdm, "monitor_interval", 0)  # the monitor would leave a thread behind
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", Terminal(terminal))
    with progress.Progress(4) as bar:
        for number in range(4):
            bar.say(f"epoch {number}")
            bar.step()
    written = sys.stderr.getvalue()
    assert ("epoch 3" in written and "75%" in written) if terminal and tqdm else written == ""


def test_a_sweep_as_json(folder, capsys):
    arguments = ("--workers", "2,0,2", "--epochs", "2", "--batches", "20", "--json")
    status, out, err = run("loaders.py:ours", *arguments, capsys=capsys)
    assert status == 0, err
    parsed = json.loads(out)
    assert set(parsed) == {"factories", "machine", "settings", "results", "recommendation"}
    assert parsed["factories"] == ["loaders.py:ours"]
    assert parsed["machine"]["rustloader"] == rustloader.__version__ and parsed["machine"]["torch"] == torch.__version__
    loader = {
        "prefetch_factor": 2,
        "batch_size": 4,
        "persistent_workers": True,
        "pin_memory": False,
        "start_method": "fork",
        "remote": False,
    }
    limits = {"epochs": 2, "budget": None, "batches": 20, "seconds": 300.0, "step": 0.0, "timeout": 300.0}
    assert parsed["settings"] == limits | {"loader": loader}
    alone, two = parsed["results"]
    assert (alone["workers"], two["workers"]) == (0, 2)
    assert alone["rustloader"] == alone["torch"] and alone["verdict"] is None
    assert alone["comparison"] is None and two["comparison"]["verdict"] == "too few to tell"
    assert two["verdict"]["kind"] in set(typing.get_args(rustloader.VerdictKind)) - {"unknown"}
    assert two["verdict"]["sentence"].endswith("."), two["verdict"]
    # One to five epochs to warm up, and two that are measured.
    assert two["verdict"]["stats"]["batches"] in range(60, 141, 20)
    for side in (alone["torch"], two["torch"], two["rustloader"]):
        assert [(epoch["batches"], epoch["complete"]) for epoch in side["epochs"]] == [(20, False)] * 2
        assert side["batch_bytes"] == 4 * 8 * 8
        assert side["batches_per_second"] > 0 and side["megabytes_per_second"] > 0
        assert side["cpu_seconds_per_batch"] > 0 and side["first_batch_seconds"] > 0
        # None if no reading fell into an epoch that short.
        assert side["memory_bytes"] is None or side["memory_bytes"] >= 0
    # The start of workers takes long enough for a reading.
    assert two["torch"]["memory_bytes"] is not None or two["rustloader"]["memory_bytes"] is not None
    assert two["ratio"]["batches_per_second"] == pytest.approx(two["comparison"]["ratio"])
    # Two epochs are too few for a recommendation.
    assert [parsed["recommendation"][name] for name in ("torch", "rustloader")] == [None, None]
    assert "5%" in parsed["recommendation"]["rule"] and "too few" in parsed["recommendation"]["reasons"]["torch"]


def test_a_sweep_of_options(folder, capsys):
    arguments = ("--dispatch", "round_robin,shared_queue", "--reorder-window", "16", "--epochs", "1", "--json")
    status, out, err = run("loaders.py:torchs", *arguments, capsys=capsys)
    assert status == 0, err
    parsed = json.loads(out)
    swept = [{"dispatch": dispatch, "reorder_window": 16} for dispatch in ("round_robin", "shared_queue")]
    alone, *points = parsed["results"]
    assert alone["workers"] == 0 and [point["options"] for point in points] == swept
    for point, options in zip(points, swept, strict=True):
        # The engine used these options, and delivered every batch.
        stats = point["verdict"]["stats"]
        assert stats["scheduling"].items() >= options.items()
        assert point["workers"] == 2 and stats["batches"] % 24 == 0 < stats["batches"]
        assert [side["epochs"][0]["batches"] for side in (point["torch"], point["rustloader"])] == [24, 24]
    assert parsed["recommendation"]["rustloader"] is None and "torch" not in parsed["recommendation"]


def test_a_dataset_that_needs_a_worker_is_measured_all_the_same(folder, capsys):
    status, out, err = run("loaders.py:sharded", "--epochs", "1", capsys=capsys)
    assert status == 0, err
    assert "torch's own loop, without workers, could not be measured: with torch's iterator: AttributeError:" in out


def test_a_cache_is_another_factory(folder, capfd):
    status, out, err = run("loaders.py:torchs", "loaders.py:cached", "--epochs", "2", "--json", capsys=capfd)
    assert status == 0, err
    assert "the user's own words" in err and "the user's own words" not in out
    alone, point = json.loads(out)["results"]
    assert alone["others"] == {} and set(point["others"]) == {"loaders.py:cached"}
    cached = point["others"]["loaders.py:cached"]
    assert [epoch["batches"] for epoch in cached["epochs"]] == [24] * 2
    # The warm-up has filled the cache.
    assert cached["verdict"]["cached_share"] == 1.0 and point["verdict"]["cached_share"] is None
    assert (cached["loader"]["batch_size"], cached["loader"]["remote"]) == (4, False)


@pytest.mark.parametrize("engine, is_kept", [("torch", False), ("rustloader", True)])
def test_a_loader_with_remote_workers_is_prepared(engine, is_kept, tmp_path, monkeypatch):
    """torch gets local workers; cloudpickle gets the definitions of a factory's file by value."""
    by_value = []
    cloudpickle = types.SimpleNamespace(register_pickle_by_value=by_value.append)
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(cloudpickle=cloudpickle))
    module = types.ModuleType("loaders_of_a_file")
    monkeypatch.setitem(sys.modules, "loaders_of_a_file", module)
    (tmp_path / "loaders_of_a_file.py").touch()
    context = LoopbackContext(tmp_path)
    for target, sent in (("a.package:make", []), (f"{tmp_path}/loaders_of_a_file.py:make", [module] * is_kept)):
        loader = torch.utils.data.DataLoader([1], num_workers=1, multiprocessing_context=context)
        _prepare_remote(loader, engine, target)
        assert loader.multiprocessing_context is (context if is_kept else None) and by_value == sent


@pytest.mark.parametrize(
    "target, text",
    [
        ("loaders.py:without_any", "the loader of loaders.py:without_any yields no batches\n"),
        ("loaders.py:failing", "with torch's iterator: KeyError: 'on purpose' (loaders.py:{fail} in fail, worker 0)\n"),
        ("loaders.py:suicidal", "the process with torch's iterator was killed by signal 40\n"),
    ],
)
def test_what_gives_no_loader_or_no_batches(target, text, folder, capsys):
    """The cause comes first, in one line; a traceback needs --verbose."""
    source = (folder / "loaders.py").read_text().splitlines()
    line = next(k for k, line in enumerate(source, 1) if "on purpose" in line)
    status, out, err = run(target, capsys=capsys)
    assert status == 2 and err.startswith(f"rustloader bench: {text.format(fail=line)}"), err
    assert len(out.splitlines()) == 1 and len(err.splitlines()) <= 2
    assert "Traceback" not in err and "rustloader/" not in err


def test_a_wrong_target_is_refused_before_anything_is_printed(folder, capsys, monkeypatch):
    monkeypatch.setattr(command, "_Bench", None)
    for arguments in ((), ("--json",)):
        status, out, err = run("no_such_file.py:f", *arguments, capsys=capsys)
        assert (status, out, err) == (2, "", "rustloader bench: there is no file no_such_file.py\n")


def test_a_worker_whose_death_goes_unnoticed_is_named(folder, monkeypatch):
    """As if torch's next() never returned: here the main process is in a step."""
    monkeypatch.setattr(probes, "UNNOTICED_SECONDS", 0.1)
    side = BenchSide("loaders.py:exiting", "rustloader")
    with probes.Probe(side, 300.0) as process:
        process.ask("about")
        with pytest.raises(Unusable, match=r"worker 1 \(pid \d+\) ended with exit code 3"):
            process.ask("run", 1, passes.Limits(None, 60.0, step=300.0), False)


def test_a_factory_that_hangs_is_given_up(folder, capsys, monkeypatch):
    # What comes before the hang is slow on a busy machine.
    def limit(self, awaited):
        return self.timeout if (folder / f"hanging-{self.group}").exists() else 300.0

    monkeypatch.setattr(probes.Probe, "limit", limit)
    status, _, err = run("loaders.py:hanging", "--timeout", "1", capsys=capsys)
    assert status == 2
    what = "with torch's iterator, loaders.py:hanging did not return a loader within 1 s"
    assert err.startswith(f"rustloader bench: {what}\n")
    assert re.search(r"the main process \(pid \d+\) is at \S*loaders.py:\d+ in hanging", err), err


def test_a_loader_that_the_engine_does_not_serve_is_no_comparison(folder):
    (folder / "loaders.py").write_text(
        textwrap.dedent("""
            from torch.utils.data import DataLoader
            class Own(DataLoader):
                def __iter__(self):
                    yield from ([1], [2])
            def own():
                return Own([1, 2], num_workers=1)
        """)
    )
    with probes.Probe(BenchSide("loaders:own", "rustloader"), 300.0) as process:
        assert process.ask("about")["num_workers"] == 1
        with pytest.raises(Unusable, match="nothing to compare: the Rust engine delivered no batches"):
            process.ask("run", 0, passes.Limits(None, 5.0), True)


# How it ends


@pytest.mark.timeout(800)
def test_an_end_leaves_no_process(folder):
    """`check` runs the same processes; its test ends it in each way."""
    ending_commands.end(["bench", "loaders.py:slow", "--seconds", "300", "--timeout", PATIENT], signal.SIGINT)
