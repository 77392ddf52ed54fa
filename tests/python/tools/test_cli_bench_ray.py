"""`bench --ray`: what it prints about workers on a cluster. tests/ray runs it on a real one."""

import json
import sys
import threading
import time
import types

import pytest
import torch
from remote_support import LoopbackContext
from support import rustloader
from test_cli_bench_results import a_point, options, summary

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.tools.bench import command, plan, ray_cluster
    from rustloader.tools.bench.ray_cluster import Cluster, Price
    from rustloader.tools.probe.factory import Unusable


def test_without_ray_it_says_how_to_install_it(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(ray_cluster.importlib.util, "find_spec", lambda name: None)
    assert command.main(options("--ray")) == 2
    assert capsys.readouterr().err == "rustloader bench: --ray needs Ray: pip install 'rustloader[ray]'\n"


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:1"])
def test_a_cluster_that_does_not_answer_is_an_error(monkeypatch, address):
    def init(address, **others):
        raise ConnectionError("Could not find any running Ray instance.\nMore.")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False, init=init))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address != "auto":
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(Unusable) as caught:
        ray_cluster.connect()
    text = str(caught.value)
    # Ray would end the process if nothing listened at the address.
    reason = "Could not find any running Ray instance." if address == "auto" else "[Errno 111] Connection refused"
    assert text == (
        f"--ray: no Ray cluster answers at {address}: {reason}\n"
        "  start one (`ray start --head`), or name one in RAY_ADDRESS"
    )


def test_each_engine_has_workers_of_its_own(monkeypatch, tmp_path):
    context = LoopbackContext(tmp_path)
    fork = torch.multiprocessing.get_context("fork")
    module = types.SimpleNamespace(RayContext=lambda: context)
    monkeypatch.setitem(sys.modules, "rustloader.ray", module)
    for given, engine, expected in (
        (None, "ray", context),
        (fork, "ray", context),
        (LoopbackContext(tmp_path), "ray", None),  # kept
        (context, "rustloader", None),
        (context, "torch", None),
        (fork, "torch", fork),
        (None, "rustloader", None),
    ):
        loader = torch.utils.data.DataLoader([1], num_workers=1, multiprocessing_context=given)
        ray_cluster.give_workers(loader, engine)
        kept = given if engine == "ray" and expected is None else expected
        assert loader.multiprocessing_context is kept


def test_what_a_file_defines_is_sent_by_value(monkeypatch, tmp_path):
    sent = []
    cloudpickle = types.SimpleNamespace(register_pickle_by_value=sent.append)
    connected = types.SimpleNamespace(is_initialized=lambda: True, cloudpickle=cloudpickle)
    monkeypatch.setitem(sys.modules, "ray", connected)
    module = types.ModuleType("loaders_of_a_file")
    monkeypatch.setitem(sys.modules, "loaders_of_a_file", module)
    (tmp_path / "loaders_of_a_file.py").touch()
    ray_cluster.send_by_value("some.package:make_loader")
    assert sent == []
    ray_cluster.send_by_value(f"{tmp_path / 'loaders_of_a_file.py'}:make_loader")
    assert sent == [module]


class FakeRay:
    """A cluster in threads of this process."""

    class Strategy:
        def __init__(self, node, soft):
            self.node = node

    def __init__(self, nodes):
        self.listed = [{"NodeID": name, "Alive": alive} for name, alive in nodes.items()]
        self.util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        self.places, self.error = [], None

    def is_initialized(self):
        return True

    def get_runtime_context(self):
        return types.SimpleNamespace(get_node_id=lambda: "here")

    def nodes(self):
        return self.listed

    def available_resources(self):
        return {"CPU": 6.0}

    def remote(self, scheduling_strategy, **others):
        self.places.append(scheduling_strategy.node)

        def make(function):
            def call(*arguments):
                target = (lambda *_: None) if self.error else function
                thread = threading.Thread(target=target, args=arguments)
                thread.start()
                return thread

            return types.SimpleNamespace(remote=call)

        return make

    def wait(self, references, timeout):
        return references, []

    def get(self, reference):
        reference.join()
        raise self.error


@pytest.fixture
def fake(monkeypatch):
    def make(nodes):
        ray = FakeRay(nodes)
        monkeypatch.setitem(sys.modules, "ray", ray)
        strategies = types.SimpleNamespace(NodeAffinitySchedulingStrategy=FakeRay.Strategy)
        monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
        return ray

    monkeypatch.setattr(ray_cluster, "_LINK_SECONDS", 0.05)
    return make


