"""The demo and train_digits.py in examples/start: what they print, write and prove, and how they fail."""

import importlib
import importlib.util
import os
import signal
import subprocess
import sys

import pytest
import snapshots
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
    """A folder with the image files, which are written once. Of the digits, every eighth is left."""
    folder = tmp_path_factory.mktemp("data")
    part("workloads").write_files(folder)
    part("proof").train_digits.write_images(folder / "digits")
    for number, path in enumerate(sorted(folder.glob("digits/*/*/*.png"))):
        if number % 8:
            path.unlink()
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


def test_train_digits_works_alone(data):
    status, out, err = run("--epochs", 1, "--data", data / "digits", script="train_digits.py")
    assert (status, err) == (0, ""), out + err
    assert out.splitlines()[-1].startswith("Same losses to the last bit") and "time per epoch" in out


def test_train_digits_needs_an_epoch(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_digits.py", "--epochs", "0"])
    with pytest.raises(SystemExit) as ended:
        part("proof").train_digits.main()
    assert ended.value.code == 2 and "--epochs must be a positive integer, got 0" in capsys.readouterr().err


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


FAULTS = {
    "other losses": "the losses of the two runs are not bit-identical",
    "a training without the engine": "the Rust engine delivered only 0 of",
    "other batches": "Cached images: batch 0 differs between torch and rustloader",
    "measuring without the engine": "Cached images: the Rust engine delivered only 0 of",
    "a broken promise": "no worker came back",
}


@pytest.mark.usefixtures("torch_as_it_was")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_the_demo(fault, monkeypatch, data, capsys):
    altered = type("Altered", (Altered, rustloader.DataLoader), {})
    loader_class = torch.utils.data.DataLoader if "without" in fault else altered
    trains = fault in ("other losses", "a training without the engine")
    parts = {"promises": part("proof").PROMISES} if trains else {"workloads": images()}
    if fault == "a broken promise":
        loader_class, parts = rustloader.DataLoader, {"promises": [lambda settings: [FAULTS[fault]]]}
    assert run_part(monkeypatch, data, loader_class, **parts) == 1
    out = capsys.readouterr().out
    assert f"FAILED: {FAULTS[fault]}" in out and "Picture" not in out
    assert ("not bit-identical" in out) == (fault == "other losses")
    assert ("the Rust engine delivered only" in out) == ("without the engine" in fault)


def images():
    return [workload for workload in part("workloads").WORKLOADS if workload.name == "Cached images"]


def test_without_matplotlib_the_picture_is_skipped(monkeypatch, data, capsys):
    original = importlib.util.find_spec

    def find_spec(name, *rest):
        return None if name == "matplotlib" else original(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert run_part(monkeypatch, data, rustloader.DataLoader, workloads=images()) == 0
    assert "No picture: matplotlib is not installed (pip install matplotlib)." in capsys.readouterr().out
    assert not (data / "demo.png").exists()


# Texts


def test_texts_of_the_demo():
    text = part("text")
    rates = [
        ([40], [10, 12], [110]),
        ([40], [100, 130], [110, 120]),
        ([115], [100, 130], [110, 120]),
        ([110], [10], [100, 120]),
        ([220], [10], [110]),
        ([40], [100], [80]),
    ]
    fast, cheap = result([40], [10], [110], name="Fast"), result([900], [10], [20], name="Cheap")
    same = result([11], [10, 12], [11], 0.97, name="Same")
    kept = result([10], [11], [1500], name="Kept", ours=lambda folder: None)
    noisy = [result([9], [10, 12], [11], name=name) for name in ("A", "B")]
    results = [kept, result([400], [100], [1234]), cheap, result([12], [10, 12], [11.04])]
    names = ("cpu", "kernel", "python", "torch", "rustloader")
    machine = dict(zip(names, ("a CPU", "6.1", "3.11.7", "2.15.0", "0.1.0"), strict=True), cores=2)
    lines = {
        "rows": [line for of_loaders in rates for line in text.row(result(*of_loaders), 2)],
        "conclusion": text.conclusion([same, fast, cheap, kept])[:5],
        "conclusion of gains": text.conclusion([fast, cheap])[:3],
        "conclusion of noise": text.conclusion([*noisy, same])[:3],
        "table": text.table(results, part("settings").Settings(), machine).splitlines(),
    }
    snapshots.check("demo", {title: "\n".join(of_title) for title, of_title in lines.items()})
