"""`doctor` on pinned memory: the settings of torch's host allocator."""

import importlib.metadata

import pytest
from support import rustloader

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.tools.cli import host_allocator

THREADS = "pinned_num_register_threads:8"


def test_without_settings_the_defaults_are_named():
    assert host_allocator.allocator({})[0].startswith("torch's defaults: sizes are rounded up to a power of")


def test_a_variable_that_torch_does_not_read(monkeypatch):
    general = {"PYTORCH_ALLOC_CONF": THREADS}
    monkeypatch.setattr(host_allocator, "_torch_version", lambda: (2, 6))
    found, advice = host_allocator.allocator(general)
    assert found.startswith("torch's defaults")
    ignored = "torch ignores pinned_num_register_threads in PYTORCH_ALLOC_CONF: set it in PYTORCH_CUDA_ALLOC_CONF"
    assert advice == ignored
    monkeypatch.undo()

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    # Without torch the rules are those of the latest.
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert host_allocator.allocator(general)[1] == ""


def test_settings_are_named_with_their_variable_and_what_they_do():
    text = "expandable_segments:True, pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    found, advice = host_allocator.allocator({"PYTORCH_CUDA_ALLOC_CONF": text})
    assert found.startswith("PYTORCH_CUDA_ALLOC_CONF has pinned_use_cuda_host_register:True (new memory is mapped")
    assert "pinned_num_register_threads:8 (number of threads that register" in found and "expandable" not in found
    assert advice == ""


def test_each_setting_is_read_from_the_variable_that_torch_reads(monkeypatch):
    monkeypatch.setattr(host_allocator, "_torch_version", lambda: (2, 15))
    text = "pinned_free_catch_all:True,pinned_max_cached_size_mb:{}"
    both = {"PYTORCH_ALLOC_CONF": text.format(8), "PYTORCH_CUDA_ALLOC_CONF": text.format(16)}
    assert host_allocator.pinned_settings(both) == {"pinned_free_catch_all": "True", "pinned_max_cached_size_mb": "8"}
    found, advice = host_allocator.allocator(both)
    general, cuda = found.split("; ")
    assert general.startswith("PYTORCH_ALLOC_CONF has pinned_max_cached_size_mb:8 (")
    assert cuda == (
        "PYTORCH_CUDA_ALLOC_CONF has pinned_free_catch_all:True (errors from freeing pinned memory are suppressed)"
    )
    assert advice == (
        "torch ignores pinned_free_catch_all in PYTORCH_ALLOC_CONF: set it in PYTORCH_CUDA_ALLOC_CONF; "
        "torch ignores pinned_max_cached_size_mb in PYTORCH_CUDA_ALLOC_CONF: set it in PYTORCH_ALLOC_CONF"
    )
    # A variable that is set alone may have both.
    for name, value in both.items():
        assert host_allocator.allocator({name: value})[1] == ""


@pytest.mark.parametrize("version, unsafe", [((2, 14), True), ((2, 15), False)])
def test_an_unsafe_pair_of_settings_is_told(monkeypatch, version, unsafe):
    monkeypatch.setattr(host_allocator, "_torch_version", lambda: version)
    _, advice = host_allocator.allocator({"PYTORCH_CUDA_ALLOC_CONF": "pinned_max_round_threshold_mb:8"})
    assert ("set pinned_max_cached_size_mb:8 too" in advice) == unsafe
    settings = "pinned_max_round_threshold_mb:8,pinned_max_cached_size_mb:8"
    assert host_allocator.allocator({"PYTORCH_CUDA_ALLOC_CONF": settings})[1] == ""
