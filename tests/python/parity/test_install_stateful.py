"""`rustloader.install(stateful=True)`: rustloader's StatefulDataLoader in torchdata's place, and back again."""

import importlib

import pytest
import torchdata.stateful_dataloader
from support import ROOT, run_script, rustloader
from torch.utils.data import dataloader as torch_dataloader
from torchdata.stateful_dataloader import stateful_dataloader as home

pytestmark = pytest.mark.ours

# In a dict: install() would rebind a name of this module.
ORIGINAL = {"loader": home.StatefulDataLoader}
PACKAGE = "torchdata.stateful_dataloader"


def our_class():
    return importlib.import_module("rustloader.stateful_dataloader").StatefulDataLoader


def current_classes():
    return torchdata.stateful_dataloader.StatefulDataLoader, home.StatefulDataLoader


@pytest.fixture(autouse=True)
def as_before():
    yield
    rustloader.uninstall()
    assert current_classes() == (ORIGINAL["loader"], ORIGINAL["loader"])


def test_without_the_option_torchdata_stays_as_it_is():
    with rustloader.installed():
        assert current_classes() == (ORIGINAL["loader"], ORIGINAL["loader"])


def test_the_package_and_its_module_have_ours_until_uninstall():
    rustloader.install(stateful=True)
    assert current_classes() == (our_class(), our_class()) and our_class() is not ORIGINAL["loader"]
    assert torchdata.stateful_dataloader.Stateful is home.Stateful
    rustloader.install(prefetch_factor=4)
    assert current_classes() == (our_class(), our_class())
    rustloader.uninstall()
    assert current_classes() == (ORIGINAL["loader"], ORIGINAL["loader"])


def test_false_takes_it_out_and_none_leaves_it():
    rustloader.install(stateful=True)
    rustloader.install(stateful=None)
    assert current_classes() == (our_class(), our_class())
    rustloader.install(stateful=False)
    assert current_classes() == (ORIGINAL["loader"], ORIGINAL["loader"])
    assert rustloader.is_installed()


def test_a_context_restores_what_it_found():
    rustloader.install()
    with rustloader.installed(stateful=True):
        assert current_classes() == (our_class(), our_class())
        with rustloader.installed(stateful=False):
            assert current_classes() == (ORIGINAL["loader"], ORIGINAL["loader"])
        assert current_classes() == (our_class(), our_class())
    assert current_classes() == (ORIGINAL["loader"], ORIGINAL["loader"])
    assert rustloader.is_installed() and rustloader.settings.options.current() == {}


@pytest.mark.parametrize("before", [{}, {"prefetch_factor": 3}])
def test_a_class_of_the_programs_own_in_torchdatas_place_is_an_error(monkeypatch, before):
    class Other(ORIGINAL["loader"]):
        pass

    if before:
        rustloader.install(**before)
    monkeypatch.setattr(torchdata.stateful_dataloader, "StatefulDataLoader", Other)
    with pytest.raises(
        RuntimeError, match=r"^torchdata\.stateful_dataloader\.StatefulDataLoader was replaced by .*Othe"
    ):
        rustloader.install(stateful=True, in_order=False)
    assert current_classes() == (Other, ORIGINAL["loader"])
    monkeypatch.undo()
    assert rustloader.settings.options.current() == before
    assert rustloader.is_installed() is bool(before)
    assert (torch_dataloader._MultiProcessingDataLoaderIter is rustloader.iterator.core.TorchIter) is not bool(before)


# A process without torchdata, or with one that lacks the package.
MISSING = """
    import sys, types

    class Hide:
        def find_spec(self, name, path, target=None):
            if name.partition(".")[0] == "torchdata":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Hide())
"""
OLD = """
    import sys, types
    sys.modules["torchdata"] = types.ModuleType("torchdata")
    sys.modules["torchdata"].__path__ = []
"""


@pytest.mark.parametrize("torchdata", [MISSING, OLD], ids=["missing", "old"])
def test_without_torchdata_install_raises_import_error_and_installs_nothing(torchdata):
    status, out, err = run_script(
        torchdata
        + """
    import rustloader
    for call in (lambda: rustloader.install(stateful=True), rustloader.installed(stateful=True).__enter__):
        try:
            call()
        except ImportError as error:
            print(error)
    assert not rustloader.is_installed() and rustloader.settings.options.current() == {}
    rustloader.uninstall()
    """,
        head="",
        fresh=False,
    )
    assert status == 0, err
    line = (
        f"stateful=True replaces a class of {PACKAGE}, which is not installed: run `pip install -U torchdata`, or omit "
        "stateful=True and import StatefulDataLoader from rustloader"
    )
    assert out.splitlines() == [line] * 2


