"""`rustloader.install()`: torch's loaders on the engine, whatever code builds them, and back again (T10, T15)."""

import collections.abc
import contextlib
import logging
import multiprocessing
import sys
import types

import pytest
import torch
from sample_data import Numbers
from support import (
    LoaderIter,
    TorchDataLoader,
    finish,
    from_engine,
    run_script,
    rustloader,
    start_script,
    values,
    worker_pids,
)
from torch.utils.data import dataloader as torch_dataloader

from rustloader.installation import api as installation
from rustloader.installation.environment import parse_install
from rustloader.settings import options

pytestmark = pytest.mark.ours

# In a dict: install() would rebind a name of this module.
ORIGINAL = {"iterator": torch_dataloader._MultiProcessingDataLoaderIter}

METHOD = multiprocessing.get_all_start_methods()[0]
# Seconds that suffice for a script that imports torch in several processes, even on a busy machine.
LONG = 400.0


@pytest.fixture(autouse=True)
def as_before():
    yield
    rustloader.uninstall()
    assert torch_dataloader._MultiProcessingDataLoaderIter is ORIGINAL["iterator"]


@pytest.fixture
def module(request):
    """A loaded module, whose names a test may set."""
    module = types.ModuleType("a_users_module")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def torch_loader(n=6, **kw):
    kw = {"num_workers": 2, "batch_size": None} | kw
    return TorchDataLoader(Numbers(n), **kw)


@contextlib.contextmanager
def iterating(loader):
    iterator = iter(loader)
    try:
        yield iterator
    finally:
        iterator._shutdown_workers()


def lines(caplog, level):
    return [r.getMessage() for r in caplog.records if r.name == "rustloader" and r.levelno == level]


def test_torchs_loaders_use_the_engine_while_it_is_installed():
    loader = torch_loader()
    with from_engine(0):
        assert values(loader) == list(range(6))
    rustloader.install()
    with from_engine(6):
        assert values(loader) == list(range(6))
    rustloader.uninstall()
    with from_engine(0):
        assert values(loader) == list(range(6))


def test_an_iterator_at_work_goes_on_after_install_and_after_uninstall():
    with iterating(torch_loader()) as torch_iterator:
        next(torch_iterator)
        rustloader.install()
        with iterating(torch_loader()) as our_iterator:
            next(our_iterator)
            rustloader.uninstall()
            assert values(torch_iterator) == values(our_iterator) == [1, 2, 3, 4, 5]
            assert our_iterator.engine_batches == 6


def test_isinstance_is_true_for_both_engines_iterators():
    TorchIter = ORIGINAL["iterator"]
    with iterating(torch_loader()) as before:
        assert isinstance(before, TorchIter) and not isinstance(before, LoaderIter)
        assert not issubclass(type(before), LoaderIter)
        rustloader.install()
        assert torch_dataloader._MultiProcessingDataLoaderIter is LoaderIter
        with iterating(torch_loader()) as after:
            for iterator in (before, after):
                assert isinstance(iterator, TorchIter) and isinstance(iterator, LoaderIter)
                assert issubclass(type(iterator), TorchIter) and issubclass(type(iterator), LoaderIter)
        assert not isinstance(iter(TorchDataLoader(Numbers(1))), LoaderIter)

        class Derived(LoaderIter):
            pass

        assert not isinstance(before, Derived) and not issubclass(type(before), Derived)
        rustloader.uninstall()
        assert isinstance(after, TorchIter) and not isinstance(before, LoaderIter)


def test_a_persistent_iterator_from_before_serves_its_loader_to_the_end():
    loader = torch_loader(persistent_workers=True)
    assert values(loader) == list(range(6))
    with rustloader.installed(), from_engine(0):
        assert values(loader) == list(range(6))
        loader._iterator._shutdown_workers()
        loader._iterator = None


