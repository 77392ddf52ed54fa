"""Metrics: what `serve_metrics` serves, how its counters grow, and that Prometheus's parser reads it; `scalars()`."""

import ast
import contextlib
import dataclasses
import gc
import json
import os
import re
import socket
import sys
import time
import urllib.parse
import urllib.request

import pytest
import snapshots
import torch
from sample_data import Held, Numbers
from support import (
    ROOT,
    STARTED,
    TORCH_MODE,
    DataLoader,
    TorchDataLoader,
    kill,
    run_script,
    start_script,
    wait_until,
    while_next_waits,
)

pytestmark = [pytest.mark.ours, pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")]

if not TORCH_MODE:
    import rustloader
    from rustloader.metrics import http_server, ledger, serving
    from rustloader.settings import names

parser = pytest.importorskip(
    "prometheus_client.parser", reason="prometheus_client comes with the extras metrics and dev"
)
PAGE = (ROOT / "docs" / "metrics.md").read_text()


class Metrics(dict):
    """The samples of a response: values by name and labels."""

    def __init__(self, port):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            # Prometheus refuses a response without it.
            assert response.headers["Content-Type"].startswith("text/plain; version=")
            self.text = response.read().decode()
        self.families = {family.name: family for family in parser.text_string_to_metric_families(self.text)}
        for family in self.families.values():
            for sample in family.samples:
                key = (sample.name.removeprefix("rustloader_"), *sorted(sample.labels.items()))
                assert key not in self, f"{key} occurs twice"
                self[key] = sample.value

    def of(self, name, loader, **labels):
        return self.get((name, *sorted({"rank": "0", "loader": loader, **labels}.items())))


@pytest.fixture
def server():
    with rustloader.serve_metrics(port=0) as server:
        yield server


def numbers(name, workers=2, **kw):
    return DataLoader(Numbers(12), batch_size=3, num_workers=workers, name=name, **kw)


# What is served


def test_what_a_loader_has_counted(server):
    loader = numbers("counted")
    for _ in range(2):
        list(loader)
    metrics, stats = Metrics(server.port), rustloader.stats(loader)
    assert metrics.of("batches_total", "counted") == stats.batches == 8
    assert metrics.of("bytes_total", "counted") == stats.bytes > 0
    assert metrics.of("epochs_total", "counted") == 2 and metrics.of("batch_size", "counted") == 3
    assert metrics.of("next_seconds_total", "counted") == pytest.approx(stats.next_seconds)
    assert metrics.of("step_seconds_total", "counted") == pytest.approx(stats.step_seconds)
    tasks = [metrics.of("worker_batches_total", "counted", worker=str(worker)) for worker in (0, 1)]
    assert tasks == [worker.tasks for worker in stats.workers] and sum(tasks) == 8
    fetched = [metrics.of("worker_fetch_seconds_total", "counted", worker=str(worker)) for worker in (0, 1)]
    assert fetched == pytest.approx([worker.fetch_seconds for worker in stats.workers])
    assert metrics.of("verdict", "counted", kind="too_few") == 1
    assert metrics.of("restarts_total", "counted") == metrics.of("skipped_samples_total", "counted") == 0
    assert metrics.of("workers", "counted") == 0 and metrics.of("cache_hits_total", "counted") is None


def test_waits_are_a_histogram(server, tmp_path):
    def release():
        time.sleep(0.03)
        (tmp_path / "go").touch()

    loader = DataLoader(Held(5, 2, tmp_path / "go"), batch_size=None, num_workers=1, name="slow")
    iterator = iter(loader)
    next(iterator), next(iterator)
    thread = while_next_waits(release)
    assert len(list(iterator)) == 3
    thread.join()
    metrics, stats = Metrics(server.port), rustloader.stats(loader)
    buckets = [(key[1][1], value) for key, value in metrics.items() if key[0] == "wait_seconds_bucket"]
    counts = [value for _, value in buckets]
    assert counts == sorted(counts) and [bound for bound, _ in buckets][-1] == "+Inf"
    # All but the first: four batches and the end.
    assert metrics.of("wait_seconds_count", "slow") == counts[-1] == 5
    assert metrics.of("wait_seconds_sum", "slow") == pytest.approx(stats.waited_seconds)
    # The end is immediate, and sample 2 takes 30 ms from the time at which the loop waits for it.
    assert dict(buckets)["0.01"] >= 1 and dict(buckets)["30.0"] == 5 and dict(buckets)["0.01"] <= 4
    assert metrics.families["rustloader_wait_seconds"].type == "histogram"


def test_running_workers_and_their_memory(server):
    iterator = iter(DataLoader(Numbers(10**6), num_workers=2, name="running"))
    # next() may take all batches that are ready.
    assert wait_until(lambda: next(iterator) is not None and Metrics(server.port).of("ready_batches", "running") > 0)
    metrics = Metrics(server.port)
    assert metrics.of("workers", "running") == 2 and metrics.of("arena_bytes", "running") > 0
    assert metrics.of("worker_resident_bytes", "running", worker="1") > 1 << 20


def test_a_worker_on_another_machine_has_no_memory_of_a_process_here(server):
    loader = numbers("elsewhere", workers=1)
    iterator = iter(loader)
    next(iterator)
    counters = ledger.find(loader)
    counters.scheduling = dataclasses.replace(counters.scheduling, remote=True)
    assert Metrics(server.port).of("worker_resident_bytes", "elsewhere", worker="0") == 0


@pytest.mark.parametrize("kind", ["DataLoader", "StatefulDataLoader"])
def test_a_loader_without_workers(server, tmp_path, kind):
    class Slow(Numbers):
        def __getitem__(self, i):
            time.sleep(0.001)
            return super().__getitem__(i)

    loader = getattr(rustloader, kind)(Slow(12), batch_size=3, name="inline")
    for way in (contextlib.nullcontext(), rustloader.trace(tmp_path / "run.json")):
        with way:
            for _ in loader:
                time.sleep(0.002)
    metrics = Metrics(server.port)
    assert [metrics.of(f"{name}_total", "inline") for name in ("batches", "epochs", "bytes")] == [8, 2, 0]
    assert metrics.of("batch_size", "inline") == 3 and metrics.of("wait_seconds_count", "inline") == 6
    first, waits = metrics.of("first_wait_seconds_total", "inline"), metrics.of("wait_seconds_sum", "inline")
    assert first >= 2 * 0.003 and waits >= 6 * 0.003
    assert metrics.of("next_seconds_total", "inline") == pytest.approx(first + waits)
    assert metrics.of("step_seconds_total", "inline") >= 6 * 0.002
    names = [event["name"] for event in json.loads((tmp_path / "run.json").read_text()) if event["ph"] == "X"]
    assert sorted(names) == ["fetch"] * 4 + ["step"] * 3


def test_fetches_that_return_no_batch_count_as_time_only(server):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield 1
            time.sleep(0.01)

    list(DataLoader(Stream(), batch_size=None, name="stream"))
    metrics = Metrics(server.port)
    assert metrics.of("batches_total", "stream") == 1 and metrics.of("wait_seconds_sum", "stream") >= 0.01


def test_fetches_without_a_server_or_a_trace_are_those_of_torch():
    loader = DataLoader(Numbers(4))
    with rustloader.serve_metrics(port=0):
        assert "fetch" in vars(iter(loader)._dataset_fetcher)
    assert "fetch" not in vars(iter(loader)._dataset_fetcher)


@pytest.mark.warns
def test_restarts_and_skipped_samples_count(server, tmp_path):
    class Faulty(Numbers):
        def __getitem__(self, i):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(tmp_path / "died", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), 9)
            if i == 3:
                raise ValueError("bad")
            return super().__getitem__(i)

    options = {"max_restarts": 1, "on_error": "skip"}
    batches = list(DataLoader(Faulty(12), batch_size=3, num_workers=1, name="faulty", **options))
    metrics = Metrics(server.port)
    assert len(batches) == metrics.of("batches_total", "faulty") == 4
    assert metrics.of("restarts_total", "faulty") == metrics.of("skipped_samples_total", "faulty") == 1


