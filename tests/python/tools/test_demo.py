"""The demo and train_digits.py in examples/start: what they print, write and prove, and how they fail."""

import importlib
import importlib.util
import os
import signal
import subprocess
import sys

import pytest
import torch.utils.data
from support import ROOT, STARTED, in_session, rustloader, wait_until

pytestmark = [pytest.mark.ours, pytest.mark.timeout(600)]

START = ROOT / "examples" / "start"
NEEDED = ("matplotlib", "PIL", "sklearn", "tqdm")


@pytest.fixture(scope="module", autouse=True)
def packages():
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"not installed, they come with the extra demo: {', '.join(missing)}"
        (pytest.fail if os.environ.get("RUSTLOADER_REQUIRE_ALL") else pytest.skip)(reason)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the image files, which are written once."""
    folder = tmp_path_factory.mktemp("data")
    part("workloads").write_files(folder)
    part("proof").train_digits.write_images(folder / "digits")
    return folder


def part(name):
    """A module of the demo."""
    if str(START) not in sys.path:
        sys.path.insert(0, str(START))
    return importlib.import_module(f"demo.{name}")


def start(*arguments, script="demo", cwd=None):
    """Starts the demo in a session of its own, without a terminal."""
    command = [sys.executable, START / script, *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(list(map(str, command)), **pipes, text=True, start_new_session=True, cwd=cwd)


def run(*arguments, **kw):
    with start(*arguments, **kw) as process:
        try:
            out, err = process.communicate(timeout=STARTED)
        finally:
            process.kill()
    return process.returncode, out, err


SHORT = ("--seconds", "0.02", "--rounds", "2", "--epochs", "1")


def result(no_workers, torch_rates, rustloader_rates, own_share=0.1, name="Rows", ours=None):
    """A result with these rates, in batches/s."""
    measure, workloads = part("measure"), part("workloads")
    workload = workloads.Workload(name, "2 x 2", "counting", lambda folder: None, 2, ours)
    rates = {measure.NO_WORKERS: no_workers, measure.TORCH: torch_rates, measure.OURS: rustloader_rates}
    return measure.Result(workload, rates, own_share)


# The whole program


def test_a_short_run_prints_at_most_40_lines_and_writes_a_picture(data, tmp_path):
    from PIL import Image

    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    status, out, err = run(*SHORT, "--data", data, "--workers", 1, cwd=tmp_path)
    assert (status, err) == (0, ""), out + err
    lines = out.splitlines()
    assert len(lines) <= 40 and "This takes about" in lines[0]
    for workload in part("workloads").WORKLOADS:
        [at] = [k for k, line in enumerate(lines) if line.startswith(f"{workload.name} ({workload.detail}): ")]
        bars = lines[at + 1 : at + 4]
        assert [line[:24].strip() for line in bars] == ["torch, no workers", "torch, 1 worker", "rustloader, 1 worker"]
        assert all("█" in line for line in bars)
    assert any("decoding and augmenting, which no loader speeds up" in line for line in lines)
    assert "identical" in out and "DIFFERENT" not in out
    assert lines[-1].strip() == f"{sys.executable} -m rustloader bench train.py:make_loader"
    assert "Picture of the gains and of rustloader at work: demo.png" in out and os.listdir(tmp_path) == ["demo.png"]
    with Image.open(tmp_path / "demo.png") as picture:
        picture.load()
        assert picture.format == "PNG" and picture.width > picture.height > 500
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before, "a second run writes files again"


@pytest.mark.parametrize("moment", ["while files are written", "while loaders are measured"])
def test_ctrl_c_leaves_nothing_and_says_so(moment, data, tmp_path):
    measured = moment == "while loaders are measured"
    folder = data if measured else tmp_path / "new"
    before = set(folder.glob("*"))
    with start("--data", folder, "--seconds", 60, cwd=tmp_path) as process:
        try:

            def has_started():
                others = in_session(process.pid) - {process.pid}
                return len(others) >= 4 if measured else folder.exists() and any(folder.iterdir())

            assert wait_until(has_started, STARTED)
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=STARTED)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, ""), out + err
    assert out.splitlines()[-1] == "Interrupted: no processes and no unfinished files remain."
    # The last process closes its output before it has ended.
    assert wait_until(lambda: not in_session(process.pid)), in_session(process.pid)
    # Whole files or none.
    left = {path.name for path in set(folder.glob("*")) - before}
    assert left <= {"images.npy", "photographs"} and not (measured and left)
    assert not list(tmp_path.glob("*demo*"))


DROPPED = """
import signal, sys, time, types
from demo import __main__ as start

