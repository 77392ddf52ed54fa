"""`python -m rustloader bench`: what a cache gains and whether it fits, and images that are decoded too large."""

import json
import pickle
import sys
import types

import pytest
import torch
from bench_figures import a_pass, a_point
from support import rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.tools.bench import images, passes
    from rustloader.tools.bench.cached import CacheGain, Fit
    from rustloader.tools.bench.rates import SideRates
    from rustloader.tools.bench.side import BenchSide
    from rustloader.tools.probe.factory import Unusable

GB = 10**9


# The line


def gain(first, second, epochs=3, **fit):
    """A gain from these rates, for a dataset of 10 GB."""
    values = {"samples": 50_000, "sample_bytes": 200_000.0, "index_bytes": 4096, "limit": 12 * GB, "free": 81 * GB}
    values |= {"hits": 1.0, "is_random": False} | fit
    sides = [SideRates([a_pass(rate) for rate in [rate] * epochs]) for rate in (first, second)]
    return CacheGain(*sides, Fit(**values))


def test_what_a_cache_gains():
    without = a_point(2, (10.0,), (100.0,) * 3).rustloader
    text = gain(95.0, 1140.0).text(without)
    assert text == (
        "With rustloader.cache the second epoch reaches 2,280 batches/s, 11.4x the rate without a cache. The epoch "
        "that fills the cache takes 1.05x the time: the cache pays from epoch 2 on. All 50,000 samples take about "
        "10.0 GB and fit: 12.0 GB is allowed, 81.0 GB of memory was free."
    )
    # Measuring the gain leaves the other figures unchanged.
    assert not without.steady


@pytest.mark.parametrize(
    "first, second, others, words",
    [
        (30.0, 164.0, 0.0, "takes 3.33x the time: the cache pays from epoch 7 on."),
        (30.0, 90.0, 0.0, "takes 3.33x the time: the cache does not pay."),
        (30.0, 164.0, 0.5, "The gain from a cache is unknown, because other processes were busy. All 50,000 samples"),
    ],
)
def test_cost_of_filling(first, second, others, words):
    assert words in gain(first, second).text(a_point(2, (10.0,), (100.0,) * 3).rustloader, others)


@pytest.mark.parametrize("room", [{"limit": 5 * GB}, {"free": 5 * GB}])
def test_a_cache_of_half_of_the_samples(room):
    without = a_point(2, (10.0,), (100.0,) * 3).rustloader
    text = gain(100.0, 1000.0, **room).text(without)
    assert "All 50,000 samples take about 10.0 GB; 50% of them fit: " in text
    # Half of the epoch takes a tenth of its time.
    assert text.endswith("Epochs after the first would be about 1.82x as fast as without a cache.")


def test_a_cache_that_the_epoch_does_not_come_from():
    text = gain(100.0, 200.0, hits=0.4).text(a_point(2, (10.0,), (100.0,) * 3).rustloader)
    assert text.endswith("Only 40% of the second epoch's samples were in the cache.")


def test_a_random_dataset_is_named():
    text = gain(100.0, 200.0, is_random=True).text(a_point(2, (10.0,), (100.0,) * 3).rustloader)
    assert "But the dataset returns different samples for the same index" in text and text.endswith("as then=.")


def test_too_few_epochs_have_no_gain():
    text = gain(100.0, 1000.0, epochs=2).text(a_point(2, (10.0,), (100.0,) * 2).rustloader)
    assert (
        text.startswith("Too few to tell the gain from a cache: 2 epochs of each engine") and "x" not in text.split()[0]
    )
    assert "as fast" not in text and "fit: 12.0 GB is allowed" in text


def test_a_gain_as_json():
    parsed = json.loads(json.dumps(gain(100.0, 1000.0, free=None).as_dict()))
    assert parsed["second_epoch"]["batches_per_second"] == 1000.0 and parsed["fit"]["held"] == 1
    assert parsed["fit"]["bytes"] == 50_000 * 200_000 + 4096


# The measurement


LOADERS = """
import random
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Slow(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        return torch.full((1000,), index)

class Random(Slow):
    def __getitem__(self, index):
        return torch.tensor(random.random())

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(100))

def map_style():
    return DataLoader(Slow(), batch_size=4, shuffle=True, num_workers=2)
def persistent():
    return DataLoader(Slow(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
def changing():
    return DataLoader(Random(), batch_size=4, num_workers=1)
def stream():
    return DataLoader(Stream(), batch_size=4, num_workers=1)
"""


def side(factory, tmp_path, monkeypatch, memory=1 << 23):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "cached_loaders", raising=False)
    (tmp_path / "cached_loaders.py").write_text(LOADERS)
    bench_side = BenchSide("cached_loaders.py:" + factory, "cached", cache=memory)
    bench_side.send_note = lambda name, value: None
    bench_side.about()
    return bench_side


@pytest.mark.parametrize("factory", ["map_style", "persistent"])
@pytest.mark.parametrize("batches", [None, 20])
def test_a_second_pass_has_the_samples_of_the_first(factory, batches, tmp_path, monkeypatch):
    bench_side = side(factory, tmp_path, monkeypatch)
    try:
        for number in (1, 2):
            first, second, fit = bench_side.run_cached(number, passes.Limits(batches, 60.0))
            assert first["batches"] == second["batches"] == (batches or 100)
            assert fit.hits > 0.7 if batches else fit.hits == 1.0
            assert (fit.samples, fit.is_random) == (400, False)
            assert 8000 <= fit.sample_bytes <= 8100 and fit.held == 1 and fit.limit == 1 << 23
    finally:
        bench_side.close()