def test_without_torchdata_the_environment_has_no_effect_and_samplers_name_torchs():
    status, out, err = run_script(
        MISSING
        + """
    import os
    os.environ["RUSTLOADER_INSTALL"] = "stateful=1"
    import rustloader
    import torch
    assert not rustloader.is_installed()
    rustloader.StatefulDataLoader(range(4))
    try:
        import rustloader.stateful_dataloader.sampler
    except ImportError as error:
        print(error)
    """,
        head="",
    )
    assert status == 0, err
    assert err.startswith("RUSTLOADER_INSTALL has no effect: stateful=True replaces a class of torchdata.")
    assert out == (
        "rustloader.stateful_dataloader.sampler has torchdata's samplers, and no torchdata that has them is installed: "
        "run `pip install -U torchdata`, or use the RandomSampler, BatchSampler and DistributedSampler of "
        "torch.utils.data, which a StatefulDataLoader resumes\n"
    )


@pytest.mark.parametrize("at", ["torchdata", "torchdata.stateful_dataloader"])
def test_a_torchdata_that_cannot_be_imported_is_an_error_and_installs_nothing(at, tmp_path):
    folder = tmp_path / at.replace(".", "/")
    folder.mkdir(parents=True)
    (tmp_path / "torchdata" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("import no_such_module")
    status, out, err = run_script(
        f"""
    import sys
    sys.path.insert(0, {str(tmp_path)!r})
    import rustloader
    try:
        rustloader.install(stateful=True)
    except RuntimeError as error:
        print(error)
    assert not rustloader.is_installed() and rustloader.settings.options.current() == {{}}
    """,
        head="",
        fresh=False,
    )
    assert status == 0, err
    assert out == (
        f"{PACKAGE} cannot be imported (No module named 'no_such_module'); repair or uninstall torchdata, "
        "or omit stateful=True\n"
    )


@pytest.mark.parametrize("how", ["environment", "run"])
def test_the_environment_and_run_install_it(how, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        ("import rustloader\n" if how == "environment" else "") + "import torch\n"
        "from torchdata.stateful_dataloader import StatefulDataLoader\n"
        "print(StatefulDataLoader.__module__)\n"
    )
    status, out, err = run_script(
        f"""
    import os, subprocess, sys
    command = ["-m", "rustloader", "run", "--stateful"] if {how!r} == "run" else []
    more = {{}} if {how!r} == "run" else {{"RUSTLOADER_INSTALL": "stateful=1"}}
    subprocess.run([sys.executable, *command, {str(script)!r}], check=True, env=os.environ | more)
    """,
        head="",
        cwd=ROOT,
    )
    assert (status, err) == (0, "")
    assert out == f"{our_class().__module__}\n"


@pytest.mark.parametrize(
    "first",
    [
        "from torchdata.stateful_dataloader import StatefulDataLoader",
        "from rustloader import DataLoader, StatefulDataLoader, cache, sample_seed",
        "from rustloader import serve_metrics",
        "from rustloader.stateful_dataloader import StatefulDataLoader",
    ],
    ids=["torchdata", "names", "metrics", "package"],
)
def test_torch_may_be_imported_by_another_package_first(first, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"{first}\n"
        "import rustloader\n"
        "from torchdata.stateful_dataloader import StatefulDataLoader\n"
        "print(StatefulDataLoader.__module__, rustloader.is_installed())\n"
    )
    source = f"""
    import subprocess, sys
    subprocess.run([sys.executable, "-m", "rustloader", "run", "--stateful", {str(script)!r}], check=True)
    """
    status, out, err = run_script(source, head="", cwd=ROOT)
    assert (status, out, err) == (0, f"{our_class().__module__} True\n", "")


def test_import_of_the_package_and_install_without_the_option_do_not_import_it():
    status, out, err = run_script(
        """
    import sys
    import rustloader
    rustloader.install()
    rustloader.uninstall()
    print([name for name in sys.modules if "torchdata" in name or name.startswith("rustloader.stateful_dataloader")])
    """,
        head="",
        fresh=False,  # the parent imports the package
    )
    assert (status, out, err) == (0, "[]\n", "")