@pytest.mark.handover
def test_torchs_own_loop_is_not_counted_but_for_its_iterators(server):
    from torch.utils.data.datapipes.iter import IterableWrapper

    list(DataLoader(IterableWrapper(range(4)), num_workers=1, name="pipe"))
    metrics = Metrics(server.port)
    assert (metrics.of("fallback_iterators_total", "pipe"), metrics.of("batches_total", "pipe")) == (1, 0)


# How it grows


def test_counters_never_go_backwards(server):
    """Counters grow over loops that end early, loaders that are dropped, and iterators that outlive their loaders."""
    seen = []

    def look():
        counters = {
            key: value for key, value in Metrics(server.port).items() if re.search("_total$|_count$|_sum$", key[0])
        }
        for key, value in (seen[-1] if seen else {}).items():
            assert counters[key] >= value, key
        seen.append(counters)

    kinds = ({}, {"persistent_workers": True}, {"workers": 0})
    for kw in kinds:
        loader = numbers("grows", **kw)
        for left in (False, True):
            for _ in loader:
                look()
                if left:
                    break
        del loader
        look()
        for _ in numbers("grows", **kw):
            look()
        look()
    metrics = Metrics(server.port)
    assert metrics.of("batches_total", "grows") == len(kinds) * (4 + 1 + 4)
    assert metrics.of("epochs_total", "grows") == len(kinds) * 3