def test_a_cache_that_is_full_knows_its_share(tmp_path, monkeypatch):
    bench_side = side("map_style", tmp_path, monkeypatch, memory=400 * 8016 // 2)
    _, _, fit = bench_side.run_cached(1, passes.Limits(None, 60.0))
    assert 0.4 < fit.hits < 0.55 and 0.4 < fit.held < 0.55 and 8000 <= fit.sample_bytes <= 8100


def test_a_random_dataset_is_found_out(tmp_path, monkeypatch):
    bench_side = side("changing", tmp_path, monkeypatch)
    assert bench_side.run_cached(1, passes.Limits(None, 60.0))[2].is_random


@pytest.mark.parametrize(
    "factory, memory, words",
    [
        ("stream", 1 << 23, "--cache: cache() needs a map-style dataset"),
        ("map_style", 1 << 60, "bytes is too large"),
    ],
)
def test_what_cannot_be_cached_is_said(factory, memory, words, tmp_path, monkeypatch):
    with pytest.raises(Unusable, match=words.replace("(", r"\(").replace(")", r"\)")):
        side(factory, tmp_path, monkeypatch, memory)


# Images


def test_images_that_leave_much_smaller_than_they_are_decoded():
    asked = []

    def measure(of, wanted):
        asked.append((of, wanted))
        return 6.2

    sizes = [(4000, 3000), (3000, 4000), (4000, 3000)]
    assert images.advice(sizes, (224, 224), measure) == (
        "Images of 4000 x 3000 are decoded and reduced to 224 x 224: Pillow's `draft` or a scaled decode would be "
        "about 6x as fast."
    )
    assert asked == [((4000, 3000), (448, 448))]
    for decoded, kept in (([], (224, 224)), (sizes, None), ([(1000, 750)], (224, 224)), (sizes, (2000, 1500))):
        assert images.advice(decoded, kept, measure) == ""
    assert images.advice(sizes, (224, 224), lambda of, wanted: 1.2) == ""


@pytest.mark.parametrize(
    "batch, size",
    [
        (torch.zeros(2, 3, 20, 30), (30, 20)),
        ({"a": torch.zeros(2, 20, 30, 3), "b": torch.zeros(2, 3, 5, 5)}, (30, 20)),
        ((torch.zeros(2, 3), 1), None),
        ([torch.zeros(2, 7, 20, 30)], None),
    ],
)
def test_the_size_that_samples_keep(batch, size):
    assert images.kept_size(batch) == size


class Image:
    """Like Pillow's: decoded once, at the first load()."""

    def __init__(self, size):
        self.size, self.tile = size, ["tile"]

    def load(self):
        self.tile = []
        return "pixels"


def test_the_first_images_are_noted_and_then_nothing_is_replaced():
    class Jpeg(Image):
        pass

    noted = []
    images.note_sizes(Jpeg, noted.append)
    assert "load" in vars(Jpeg)
    one = Jpeg((1, 1))
    assert one.load() == one.load() == "pixels" and noted == [(1, 1)]
    for number in range(2, 30):
        assert Jpeg((number, 1)).load() == "pixels"
    assert [width for width, _ in noted] == [*range(1, 17)] and "load" not in vars(Jpeg)


def test_a_worker_without_pillow_notes_nothing(tmp_path, monkeypatch):
    called = []
    noted = images.SizeRecorder(str(tmp_path / "sizes"), called.append)
    monkeypatch.delitem(sys.modules, "PIL.Image", raising=False)
    noted(3)
    noted.read()
    assert called == [3] and noted.sizes == []
    plugin = types.SimpleNamespace(JpegImageFile=type("JpegImageFile", (Image,), {}))
    for name, module in (("PIL.Image", None), ("PIL", types.SimpleNamespace(JpegImagePlugin=plugin))):
        monkeypatch.setitem(sys.modules, name, module)
    noted(3)
    plugin.JpegImageFile((40, 30)).load()
    noted.read()
    (tmp_path / "sizes").unlink()
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    plugin.JpegImageFile((40, 30)).load()  # of a persistent worker, after the first pass
    assert noted.sizes == [(40, 30)] and pickle.loads(pickle.dumps(images.SizeRecorder("a", None)))._path == "a"


PHOTOGRAPHS = """
import numpy, torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

class Photographs(Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, index):
        with Image.open("large.jpg") as image:
            small = image.convert("RGB").resize((32, 32))
        return torch.from_numpy(numpy.array(small)).permute(2, 0, 1)

def loader():
    return DataLoader(Photographs(), batch_size=2, num_workers=1, multiprocessing_context="METHOD")
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_warm_up_notes_images(method, tmp_path, monkeypatch):
    pil = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(images, "draft_gain", lambda of, wanted: 3.0)
    pil.new("RGB", (600, 400)).save("large.jpg")
    (tmp_path / f"photographs_{method}.py").write_text(PHOTOGRAPHS.replace("METHOD", method))
    monkeypatch.syspath_prepend(str(tmp_path))
    bench_side = BenchSide(f"photographs_{method}:loader", "rustloader")
    bench_side.send_note = lambda name, value: None
    bench_side.about()
    for number, weigh in ((0, True), (1, False)):
        bench_side.run(number, passes.Limits(None, 60.0), weigh)
    monkeypatch.setattr(rustloader.Stats, "verdict", lambda self: rustloader.Verdict("dataset", "It limits.", "..."))
    verdict = bench_side.verdict()
    assert verdict["images"].startswith("Images of 600 x 400 are decoded and reduced to 32 x 32: ")
    assert bench_side.loader.worker_init_fn is None
    assert verdict["judged"].step_seconds == 0.0 < verdict["stats"]["step_seconds"]


def test_a_scaled_decode_is_measured_with_pillow():
    pytest.importorskip("PIL.Image")
    assert images.draft_gain((800, 600), (100, 75)) > 0