def test_names_and_tuples_of_loaded_modules_are_rebound_and_restored(module):
    TorchIter = ORIGINAL["iterator"]
    Pair = collections.namedtuple("Pair", "one two")
    before = {
        "name": TorchIter,
        "_loaders": (TorchIter, torch_dataloader._SingleProcessDataLoaderIter),
        "named": Pair(TorchIter, 1),
        "other": (1, 2),
        "meant": LoaderIter,
        "both": (LoaderIter, 3),
    }
    vars(module).update(before)
    rustloader.install()
    assert module.name is LoaderIter
    assert module._loaders == (LoaderIter, torch_dataloader._SingleProcessDataLoaderIter)
    assert {name: vars(module)[name] for name in ("named", "other", "meant", "both")} == {
        name: before[name] for name in ("named", "other", "meant", "both")
    }
    module.late, module.late_tuple = LoaderIter, (LoaderIter, 5)  # imported from torch's module while installed
    rustloader.uninstall()
    assert all(vars(module)[name] is value for name, value in before.items())
    assert module.late is TorchIter and module.late_tuple == (TorchIter, 5)


def test_t4_a_fake_loader_given_to_a_rebound_class_is_served(module):
    """As in fastai: a tuple of classes, and an object with the attributes that torch 2.13's iterator reads."""
    module._loaders = (ORIGINAL["iterator"], torch_dataloader._SingleProcessDataLoaderIter)
    names = (
        "_IterableDataset_len_called _auto_collation _dataset_kind _index_sampler collate_fn dataset drop_last "
        "generator in_order multiprocessing_context num_workers persistent_workers pin_memory pin_memory_device "
        "prefetch_factor timeout worker_init_fn"
    ).split()
    real = torch_loader()
    fake = types.SimpleNamespace(**{name: getattr(real, name) for name in names})
    fake.multiprocessing_context = multiprocessing
    with rustloader.installed(persistent_workers=True, prefetch_factor=3), from_engine(6):
        iterator = module._loaders[fake.num_workers == 0](fake)
        assert iterator._prefetch_factor == 3
        # This iterator would never be reused.
        assert not iterator._persistent_workers
        assert values(iterator) == list(range(6))


def test_lazy_modules_are_not_loaded(module):
    class Late(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"{name} was looked up")

    late = Late("a_late_module")
    object.__getattribute__(late, "__dict__")["name"] = ORIGINAL["iterator"]
    sys.modules["a_late_module"] = late
    sys.modules["no_module_at_all"] = None
    try:
        rustloader.install()
        assert object.__getattribute__(late, "__dict__")["name"] is LoaderIter
    finally:
        del sys.modules["a_late_module"], sys.modules["no_module_at_all"]


@pytest.mark.warns
def test_t15_a_class_from_before_install_stays_on_torch(module, caplog):
    exec(
        "from torch.utils.data import dataloader\n"
        "from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter\n"
        "class Mine(_MultiProcessingDataLoaderIter):\n"
        "    def __init__(self, loader):\n"
        "        super(Mine, self).__init__(loader)\n"
        "class ByName(_MultiProcessingDataLoaderIter):\n"
        "    def __init__(self, loader):\n"
        "        _MultiProcessingDataLoaderIter.__init__(self, loader)\n"
        "class Dotted(_MultiProcessingDataLoaderIter):\n"
        "    def __init__(self, loader):\n"
        "        dataloader._MultiProcessingDataLoaderIter.__init__(self, loader)\n",
        vars(module),
    )
    rustloader.install()
    assert module._MultiProcessingDataLoaderIter is ORIGINAL["iterator"], (
        "the name by which its class calls the base was rebound"
    )
    for cls in (module.Mine, module.ByName, module.Dotted):
        messages = [
            line for line in lines(caplog, logging.WARNING) if f"a_users_module.{cls.__name__} was derived" in line
        ]
        assert len(messages) == 1 and "before the class is defined" in messages[0]
        with from_engine(0):
            iterator = cls(torch_loader())
            assert isinstance(iterator, LoaderIter)
            assert values(iterator) == list(range(6))
    rustloader.uninstall()