def test_the_link_is_measured_from_another_node(fake):
    ray, begin = fake({"gone": False, "here": True, "far": True}), time.monotonic()
    cluster = Cluster(**ray_cluster.measure_cluster())
    took = time.monotonic() - begin
    assert ray.places == ["far"] and (cluster.cpus, cluster.nodes) == (6.0, 1)
    assert cluster.link > ray_cluster._CHUNK_BYTES / took
    ray = fake({"here": True})
    assert ray_cluster.measure_cluster()["nodes"] == 0 and ray.places == ["here"]


def test_a_node_that_cannot_send_is_an_error_and_no_hang(fake):
    ray = fake({"here": True})
    ray.error = RuntimeError("the node is gone")
    with pytest.raises(RuntimeError, match="the node is gone"):
        ray_cluster.measure_cluster()


# A batch is 9.6 MB and takes 320 ms. At 1.2 GB/s it is sent in 8 ms, so the link replaces 40 cores.
@pytest.mark.parametrize(
    ("cores", "cpus", "link", "nodes", "text"),
    [
        (8, 32, 1.2e9, 1, "pay off if there are at least 9; up to 32 help: 32 CPUs are free"),
        (8, 100, 1.2e9, 1, "pay off if there are at least 9; up to 40 help: 100 CPUs are free"),
        (39, 64, 1.2e9, 1, "pay off if there are at least 40; up to 40 help"),
        (40, 64, 1.2e9, 1, "do not pay off: the link carries no more than the 40 cores here make."),
        (8, 8, 1.2e9, 1, "do not pay off: 8 CPUs are free in the cluster, no more than the 8 cores here."),
        (8, 32, 0.12e9, 1, "do not pay off: the link carries no more than the 8 cores here make."),
        (
            2,
            4,
            1.2e9,
            0,
            "The cluster is only this machine, so its CPUs are the cores here, and the link is the loopback",
        ),
    ],
)
def test_when_workers_elsewhere_pay(cores, cpus, link, nodes, text):
    price = Price(9.6e6, 0.32, cores, Cluster(cpus, nodes, link))
    assert text in str(price)
    assert price.pays == ("do not" not in str(price))
    assert ("loopback" in str(price)) == (nodes == 0)


def test_the_figures_of_the_formula():
    price = Price(9.6e6, 0.32, 8, Cluster(32, 1, 1.2e9))
    assert str(price).startswith(
        "A batch is 9.6 MB and takes 320 ms of CPU time, so the 8 cores here make at most 25.0 batches/s. "
        "The link carries 1,200 MB/s: 125.0 batches/s, the work of 40.0 cores. "
    )
    figures = price.as_dict()
    assert figures["local_batches_per_second"] == 25.0 and figures["replaced_cores"] == pytest.approx(40)
    assert figures["carried_batches_per_second"] == 125.0 and figures["pays"] is True
    assert figures["cluster"] == {"cpus": 32, "nodes": 1, "link": 1.2e9}
    # A batch that has no bytes and takes no time.
    assert not Price(0.0, 0.0, 8, Cluster(32, 1, 1.2e9)).pays


def test_the_plan_and_the_result_name_the_third_engine():
    assert "epochs of torch, rustloader and rustloader on Ray in turn" in str(plan.BenchPlan(options("--ray")))
    given = plan.BenchPlan(options("--ray", "--epochs", "3", "--workers", "0,2"))
    assert "3 epochs of torch, of rustloader and of rustloader on Ray in turn" in str(given)
    assert given.steps == (1 + 3) * (1 + 3)
    point = a_point(2, (10.0, 11, 12), (30.0, 33, 36))
    point.ray = a_point(2, (1.0,) * 3, (60.0, 66, 72)).rustloader
    point.price = Price(9.6e6, 0.32, 8, Cluster(32, 1, 1.2e9))
    report = summary([point], "--ray")
    lines = report.text().splitlines()
    (row,) = [line for line in lines if line.startswith("2 workers ") and "33.0" in line]
    assert row.split()[2:5] == ["33.0", "66.0", "2.00x"]
    assert (
        "Workers on the cluster pay off if there are at least 9;" in " ".join(report.text().split())
        and max(map(len, lines)) <= 100
    )
    (result,) = json.loads(json.dumps(report.as_dict()))["results"]
    assert result["ray"]["batches_per_second"] == 66.0 and result["price"]["pays"] is True
    # Without --ray, Ray is not mentioned.
    plain = summary([a_point(2, (10.0, 11, 12), (30.0, 33, 36))])
    assert "Ray" not in plain.text() and "ray" not in json.dumps(plain.as_dict())