def test_a_loader_for_each_epoch_leaves_one_account(server):
    for _ in range(5):
        list(numbers("each", workers=1))
    (accounts,) = [opening.__self__ for opening in ledger.new_ledger_hooks]
    # Only the last one may still be open, although nothing has asked for the metrics.
    ((_, account),) = [item for item in accounts._by_name.items() if item[0] == "each"]
    assert len(account.entries) == 1
    assert Metrics(server.port).of("batches_total", "each") == 20


def test_hits_of_a_cache_that_is_gone_count(server, tmp_path):
    def cached(**kw):
        return DataLoader(rustloader.cache(Numbers(8), **kw), num_workers=1, name="caches")

    def look():
        metrics = Metrics(server.port)
        return tuple(metrics.of(f"cache_{name}", "caches") for name in ("hits_total", "misses_total", "limit_bytes"))

    def twice(loader):
        for _ in range(2):
            list(loader)

    file, memory = cached(path=tmp_path / "cache", version="1"), cached(memory="1MiB")
    twice(file)
    twice(memory)
    hits, misses, _ = look()
    assert (hits, misses) == (16, 16)
    del file
    assert look() == (16, 16, 1 << 20)
    assert Metrics(server.port).of("cache_bytes", "caches") == memory.dataset.usage().samples_bytes
    del memory
    assert look() == (16, 16, 0)
    reopened = cached(path=tmp_path / "cache", version="1")
    list(reopened)
    assert reopened.dataset.usage().hits == 8 and look()[:2] == (24, 16)


def test_loaders_from_before_count():
    loader = numbers("before")
    list(loader)
    iterator = iter(numbers("without its loader"))
    next(iterator)
    with rustloader.serve_metrics(port=0) as server:
        metrics = Metrics(server.port)
        assert metrics.of("batches_total", "before") == 4 and metrics.of("batches_total", "without its loader") == 1
        list(iterator)
        del iterator
        assert Metrics(server.port).of("batches_total", "without its loader") == 4