class Dropped:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)  # what a handler raises here is dropped

def main():
    Dropped()
    time.sleep(600)

sys.modules["demo.main"] = types.SimpleNamespace(main=main)
start.watch_for_ctrl_c()
print(start.run())
"""


def test_ctrl_c_is_not_lost_where_python_drops_exceptions():
    environment = {**os.environ, "PYTHONPATH": str(START)}
    command = [sys.executable, "-c", DROPPED]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=STARTED)
    assert (process.returncode, process.stdout, process.stderr) == (0, "130\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0"], "must be a positive integer, got 0"),
        (["--plot", "demo.txt"], "--plot must end in .png, .svg, .pdf, got demo.txt"),
        (["--plot", "no/such/folder/demo.png"], "--plot: cannot write /"),
    ],
)
def test_wrong_arguments_end_the_demo_before_anything_runs(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        part("main").main(arguments)
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        part("main").main(["--help"])
    assert ended.value.code == 0 and "make demo ARGS='--workers 4'" in capsys.readouterr().out


def test_train_digits_works_alone(data):
    status, out, err = run("--epochs", 1, "--data", data / "digits", script="train_digits.py")
    assert (status, err) == (0, ""), out + err
    assert out.splitlines()[-1].startswith("Same losses to the last bit") and "time per epoch" in out
    status, out, err = run("--epochs", 0, script="train_digits.py")
    assert status == 2 and "--epochs must be a positive integer, got 0" in err


# What must not pass


class Altered(torch.utils.data.DataLoader):
    """Stands in for a faulty rustloader.DataLoader: one element of the first batch is wrong."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number == 0:
                batch[0].view(-1)[0] += 1
            yield batch


def run_part(monkeypatch, data, loader_class, **parts):
    """Runs the given parts of the demo in this process, with this class as rustloader.DataLoader."""
    main = part("main")
    monkeypatch.setattr(main, "WORKLOADS", parts.get("workloads", []))
    monkeypatch.setattr(part("proof"), "PROMISES", parts.get("promises", []))
    monkeypatch.setattr(rustloader, "DataLoader", loader_class)
    return main.main([*SHORT, "--data", str(data), "--plot", str(data / "demo.png")])


