"""The programs in examples/frameworks/: on the engine they print the same losses as on torch's loader, to the last bit,
and the engine delivers every batch. The workers' random numbers are part of the losses."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(1200)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RUN = ("-m", "rustloader", "run")

FROM_ENGINE = re.compile(r"process (\d+): (\d+) batches from the engine")
LOSS = re.compile(r"\d\.\d{6}")


def outcome(*command):
    """A program's output, split into (losses, [batches of each process])."""
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    # With several processes, the last line of one may come in the middle of another's line.
    lines = FROM_ENGINE.sub("", result.stdout).splitlines()
    counts = sorted((int(rank), int(count)) for rank, count in FROM_ENGINE.findall(result.stdout))
    return [line for line in lines if LOSS.search(line)], [count for _, count in counts]


@functools.cache
def on_torch(name, launcher, arguments):
    losses, counts = outcome(*launcher, str(EXAMPLES / f"{name}.py"), "--no-install", *arguments)
    assert len(losses) >= 2 and set(counts) == {0}
    return losses, counts


def compare(name, way, arguments=(), launcher=(), batches=(), folder=None):
    """Compares the example, switched in one of the ways, with itself on torch's loader."""
    script = EXAMPLES / f"{name}.py"
    if way == "install":
        command = [*launcher, str(script), *arguments]
    elif way == "run":
        # A launcher is given `-m rustloader run`, as in docs/switching.md.
        command = [*launcher, *RUN, str(script), "--no-install", *arguments]
    else:
        command = [*launcher, str(with_our_import(script, folder)), "--no-install", *arguments]
    losses, counts = outcome(*command)
    assert losses == on_torch(name, launcher, tuple(arguments))[0]
    assert counts == list(batches)


def with_our_import(script, folder):
    """A copy of an example that imports from rustloader what it imported from torch.utils.data."""
    text, changes = re.subn(r"(?m)^from torch\.utils\.data import", "from rustloader import", script.read_text())
    assert changes == 1
    for name, content in {script.name: text, "small_data.py": (EXAMPLES / "small_data.py").read_text()}.items():
        (folder / name).write_text(content)
    return folder / script.name


ways = pytest.mark.parametrize("way", ["install", "run"])
ways_and_import = pytest.mark.parametrize("way", ["install", "run", "import"])


# 2 epochs of 16 batches, each with 4 to validate; 2 before each of the two fits; 4 at the end.
@ways_and_import
def test_lightning_fits_validates_and_resumes_with_persistent_workers(way, tmp_path):
    compare("lightning_fit", way, batches=[48], folder=tmp_path)


@ways_and_import
def test_lightning_with_ddp_that_starts_its_processes_itself(way, tmp_path):
    compare("lightning_fit", way, ("--devices", "2"), batches=[26, 26], folder=tmp_path)


@ways
def test_lightning_with_ddp_under_torchrun(way):
    compare("lightning_fit", way, ("--devices", "2"), TORCHRUN, batches=[26, 26])


@ways
def test_accelerate_prepares_a_loader_and_skips_first_batches(way):
    compare("accelerate_train", way, batches=[24])


@ways
def test_accelerate_in_two_processes(way):
    compare("accelerate_train", way, launcher=TORCHRUN, batches=[12, 12])


@ways
def test_accelerates_own_launcher(way):
    launcher = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
    compare("accelerate_train", way, launcher=launcher, batches=[24])


# 32 steps, and 2 x 4 batches to evaluate; after the resume, 8 of the steps and 4 to evaluate.
@ways
def test_transformers_trainer_trains_and_resumes_in_the_middle_of_an_epoch(way):
    compare("transformers_trainer", way, batches=[52])


@ways_and_import
def test_torchvision_image_files_transforms_and_mixup(way, tmp_path):
    compare("own_loop", way, ("torchvision",), batches=[24], folder=tmp_path)


@ways
@pytest.mark.parametrize("options", [(), ("--prefetcher",), ("--multi-epochs",), ("--prefetcher", "--multi-epochs")])
def test_timm_create_loader(way, options):
    compare("own_loop", way, ("timm", *options), batches=[16])


@ways_and_import
def test_datasets_by_index_and_as_a_stream(way, tmp_path):
    compare("own_loop", way, ("datasets",), batches=[64], folder=tmp_path)


@ways
def test_fastai_learner_on_image_files(way):
    compare("fastai_learner", way, batches=[16])


@ways_and_import
def test_torchrun_with_ddp(way, tmp_path):
    compare("torchrun_ddp", way, launcher=TORCHRUN, batches=[16, 16], folder=tmp_path)


@ways
def test_pytorch_geometric_batches_of_graphs(way):
    compare("own_loop", way, ("torch-geometric",), batches=[16])


@ways
def test_webdataset_shards_through_its_loader(way):
    compare("own_loop", way, ("webdataset",), batches=[32])


@ways
def test_ultralytics_infinite_loader(way):
    compare("own_loop", way, ("ultralytics",), batches=[8])


@ways
def test_ignite_trainer_with_loaders_built_anew(way):
    compare("ignite_engine", way, batches=[40])


# 2 x 4 batches of torch's loader. The engine serves none of torchdata's loader, whose lines name its own class.
@ways_and_import
def test_torchdata_stateful_loader_stays_its_own(way, tmp_path):
    compare("own_loop", way, ("torchdata",), batches=[8], folder=tmp_path)