def test_a_loader_that_begins_while_others_are_looked_for_counts_once(monkeypatch):
    known, loader = ledger.loader_ledgers, numbers("between")

    def loader_ledgers():
        list(loader)
        yield from known()

    monkeypatch.setattr(ledger, "loader_ledgers", loader_ledgers)
    with rustloader.serve_metrics(port=0) as server:
        assert Metrics(server.port).of("batches_total", "between") == 4


def test_two_loaders_of_a_name_are_summed(server):
    loaders = [numbers("both", workers) for workers in (1, 2)]
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        next(iterator)
    metrics = Metrics(server.port)
    assert metrics.of("workers", "both") == 3 and metrics.of("batches_total", "both") == 2


# Names


def test_the_default_name_is_the_place_that_made_the_loader():
    class Mine(DataLoader):
        def __init__(self, *args, **kw):
            super().__init__(*args, **kw)

    class Trainer:
        def __init__(self):
            self.loader = DataLoader(Numbers(2))

    first = sys._getframe().f_lineno
    loaders = [
        DataLoader(Numbers(2)),
        Mine(Numbers(2), num_workers=1),
        DataLoader[int](Numbers(2)),
        rustloader.StatefulDataLoader(Numbers(2)),
    ]
    assert [rustloader.stats(loader).name for loader in loaders] == [
        f"test_metrics.py:{first + line}" for line in (2, 3, 4, 5)
    ]
    assert rustloader.stats(Trainer().loader).name == f"test_metrics.py:{first - 2}"
    list(loaders[1])
    assert rustloader.stats(loaders[1]).name == f"test_metrics.py:{first + 3}"


@pytest.mark.parametrize("file", ["/tmp/ipykernel_12/345678.py", "<ipython-input-3-8f1c2d>"])
def test_the_cell_of_a_notebook_gives_no_name(file):
    namespace = {"DataLoader": DataLoader, "Numbers": Numbers}
    exec(compile("loader = DataLoader(Numbers(2))", file, "exec"), namespace)
    assert names.of(namespace["loader"]) == "Numbers"


def test_a_name_goes_with_copies_and_install_gives_one(tmp_path):
    import copy
    import pickle

    loader = DataLoader(Numbers(2), name="train")
    assert [names.of(twin) for twin in (copy.copy(loader), pickle.loads(pickle.dumps(loader)))] == ["train"] * 2
    assert names.of(copy.copy(DataLoader(Numbers(2)))) == "Numbers"
    torch_loader = TorchDataLoader(Numbers(2), num_workers=1)
    with rustloader.installed(name="installed"):
        assert (names.of(torch_loader), names.of(loader)) == ("installed", "train")
        list(torch_loader)
    assert rustloader.stats(torch_loader).name == "installed"


def test_a_name_keeps_no_frame_alive():
    import weakref

    class Thing:
        pass

    def make():
        thing = Thing()
        return DataLoader(Numbers(2)), weakref.ref(thing)

    loader, thing = make()
    assert thing() is None and loader is not None


# The server


def refuses(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def test_close_frees_the_port_and_follows_no_loader():
    server = rustloader.serve_metrics(port=0)
    assert repr(server) == f"<rustloader.MetricsServer at http://127.0.0.1:{server.port}/metrics>"
    Metrics(server.port)
    server.close()
    server.close()
    assert refuses(server.port) and not ledger.new_ledger_hooks
    assert repr(server) == "<rustloader.MetricsServer closed>"
    with rustloader.serve_metrics(port=server.port) as reopened:
        assert reopened.port == server.port


def test_a_port_that_is_taken(server):
    with pytest.raises(OSError) as caught:
        rustloader.serve_metrics(port=server.port)
    assert "A server of this process already listens there" in caught.value.__notes__[0]
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError) as caught:
        rustloader.serve_metrics(port=other.getsockname()[1])
    assert "give each a different port, or port=0" in caught.value.__notes__[0]
    assert len(ledger.new_ledger_hooks) == 1


