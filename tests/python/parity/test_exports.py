"""The package has all names of torch.utils.data, bound to torch's own objects except for the loader."""

import ast
import importlib
import inspect
import re

import pytest
import torch.utils.data
from support import run_script, rustloader

pytestmark = pytest.mark.ours

PUBLIC = [name for name in torch.utils.data.__all__ if not name.startswith("_")]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name):
    actual, original = getattr(rustloader, name), getattr(torch.utils.data, name)
    if name == "DataLoader":
        assert issubclass(actual, original) and actual is not original
    else:
        assert actual is original


MODULES = ["_utils", "datapipes", "dataset", "distributed", "graph", "graph_settings", "sampler"]


@pytest.mark.parametrize("name", MODULES)
def test_torchs_modules_are_reached_through_the_package(name):
    assert getattr(rustloader, name) is importlib.import_module(f"torch.utils.data.{name}")


def test_the_module_of_the_loader_has_what_torchs_has():
    original = torch.utils.data.dataloader
    module = importlib.import_module("rustloader.dataloader")
    assert rustloader.dataloader is module and module is not original
    assert module.DataLoader is rustloader.DataLoader
    for name in ("default_collate", "get_worker_info", "_DatasetKind", "_SingleProcessDataLoaderIter", "_utils"):
        assert getattr(module, name) is getattr(original, name)
    with pytest.raises(AttributeError, match=r"rustloader\.dataloader.*no_such_name"):
        _ = module.no_such_name


def test_the_module_of_the_loader_is_reached_before_anything_else_is():
    status, out, err = run_script("""
        import subprocess, sys
        code = "import rustloader as data; print(data.dataloader.default_collate([1, 2]).tolist())"
        print(subprocess.check_output([sys.executable, "-c", code], text=True), end="")
    """)
    assert (status, out) == (0, "[1, 2]\n"), err


def test_type_checkers_see_every_name():
    tree = ast.parse(inspect.getsource(rustloader))
    listed = {name.asname for it in ast.walk(tree) if isinstance(it, ast.ImportFrom) for name in it.names} - {None}
    assert listed == {*torch.utils.data.__all__, *rustloader.__all__, *MODULES, "dataloader", "__version__"}


def test_an_unknown_name_is_an_error():
    with pytest.raises(AttributeError, match=r"rustloader.*no_such_name"):
        _ = rustloader.no_such_name
    with pytest.raises(ImportError):
        from rustloader import no_such_name  # noqa: F401


def test_names_can_be_imported_and_are_looked_up_late():
    status, out, err = run_script("""
        import rustloader
        late = [n for n in torch.utils.data.__all__ if n not in vars(rustloader) and not n.startswith("_")]
        from rustloader import DataLoader, Dataset, TensorDataset, random_split
        import torch.utils.data as theirs
        assert Dataset is theirs.Dataset and random_split is theirs.random_split
        namespace = {}
        exec("from rustloader import *", namespace)
        assert namespace["DataLoader"] is rustloader.DataLoader
        print(len(late) > 10)
    """)
    assert (status, out) == (0, "True\n"), err


def test_version():
    assert re.match(r"\d+\.\d+\.\d+", rustloader.__version__)


OWN_NAMES = (
    "ArenaStats CacheEstimate CacheUsage CachedDataset CopyStats CoreUsers DataLoader DeviceLoader "
    "ErrorLimitExceeded Failure Fallback FaultStats LargeAttribute LoaderTimeoutError MetricsServer Options "
    "PackingBatchSampler PinningStats RankReport RankStats SchedulingStats SlowBatch StatefulDataLoader Stats "
    "TokenBudgetBatchSampler TransferStats Verdict VerdictKind WorkerDiedError WorkerStalledError WorkerStats cache "
    "engine_batches install installed is_installed pack prefetch_to_device report report_ranks sample_seed "
    "serve_metrics share stats trace uninstall"
).split()


def test_all_is_torchs_names_and_ours():
    assert rustloader.__all__ == sorted({*torch.utils.data.__all__, *OWN_NAMES})
    # Only the loader shares its name with one of torch's.
    assert set(OWN_NAMES) & set(torch.utils.data.__all__) == {"DataLoader"}


def test_dir_shows_what_all_has_and_nothing_else():
    shown = dir(rustloader)
    assert [name for name in shown if not name.startswith("__")] == rustloader.__all__
    assert {"__version__", "__doc__", "__file__", "__all__"} <= set(shown)


def test_dir_of_a_package_that_nothing_has_used_yet():
    status, out, err = run_script(
        """
        import sys, rustloader
        assert "torch" not in sys.modules
        names = dir(rustloader)
        print("os" in names, "sys" in names, "Any" in names, "annotations" in names, "Dataset" in names)
        """,
        head="",
    )
    assert (status, out) == (0, "False False False False True\n"), err