def test_a_class_with_ours_and_an_abstract_base_can_be_defined():
    with rustloader.installed():

        class Both(torch_dataloader._MultiProcessingDataLoaderIter, collections.abc.Iterator):
            pass

        with from_engine(6):
            assert values(Both(torch_loader())) == list(range(6))


def test_a_class_of_the_programs_own_in_torchs_place_is_an_error(monkeypatch):
    class Other(ORIGINAL["iterator"]):
        pass

    monkeypatch.setattr(torch_dataloader, "_MultiProcessingDataLoaderIter", Other)
    with pytest.raises(RuntimeError, match=r"was replaced by .*Other; call rustloader\.install\(\) before"):
        rustloader.install(in_order=False)
    monkeypatch.undo()
    assert rustloader.settings.options.current() == {}


@pytest.mark.warns
def test_a_class_that_replaced_ours_stays_after_uninstall(caplog):
    rustloader.install()

    class Over(LoaderIter):
        pass

    torch_dataloader._MultiProcessingDataLoaderIter = Over
    try:
        rustloader.uninstall()
        assert torch_dataloader._MultiProcessingDataLoaderIter is Over
        assert "Over after rustloader.install() and is not restored" in caplog.text
    finally:
        torch_dataloader._MultiProcessingDataLoaderIter = ORIGINAL["iterator"]


def test_install_is_idempotent_and_uninstall_needs_no_install():
    rustloader.uninstall()
    rustloader.install()
    rustloader.install()
    assert torch_dataloader._MultiProcessingDataLoaderIter is LoaderIter
    rustloader.uninstall()
    torch_dataloader._MultiProcessingDataLoaderIter = LoaderIter  # as a program may do itself
    rustloader.uninstall()
    assert torch_dataloader._MultiProcessingDataLoaderIter is ORIGINAL["iterator"]


def test_installed_leaves_things_as_they_were():
    with pytest.raises(KeyError), rustloader.installed(prefetch_factor=4):
        with rustloader.installed(in_order=False):
            assert rustloader.settings.options.current() == {"prefetch_factor": 4, "in_order": False}
        assert rustloader.settings.options.current() == {"prefetch_factor": 4}
        assert torch_dataloader._MultiProcessingDataLoaderIter is LoaderIter
        raise KeyError
    assert torch_dataloader._MultiProcessingDataLoaderIter is ORIGINAL["iterator"]
    assert rustloader.settings.options.current() == {}


def test_installed_contexts_that_overlap_leave_things_as_they_were():
    """As the contexts of two threads may."""
    first, second = rustloader.installed(prefetch_factor=4), rustloader.installed(in_order=False)
    with contextlib.ExitStack() as stack:
        first.__enter__()
        stack.enter_context(second)
        first.__exit__(None, None, None)
        assert rustloader.is_installed() and options.current()["in_order"] is False
    assert not rustloader.is_installed() and options.current() == {}
    assert torch_dataloader._MultiProcessingDataLoaderIter is ORIGINAL["iterator"]


def test_installed_restores_an_installation_that_its_body_has_ended():
    rustloader.install(prefetch_factor=4)
    with rustloader.installed(in_order=False):
        rustloader.uninstall()
    assert rustloader.is_installed() and options.current() == {"prefetch_factor": 4}
    assert torch_dataloader._MultiProcessingDataLoaderIter is not ORIGINAL["iterator"]


def test_installed_has_no_truth_value_and_installs_nothing_before_it_is_entered():
    with pytest.raises(TypeError, match=r"call rustloader\.is_installed\(\)"):
        bool(rustloader.installed())
    with pytest.raises(TypeError, match=r"is_installed"):
        assert not rustloader.installed()
    assert not rustloader.is_installed()


def test_installed_decorates_no_generator_and_no_coroutine():
    def generator():
        yield

    async def coroutine():
        pass

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match=r"cannot decorate .*write `with rustloader\.installed\(\):` inside it"):
            rustloader.installed()(function)