def test_a_server_that_the_program_does_not_keep_is_known_to_forks():
    before = {*serving._servers}
    rustloader.serve_metrics(port=0)
    gc.collect()
    (server,) = serving._servers - before
    with server:
        child = os.fork()
        if child == 0:
            os._exit(bool(server._server.descriptors or serving._servers))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert server not in serving._servers


@pytest.mark.parametrize("port", [-1, 65536, True, 1.5, "9400"])
def test_wrong_ports(port):
    with pytest.raises(ValueError, match=r"^port must be an integer between 0 and 65535, got "):
        rustloader.serve_metrics(port=port)


def test_each_rank_has_its_port_and_its_label(monkeypatch):
    with rustloader.serve_metrics(port=0) as free:
        port = free.port
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("RANK", "10")
    loader = numbers("of a rank", workers=1)
    list(loader)
    with rustloader.serve_metrics(port=port - 2) as server:
        assert server.port == port
        assert Metrics(port)[("batches_total", ("loader", "of a rank"), ("rank", "10"))] == 4
    monkeypatch.setenv("LOCAL_RANK", "9")
    with pytest.raises(ValueError, match="65530 plus 9 is above 65535"):
        rustloader.serve_metrics(port=65530)


def test_a_forked_child_does_not_serve(server):
    """It does not keep the port either: the kernel would accept connections that nothing serves."""
    parent_end, child_end = socket.socketpair()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            server.close()
            assert not ledger.new_ledger_hooks and repr(server) == "<rustloader.MetricsServer closed>"
            # The loop of a child goes on as without metrics.
            assert len(list(numbers("of a child", workers=0))) == 4
            child_end.recv(1)
            status = 0
        finally:
            os._exit(status)
    try:
        child_end.close()
        assert Metrics(server.port).text
        server.close()
        assert refuses(server.port)
    finally:
        parent_end.send(b"x")
        parent_end.close()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"needs prometheus_client: pip install 'rustloader\[metrics\]'$"):
        rustloader.serve_metrics(port=0)


def test_the_end_of_the_program_needs_no_close():
    script = """
        import rustloader
        if __name__ == "__main__":
            server = rustloader.serve_metrics(port=0)
            print(len(list(DataLoader(range(4), num_workers=1))), server.port > 0)
    """
    assert run_script(script) == (0, "4 True\n", "")


# Clients


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=STARTED)


def received(client):
    """What the server sends until it closes the connection."""
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def test_silent_clients_take_few_descriptors(server):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(http_server.MAX_CONNECTIONS)]
        refused = stack.enter_context(connect(server))
        assert received(refused).startswith(b"HTTP/1.0 503 ")
        assert len(server._server.descriptors) == 1 + http_server.MAX_CONNECTIONS
        clients[0].close()
        assert wait_until(lambda: len(server._server.descriptors) == http_server.MAX_CONNECTIONS)
        assert Metrics(server.port).text
        clients[1].sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert received(clients[1]).startswith(b"HTTP/1.0 200 ")


def test_a_connection_ends_after_a_time(server, monkeypatch):
    monkeypatch.setattr(http_server, "CONNECTION_SECONDS", 0.05)
    with connect(server) as silent, connect(server) as unfinished:
        unfinished.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert received(silent) == received(unfinished) == b""
    size = 1 << 26
    large = http_server.HttpServer("127.0.0.1", 0, lambda _: bytes(size))
    try:
        with connect(large) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert wait_until(lambda: len(large.descriptors) == 2)
            assert wait_until(lambda: len(large.descriptors) == 1)
            assert len(received(slow)) < size
    finally:
        large.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"200"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"x" * (1 << 15), None),
    ],
)
def test_status_of_a_request(server, request_, status):
    with connect(server) as client:
        client.sendall(request_)
        if status is None:
            with contextlib.suppress(ConnectionResetError):
                assert received(client) == b""
        else:
            assert received(client).startswith(b"HTTP/1.0 " + status)


