"""Pinning through torch's own functions, on a stand-in accelerator with a counting host allocator (tests/lib/backend).

A process cannot unregister a backend, so each test runs a script.
"""

import json
import os

import backend
import pytest
import torch
from support import run_script

# The first test compiles the backend, once per version of torch.
pytestmark = [pytest.mark.ours, pytest.mark.timeout(1500)]

HEAD = """
    import gc, json, warnings
    import backend
    from sample_data import Given, Images, Record
    from support import TorchDataLoader, outcome, outcomes, outcomes_of, same, threads_named, wait_until

    # Older versions of torch need the device; newer ones warn if it is given.
    warnings.simplefilter("ignore")

    def loader_of(dataset, cls=DataLoader, **kw):
        # Classes of the script cannot be pickled.
        options = {"num_workers": 2, "pin_memory": True, "multiprocessing_context": "fork"}
        return cls(dataset, pin_memory_device=backend.NAME, **options | kw)

    def told(outcomes):
        return [[kind, *map(str, rest)] for kind, *rest in outcomes]

    results = {}
"""


@pytest.fixture(scope="module")
def built():
    why_not = backend.build()
    if why_not is not None:
        if os.environ.get("RUSTLOADER_REQUIRE_ALL"):
            pytest.fail(why_not)
        pytest.skip(why_not)


def results_of(source):
    status, out, err = run_script(HEAD + source + "\n    print(json.dumps(results))\n")
    assert status == 0 and err == "", err
    return json.loads(out)


@pytest.fixture(scope="module")
def results(built):
    return results_of(
        """
    host = backend.register()
    results["accelerator"] = str(torch.accelerator.current_accelerator()), torch.accelerator.is_available()
    torch.accelerator.set_device_index(1)

    loader = loader_of(Images(24), batch_size=4, persistent_workers=True)
    iterator = iter(loader)
    results["thread"] = iterator._pin_memory_thread.is_alive(), wait_until(lambda: threads_named("rl_pin") == 1)
    batches = list(iterator)
    results["engine"] = iterator.engine_batches
    results["same"] = same(batches, list(TorchDataLoader(Images(24), batch_size=4)))
    results["pinned"] = [x.is_pinned() for batch in batches for x in batch]
    results["own"] = len({x.untyped_storage().data_ptr() for batch in batches for x in batch})
    results["allocator"] = host.host_thread().decode(), host.host_device()
    kept = batches[2][0]
    del batches, iterator
    results["kept"] = host.host_live(), kept.is_pinned()
    del kept
    for batch in loader:
        assert batch[0].is_pinned()
        del batch
    loader._iterator._shutdown_workers()
    results["live"] = host.host_live()
    results["reused"] = host.host_reused()

    pickled = [{"a": torch.ones(5000), "set": {1}}, Record("n", torch.ones(5000))]
    results["types"] = []
    for cls in (DataLoader, TorchDataLoader):
        (batch,) = loader_of(Given([pickled]), cls, batch_size=None, num_workers=1)
        results["types"].append([batch[0]["a"].is_pinned(), batch[1].data.is_pinned()])
    (batch,) = loader_of(Given([[torch.arange(3).expand(2, 3)]]), batch_size=None, num_workers=1)
    results["expanded"] = batch[0].is_pinned(), batch[0].tolist(), batch[0].stride()
    del batch

    class Sour:
        def pin_memory(self):
            raise ValueError("mine")

    samples = [torch.ones(5000), Sour(), torch.ones(2), {1}, [Sour()]]
    results["errors"], results["torchs errors"] = (
        told(outcomes_of(loader_of(Given(samples), cls, batch_size=None), 6)) for cls in (DataLoader, TorchDataLoader)
    )
    iterator = iter(loader_of(Given([torch.ones(5000)] * 4), batch_size=None, num_workers=1))
    assert wait_until(lambda: iterator._core.worker_status(0)["tasks_done"] == 2 and host.host_live() == 2)
    host.host_refuse(1)
    results["refused"] = [outcome(next, iterator)[0] for _ in range(4)]
    del iterator
    gc.collect()
    results["live at the end"] = host.host_live()
    """
    )


def test_torch_finds_the_accelerator(results):
    assert results["accelerator"] == [backend.NAME, True]


def test_the_thread_is_started_and_allocates_with_the_device_of_its_maker(results):
    assert results["thread"] == [True, True]
    assert results["allocator"] == ["rl_pin", 1]


def test_what_arrives_is_pinned_and_right(results):
    assert results["engine"] == 6 and results["same"]
    assert results["pinned"] == [True] * 12 and results["own"] == 12


def test_pinned_memory_goes_back_with_the_last_tensor_in_it(results):
    assert results["kept"] == [1, True]
    assert results["live"] == 0 and results["live at the end"] == 0
    assert results["reused"] > 0


def test_pickled_batches_are_pinned_by_torchs_function(results):
    assert results["types"] == [[True, False], [True, False]]


def test_expanded_tensors_are_pinned_too(results):
    """torch's `pin_memory` refuses them."""
    assert results["expanded"] == [True, [[0, 1, 2]] * 2, [0, 1]]


def test_errors_are_torchs(results):
    assert results["errors"] == results["torchs errors"]
    assert results["errors"][1][2] == "Caught ValueError in pin memory thread for device 1."
    assert results["refused"].count("error") == 1


def test_the_interpreter_exits_with_pinned_batches_and_live_iterators(built):
    results_of(
        """
    host = backend.register()
    loader = loader_of(Images(100, (3, 100, 100)), batch_size=4, persistent_workers=True)
    kept = [batch for batch, _ in zip(loader, range(3))]
    another = iter(loader_of(Images(100), batch_size=4))
    next(another)
    """
    )


def test_a_backend_in_python_alone_is_an_accelerator_without_pinned_memory():
    """Detection, device and thread are as with hardware; each batch that has a tensor is the allocator's error."""
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no backends in Python")
    results = results_of(
        """
    torch.utils.backend_registration._setup_privateuseone_for_python_backend("pyhost")
    results["accelerator"] = str(torch.accelerator.current_accelerator())
    for name, cls in {"ours": DataLoader, "torch": TorchDataLoader}.items():
        iterator = iter(loader_of(Given([torch.ones(5000), 1, [torch.ones(3)]]), cls, batch_size=None))
        results[name] = told(outcomes(iterator, 4))
        iterator._shutdown_workers()
    """
    )
    assert results["accelerator"] == "pyhost"
    assert results["ours"] == results["torch"]
    assert [kind for kind, *_ in results["ours"]] == ["error", "value", "error", "end"]
    assert results["ours"][0][2].endswith(" in pin memory thread for device 0.")