def test_installed_is_a_decorator_and_may_be_entered_again():
    @rustloader.installed(prefetch_factor=4)
    def options(depth):
        return options(depth - 1) if depth else (rustloader.is_installed(), rustloader.settings.options.current())

    for _ in range(2):
        assert options(2) == (True, {"prefetch_factor": 4})
        assert not rustloader.is_installed()
    context = rustloader.installed()
    with context, context:
        assert rustloader.is_installed()
    assert not rustloader.is_installed()


def test_t10_options_that_frameworks_drop():
    loader = torch_loader()
    with rustloader.installed(in_order=False, prefetch_factor=5, multiprocessing_context="fork"), from_engine(6):
        with iterating(loader) as iterator:
            assert (iterator._in_order, iterator._prefetch_factor) == (False, 5)
            context = iterator._mode.group.context
            assert context.get_start_method() == "fork" and context is not torch.multiprocessing
            assert sorted(values(iterator)) == list(range(6))
    assert (loader.in_order, loader.prefetch_factor, loader.multiprocessing_context) == (True, 2, None)


def test_t10_options_of_the_loader_itself_take_precedence():
    loader = torch_loader(prefetch_factor=3)
    with rustloader.installed(prefetch_factor=5), iterating(loader) as iterator:
        assert iterator._prefetch_factor == 3


@pytest.mark.handover
def test_t10_options_hold_on_torchs_iterator_too():
    class Mine(LoaderIter):
        def _process_data(self, *args):
            return super()._process_data(*args)

    with rustloader.installed(prefetch_factor=5), from_engine(0):
        iterator = Mine(torch_loader())
        assert iterator._prefetch_factor == 5
        assert values(iterator) == list(range(6))


def test_t10_persistent_workers_for_a_loader_that_lost_them():
    loader = torch_loader()
    rustloader.install(persistent_workers=True)
    with from_engine(12):
        iterator = iter(loader)
        pids = worker_pids(iterator)
        assert values(iterator) == list(range(6))
        assert iter(loader) is iterator and worker_pids(iterator) == pids
        assert values(iterator) == list(range(6))
    iterator._shutdown_workers()


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"in_order": 1}, TypeError, "in_order must be True or False, got 1"),
        ({"persistent_workers": "yes"}, TypeError, "persistent_workers must be True or False, got 'yes'"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor must be a positive integer, got 0"),
        ({"prefetch_factor": 2.0}, TypeError, "prefetch_factor must be a positive integer, got 2.0"),
        ({"prefetch_factor": True}, TypeError, "prefetch_factor must be a positive integer, got True"),
        (
            {"multiprocessing_context": "thread"},
            ValueError,
            f"must be a start method of this system ({METHOD}, ",
        ),
        ({"multiprocessing_context": 3}, TypeError, "must be a context or the name of a start method, got 3"),
        ({"num_workers": 3}, TypeError, "num_workers"),
    ],
)
def test_wrong_options_are_errors_and_change_nothing(options, error, text):
    for call in (rustloader.install, lambda **kw: rustloader.installed(**kw).__enter__()):
        with pytest.raises(error) as raised:
            call(**options)
        assert text in str(raised.value)
        assert torch_dataloader._MultiProcessingDataLoaderIter is ORIGINAL["iterator"]
        assert rustloader.settings.options.current() == {}


def test_it_says_once_what_it_did(caplog, monkeypatch):
    monkeypatch.setattr(installation._iterator_class, "_logged", False)
    # Not the fixture's module: classes that other tests defined there may still be alive, and prevent a replacement.
    module = types.ModuleType("another_users_module")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.held = ORIGINAL["iterator"]
    with caplog.at_level(logging.INFO, logger="rustloader"):
        for _ in range(3):
            with rustloader.installed(prefetch_factor=4):
                pass
    (message,) = lines(caplog, logging.INFO)
    assert "use the Rust engine, prefetch_factor=4" in message
    assert (
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter" in message
        and "another_users_module.held" in message
    )