@pytest.mark.warns
def test_metrics_that_cannot_be_read_are_status_500(server, monkeypatch, caplog):
    monkeypatch.setattr(rustloader.metrics.collector.LoaderCollector, "collect", lambda self: 1 / 0)
    with connect(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert received(client).startswith(b"HTTP/1.0 500 ")
    assert [record.getMessage() for record in caplog.records] == ["serve_metrics: the metrics could not be read"]
    caplog.clear()
    monkeypatch.undo()
    assert Metrics(server.port).text


def test_a_server_without_descriptors_waits():
    script = """
        import resource, socket
        import rustloader
        from rustloader.metrics import http_server
        from support import wait_until
        http_server._PAUSE_SECONDS = 0.1
        steps = []
        step = http_server.HttpServer._step
        http_server.HttpServer._step = lambda self: (steps.append(time.monotonic()), step(self))
        server = rustloader.serve_metrics(port=0)
        client = socket.socket()
        _, hard = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
        spare = []
        try:
            while True:
                spare.append(os.dup(0))
        except OSError:
            pass
        client.connect(("127.0.0.1", server.port))
        assert wait_until(lambda: len(steps) > 4)
        # A step that accepts nothing is followed by a pause.
        print(steps[4] - steps[2] > 0.1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.sendall(b"GET /metrics HTTP/1.1\\r\\n\\r\\n")
        print(client.recv(12))
        server.close()
        [os.close(number) for number in spare]
    """
    assert run_script(script) == (0, "True\nb'HTTP/1.0 200'\n", "")


# The documentation


def documented():
    """The metrics of the table by name, with types and labels by the rule in the text above it."""
    metrics = {}
    for name in re.findall(r"^\| `(rustloader_\w+)` \|", PAGE, re.MULTILINE):
        histogram = name == "rustloader_wait_seconds"
        kind = "counter" if name.endswith("_total") else "histogram" if histogram else "gauge"
        more = ["worker"] if name.startswith("rustloader_worker_") else ["kind"] if name == "rustloader_verdict" else []
        metrics[name] = (kind, ["rank", "loader", *more])
    return metrics


def test_the_page_has_all_metrics_with_their_types_and_labels(server):
    loader = DataLoader(rustloader.cache(Numbers(6), memory="1MiB"), batch_size=2, num_workers=1, name="all")
    iterator = iter(loader)
    next(iterator)
    served = {}
    for name, family in Metrics(server.port).families.items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        suffix = "_total" if family.type == "counter" else ""
        assert family.documentation.endswith(".") and name.startswith("rustloader_")
        served[name + suffix] = (
            family.type,
            [label for label in ("rank", "loader", "worker", "kind") if label in labels],
        )
    assert served == documented()


def test_the_page_has_all_scalars():
    loader = DataLoader(rustloader.cache(Numbers(6), memory="1MiB"), num_workers=1)
    list(loader)
    scalars = rustloader.stats(loader).scalars()
    assert all(type(value) is float for value in scalars.values())
    table = PAGE.partition("## TensorBoard and Weights & Biases")[2].partition("## Ranks")[0]
    names = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(names) == sorted(scalars)
    assert scalars["batches"] == 6.0 and scalars["cache_misses"] == 6.0 and 0 <= scalars["wait_share"] <= 1
    plain = rustloader.Stats().scalars()
    assert plain.keys() == {name for name in scalars if not name.startswith("cache_")} and not any(plain.values())


# Queries


def queries():
    part = PAGE.partition("### Queries")[2].partition("### The metrics")[0]
    return [block.strip() for block in re.findall(r"```text\n(.*?)```", part, re.DOTALL)]


def dashboard():
    """The queries of the dashboard."""
    panels = json.loads((ROOT / "examples" / "measuring" / "grafana.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_queries_name_metrics_of_the_table():
    known = {name for name, (kind, _) in documented().items() if kind != "histogram"}
    known |= {f"rustloader_wait_seconds_{part}" for part in ("bucket", "sum", "count")}
    assert len(queries()) == 5
    for query in [*queries(), *dashboard()]:
        assert set(re.findall(r"rustloader_\w+", query)) <= known, query


# Ranks

RANKS = """
import json, os, sys, time
import torch
import torch.distributed as dist
import rustloader

class Items(torch.utils.data.Dataset):
    def __init__(self, seconds):
        self.seconds = seconds
    def __len__(self):
        return 24
    def __getitem__(self, i):
        time.sleep(self.seconds)
        return torch.tensor(i)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # So slow that waits for a core do not matter.
    loader = rustloader.DataLoader(Items(0.1 if rank == 1 else 0), num_workers=1, name="train")
    for _ in loader:
        dist.barrier()
    report = rustloader.report_ranks()
    failing = rank == 0
    try:
        again = rustloader.report_ranks(3 if failing else loader)
        assert not failing and len(again.ranks) == 2 and again.ranks[0].batches == 0
    except TypeError:
        assert failing
    some = rustloader.report_ranks(loader, group=dist.new_group([0]))
    assert [it.rank for it in some.ranks] == [rank] and some.ranks[0].batches == 24
    if rank == 0:
        print(repr([report.slowest.rank, report.slowest.kind, [it.batches for it in report.ranks], str(report)]))
    dist.destroy_process_group()
"""


def test_a_report_names_the_slowest_of_two_ranks():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [start_script(RANKS, head="", fresh=False, environment=common | {"RANK": str(rank)}) for rank in (0, 1)]
    try:
        outs = [process.communicate(timeout=STARTED) for process in ranks]
    finally:
        for process in ranks:
            kill(process)
    assert [process.returncode for process in ranks] == [0, 0], outs
    slowest, kind, batches, text = ast.literal_eval(outs[0][0])
    assert (slowest, kind, batches) == (1, "storage", [24, 24])
    heading, first, second, sentence = text.splitlines()
    assert heading.split()[:3] == ["rank", "host", "loader"] and first.split()[2] == second.split()[2] == "train"
    assert sentence.startswith(f"Rank 1 on {socket.gethostname()} is the slowest: its loop spends ")


def test_without_torch_distributed_the_report_has_this_process():
    loader = numbers("alone")
    list(loader)
    for report in (rustloader.report_ranks(loader), rustloader.report_ranks(iter(loader))):
        assert len(report.ranks) == 1
    assert rustloader.report_ranks(loader).slowest.batches == 4
    with pytest.raises(TypeError, match="takes a DataLoader or its iterator"):
        rustloader.report_ranks(3)
    nothing = rustloader.report_ranks(DataLoader(Numbers(2)))
    assert nothing.slowest is None and str(nothing).endswith("No rank has received a batch from the engine.")


def rank_stats(rank, batches, next_seconds, step=1.0, **kw):
    return rustloader.RankStats(rank, "host", "train", batches, next_seconds + step, next_seconds, **kw)


def test_texts_of_reports():
    advice = {"kind": "storage", "sentence": "Use faster storage."}
    starting = {"kind": "starting", "sentence": "Keep the workers."}
    reports = {
        "no waits": (rank_stats(0, 10, 0.01), rank_stats(1, 10, 0.02)),
        "equal waits": (rank_stats(0, 10, 1.0), rank_stats(1, 10, 1.1, **advice)),
        "slow starts": (rank_stats(0, 10, 0.01), rank_stats(1, 10, 0.011, **starting)),
        "one without waits": [rank_stats(n, 10, it, **advice) for n, it in enumerate((0.1, 1.1, 1.0, 1.0))],
        "one slow rank": (rank_stats(0, 10, 0.01), rank_stats(1, 10, 2.0, **advice)),
        "one rank": (rank_stats(0, 10, 2.0, **advice),),
    }
    texts = {title: str(rustloader.RankReport(tuple(ranks))) for title, ranks in reports.items()}
    snapshots.check("ranks", texts)