@pytest.fixture
def torch_as_it_was():
    """Resets the mode of the whole process that train_digits.py sets."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("torch_as_it_was")
def test_other_losses_fail(monkeypatch, data, capsys):
    promises = part("proof").PROMISES
    altered = type("Altered", (Altered, rustloader.DataLoader), {})
    assert run_part(monkeypatch, data, altered, promises=promises) == 1
    out = capsys.readouterr().out
    assert "FAILED: the losses of the two runs are not bit-identical" in out and "DIFFERENT" in out
    assert "the Rust engine delivered only" not in out


@pytest.mark.usefixtures("torch_as_it_was")
def test_a_training_without_the_engine_fails(monkeypatch, data, capsys):
    promises = part("proof").PROMISES
    assert run_part(monkeypatch, data, torch.utils.data.DataLoader, promises=promises) == 1
    out = capsys.readouterr().out
    assert "FAILED: the Rust engine delivered only 0 of" in out and "bit-identical" not in out


def images():
    return [workload for workload in part("workloads").WORKLOADS if workload.name == "Cached images"]


def test_other_batches_fail(monkeypatch, data, capsys):
    altered = type("Altered", (Altered, rustloader.DataLoader), {})
    assert run_part(monkeypatch, data, altered, workloads=images()) == 1
    out = capsys.readouterr().out
    assert "FAILED: Cached images: batch 0 differs between torch and rustloader" in out
    assert "Picture" not in out


def test_measuring_without_the_engine_fails(monkeypatch, data, capsys):
    assert run_part(monkeypatch, data, torch.utils.data.DataLoader, workloads=images()) == 1
    assert "FAILED: Cached images: the Rust engine delivered only 0 of" in capsys.readouterr().out


def test_a_promise_that_is_broken_fails(monkeypatch, data, capsys):
    assert run_part(monkeypatch, data, rustloader.DataLoader, promises=[lambda settings: ["no worker came back"]]) == 1
    assert "FAILED: no worker came back" in capsys.readouterr().out


def test_without_matplotlib_the_picture_is_skipped(monkeypatch, data, capsys):
    original = importlib.util.find_spec

    def find_spec(name, *rest):
        return None if name == "matplotlib" else original(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert run_part(monkeypatch, data, rustloader.DataLoader, workloads=images()) == 0
    assert "No picture: matplotlib is not installed (pip install matplotlib)." in capsys.readouterr().out
    assert not (data / "demo.png").exists()


# Texts


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        (([40], [10, 12], [110]), "10x torch with workers, 2.8x without"),
        (([40], [100, 130], [110, 120]), "no measurable difference from torch with workers, 2.9x without"),
        (([115], [100, 130], [110, 120]), "no measurable difference from torch with workers or without"),
        (([110], [10], [100, 120]), "11x torch with workers; without: no measurable difference"),
        (([220], [10], [110]), "11x torch with workers; torch without workers is faster (2.0x rustloader)"),
        (([40], [100], [80]), "0.80x torch with workers (slower), 2.0x without"),
    ],
)
def test_a_row_names_no_winner_where_ranges_overlap(rates, words):
    assert part("text").row(result(*rates), 2)[0] == f"Rows (2 x 2): {words}"


def test_bars_are_as_long_as_the_rates():
    bars = [line.count("█") for line in part("text").row(result([50], [1000], [2000]), 2)[1:]]
    assert bars == [1, 12, 24]


def test_the_last_lines_name_the_largest_gain_and_what_gains_nothing():
    fast = result([40], [10], [110], name="Fast")
    same = result([11], [10, 12], [11], 0.97, name="Same")
    cheap = result([900], [10], [20], name="Cheap")
    kept = result([10], [10], [400], name="Kept", ours=lambda folder: None)
    lines = part("text").conclusion([same, fast, cheap, kept])
    assert lines[:5] == [
        "Largest gain: Fast, 11x torch with workers.",
        "With rustloader.cache: Kept, 40x torch with workers.",
        "No measurable difference: Same.",
        "  97 % of the workers' time is spent counting, which no loader speeds up.",
        "Fastest without workers (num_workers=0): Cheap.",
    ]
    assert "Smallest gain: Cheap, 2.0x." in part("text").conclusion([fast, cheap])
    noisy = [result([9], [10, 12], [11], name=name) for name in ("A", "B")]
    lines = part("text").conclusion([*noisy, same])
    assert lines[0] == "No measurable difference: Same."
    assert lines[2] == "No measurable difference: A, B (the ranges of the rounds overlap)."
    assert not any("gain:" in line for line in lines)


# The table and the picture


MACHINE = {"cpu": "a CPU", "cores": 2, "kernel": "6.1", "python": "3.11.7", "torch": "2.15.0", "rustloader": "0.1.0"}


def test_the_table_has_torch_without_workers_and_marks_the_fastest():
    results = [result([400], [100], [1234]), result([900], [10], [20]), result([12], [10, 12], [11.04])]
    kept = result([10], [11], [1500], name="Kept", ours=lambda folder: None)
    lines = part("text").table([kept, *results], part("settings").Settings(), MACHINE).splitlines()
    assert lines[0].startswith("| batches per second | torch, no workers | torch, 2 workers | rustloader, 2 workers |")
    assert lines[2:5] == [
        "| Rows (2 x 2) | 400 | 100 | **1,234** | 12x | 3.1x |",
        "| Rows (2 x 2) | **900** | 10.0 | 20.0 | 2.0x | 0.02x |",
        "| Rows (2 x 2) | 12.0 | 11.0 | 11.0 | no measurable difference | 0.92x |",
    ]
    assert "3 interleaved rounds of 1 s" in lines[6] and "2 cores of a CPU" in lines[6]
    assert "rustloader.cache" in lines[8] and "Kept (2 x 2): **1,500** batches per second" in lines[8]
    assert "11.0 with workers, 10.0 without" in lines[8] and len(lines) == 9


PICTURES = """
import itertools, sys
from pathlib import Path
from demo import measure, picture, settings, workloads
from matplotlib.text import Text