@pytest.mark.parametrize(
    "setting, options",
    [
        *[(text, None) for text in ("", "0", "No")],
        *[(text, {}) for text in ("1", " TRUE ")],
        ("prefetch_factor=4", {"prefetch_factor": 4}),
        (
            "in_order=0, persistent_workers=1,multiprocessing_context=spawn",
            {"in_order": False, "persistent_workers": True, "multiprocessing_context": "spawn"},
        ),
        *[(text, ValueError) for text in ("maybe", "prefetch_factor", "prefetch_factor=many", "prefetch_factor=0")],
        *[(text, ValueError) for text in ("in_order=2", "1,in_order=0", "x=1", "multiprocessing_context=thread")],
    ],
)
def test_the_environment_variable(setting, options):
    if options is not ValueError:
        assert parse_install(setting) == options
        return
    with pytest.raises(ValueError) as raised:
        parse_install(setting)
    message = str(raised.value)
    assert message.startswith("RUSTLOADER_INSTALL must be 1, 0, or options of rustloader.install()")
    assert f"got {setting!r}." in message and "prefetch_factor=4,in_order=0" in message and f"({METHOD}, " in message


@pytest.mark.timeout(LONG + 60)
def test_the_variable_is_followed_when_torch_comes_and_by_spawned_processes(tmp_path):
    """In a spawned rank, and in its loader's workers, which are spawned as well."""
    script = tmp_path / "ranks.py"
    # Without the usual head, which imports torch: the order of the imports is what is tested.
    source = """
        if __name__ == "__mp_main__":
            print("rank" if "torch" not in sys.modules else "too late", flush=True)
        else:
            import rustloader
            assert "torch" not in sys.modules
        import torch
        from torch.utils.data import DataLoader, Dataset
        class Numbers(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return torch.tensor(i)
        def loader(method):
            return DataLoader(Numbers(), batch_size=None, num_workers=1, multiprocessing_context=method)
        def rank(k):
            import rustloader
            got = [x.item() for x in loader(("fork", "spawn")[k])]
            print(k, got, rustloader.engine_batches(), rustloader.settings.options.current(), flush=True)
        if __name__ == "__main__":
            rank(0)
            process = torch.multiprocessing.get_context("spawn").Process(target=rank, args=(1,))
            process.start()
            process.join()
            print(process.exitcode)
    """
    process = start_script(source, file=script, head="import sys\n", environment={"RUSTLOADER_INSTALL": "in_order=1"})
    status, out, err = finish(process, LONG)
    result = "[0, 1, 2, 3] 4 {'in_order': True}"
    assert (status, out) == (0, f"0 {result}\nrank\nrank\n1 {result}\n0\n"), err


@pytest.mark.timeout(LONG + 60)
def test_a_script_that_installs_at_its_top_with_spawned_workers(tmp_path):
    source = """
        import logging
        import torch.utils.data
        import rustloader
        logging.basicConfig(level=logging.INFO, format="%(levelname)s", stream=sys.stdout)
        rustloader.install(multiprocessing_context="spawn")
        from sample_data import Numbers
        if __name__ == "__main__":
            loader = torch.utils.data.DataLoader(Numbers(4), num_workers=1, batch_size=None)
            print([x.item() for x in loader], rustloader.engine_batches())
    """
    # A worker that takes long to import torch would log one more line.
    environment = {"RUSTLOADER_STALL_START_SECONDS": "0"}
    status, out, err = finish(start_script(source, file=tmp_path / "script.py", environment=environment), LONG)
    assert (status, out) == (0, "INFO\n[0, 1, 2, 3] 4\n"), err


@pytest.mark.parametrize("first", ["import rustloader; rustloader.is_installed()", "from rustloader import uninstall"])
def test_what_is_about_installing_may_be_the_first_thing_that_a_program_uses(first):
    source = f"{first}\nimport rustloader\nprint(rustloader.is_installed())"
    status, out, err = run_script(source, head="", environment={"RUSTLOADER_INSTALL": "1"})
    assert (status, out) == (0, "True\n"), err