rows = ("main", "worker 0", "worker 1")
events = [
    {"ph": "M", "name": "thread_name", "tid": row, "args": {"name": f"{name} (train.py:1)"}}
    for row, name in enumerate(rows)
]
for k in range(40):
    spans = [(0, "next", 0, 5), (0, "step", 5, 5)]
    spans += [(row, name, 2 * at, 2) for row in (1, 2) for at, name in enumerate(("fetch", "collate", "send"))]
    events += [
        {"ph": "X", "tid": row, "name": name, "ts": 1e4 * k + 1e3 * at, "dur": 1e3 * taken}
        for row, name, at, taken in spans
    ]
timeline = measure.timeline_of(events)
assert tuple(timeline) == rows
assert timeline["main"][:2] == [("step", 0, 5.0), ("next", 5.0, 10.0)], timeline
assert timeline["main"][-1] == ("next", 185.0, 190.0)
assert [len(timeline[row]) for row in timeline] == [38, 57 + 1, 57 + 1], timeline
rates = [([40], [10, 12], [110]), ([9e5], [10], [20]), ([1], [123456], [99999, 123457]), ([12], [10, 12], [11])]
names = (measure.NO_WORKERS, measure.TORCH, measure.OURS)
results = [measure.Result(w, dict(zip(names, r)), 0.5) for w, r in zip(workloads.WORKLOADS, rates)]

figure = picture.draw(results, timeline, results[2].workload)
figure.draw_without_rendering()
ticks = {label for axes in figure.axes for label in axes.get_xticklabels()}  # some are beyond the axis, not drawn
texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible() and text not in ticks]
places = {text.get_text() + str(k): text.get_window_extent() for k, text in enumerate(texts)}
for (one, a), (other, b) in itertools.combinations(places.items(), 2):
    assert not a.overlaps(b), f"{one!r} and {other!r} overlap"
for text, place in places.items():
    assert 0 <= place.x0 < place.x1 <= figure.bbox.width, f"{text!r} is cut off"
print(*(text.get_text() for text in texts), sep="|")
for number in range(2):
    chosen = settings.Settings(plot=Path(f"{number}.svg"))
    picture.write(results, timeline, results[2].workload, chosen)
"""


def test_the_picture_can_be_read_and_the_same_figures_give_the_same_svg(tmp_path):
    # In a process of its own, because matplotlib keeps files open.
    environment = {**os.environ, "PYTHONPATH": str(START)}
    command = [sys.executable, "-c", PICTURES]
    process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=STARTED)
    assert process.returncode == 0, process.stderr
    texts = process.stdout.strip().split("|")
    assert {"10x torch with workers", "no measurable difference", "900,000", "torch, no workers"} <= set(texts)
    assert {"main: training step", "worker 1", "rustloader at work: cached images, a training step of 5 ms"} <= {*texts}
    one, other = ((tmp_path / f"{number}.svg").read_text() for number in range(2))
    assert one == other and one.count("<path") > 100
    assert sorted(os.listdir(tmp_path)) == ["0.svg", "1.svg"]
