"""`share(x, key=...)`: one copy for the ranks of a machine, whatever ends one of them."""

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from isolation import in_child
from support import rustloader, start_script, wait_until

pytestmark = pytest.mark.ours

if rustloader is not None:
    from rustloader.sharing import agreement, launchers, ranks

    share = rustloader.share

HEAD = """
import os, signal, socket, sys, time
import rustloader
from rustloader.sharing import ranks
rank = os.environ["LOCAL_RANK"]
def note(text):
    with open(os.environ["NOTES"], "a") as file:
        file.write(f"{rank} {text}\\n")
def lines():
    with open(os.environ["NOTES"]) as file:
        return file.read().splitlines()
def wait_for(text):
    while not any(line.endswith(text) for line in lines()):
        time.sleep(0.01)
def told(shared):
    note(f"has {os.fstat(shared.store.fileno()).st_ino} {len(shared)} {shared[0]}")
def at(name, before=None, after=None, owner=ranks):
    real = getattr(owner, name)
    def call(*args):
        before and before()
        result = real(*args)
        after and after(result)
        return result
    setattr(owner, name, call)
def end():
    os.kill(os.getpid(), signal.SIGKILL)
def build():
    note("builds")
    return [f"item {n} of {rank}" for n in range(1000)]
at("_bind", after=lambda bound: bound or note("meets"))
at("recv_fds", before=lambda: note("waits"), owner=ranks.socket)
"""
KILLED = -signal.SIGKILL


@pytest.fixture
def run(tmp_path, request):
    """Starts ranks: run(body) returns their processes, and run.notes() the notes of all ranks."""
    notes = tmp_path / "notes"
    notes.touch()
    run_id = f"{os.getpid()}-{request.node.name}"

    def start(body, size=2, only=None, **more):
        own = {"LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": run_id, "NOTES": str(notes), **more}
        source = HEAD + textwrap.dedent(body)
        numbers = range(size) if only is None else only
        return [start_script(source, environment={**own, "LOCAL_RANK": str(rank)}, fresh=False) for rank in numbers]

    start.notes = lambda: notes.read_text().splitlines()
    start.file = notes
    return start


def wait_for_end(processes, seconds=120):
    """Waits for the processes; returns their exit statuses and stderrs."""
    errors = [process.communicate(timeout=seconds)[1] for process in processes]
    return [process.returncode for process in processes], errors


def noted(run, word):
    """The notes that begin with a word, without their ranks, in order."""
    return [line.split(" ", 1)[1] for line in run.notes() if line.split()[1] == word]


SHARE = "told(rustloader.share(build, key='train'))"


def test_every_kind_and_several_keys(run):
    body = """
    import numpy as np, torch
    makes = [lambda: (1, 2), lambda: {0: 5}, lambda: np.arange(6.0).reshape(2, 3).T, lambda: torch.arange(5)]
    for make in makes:
        shared = rustloader.share(make, key="same")
        note(f"kind {type(shared).__name__} {len(shared)} {shared[0]}")
    for make in makes:
        shared = rustloader.share(make(), key="given")
        note(f"kind {type(shared).__name__} {len(shared)} {shared[0]}")
    whole = rustloader.share(np.arange(6).reshape(2, 3))
    for view in (whole, whole.T, whole[::-1], whole[1:]):
        note(f"kind {rustloader.share(view, key='view').tolist()}")
    told(rustloader.share(iter(["a"]), key="generator"))
    while sum(" has " in line for line in lines()) < 2: time.sleep(0.01)
    """
    status, errors = wait_for_end(run(body))
    assert status == [0, 0], errors
    notes = noted(run, "kind")
    assert len(notes) == 24 and all(notes.count(line) in (2, 4) for line in notes), notes
    assert [line for line in notes if "[[" in line and notes.count(line) == 2] and "kind [[3, 4, 5]]" in notes
    assert "kind [[0, 3], [1, 4], [2, 5]]" in notes and "kind [[3, 4, 5], [0, 1, 2]]" in notes


def test_keys_in_different_orders_and_a_rank_that_is_ahead(run):
    """A rank that has built an object does not wait for the others."""
    body = """
    for key in ("ab" if rank == "0" else "ba"):
        told(rustloader.share(lambda: [key], key=key))
    if rank == "0":
        told(rustloader.share(["first"], key="c"))
        note("first is done")
        wait_for("second is done")
    else:
        wait_for("first is done")
        told(rustloader.share(["first"], key="c"))
        note("second is done")
    """
    status, errors = wait_for_end(run(body))
    assert status == [0, 0], errors
    notes = noted(run, "has")
    assert len(notes) == 6 and all(notes.count(line) == 2 for line in notes), notes


STAGES = {
    "bound": 'at("_bind", after=lambda bound: bound and stop("meets"))',
    "building": 'real = build\ndef build():\n    stop("waits")\n    return real()',
    "built": 'at("_Server", before=lambda: stop("waits"))',
    "answering": 'at("send_fds", before=lambda: stop("waits"), owner=ranks.socket)',
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_is_killed(run, stage):
    """The next rank builds."""
    stop = """
def stop(word):
    note("stops")
    wait_for("1 " + word)
    end()
"""
    # A rank that is killed while it answers has its own object already.
    early = stage == "answering"
    body = SHARE + f"\nwhile sum(' has ' in line for line in lines()) < {3 + early}: time.sleep(0.01)"
    first = run(stop + STAGES[stage] + "\n" + body, 3, only=[0])
    assert wait_until(lambda: noted(run, "has" if early else "stops"), 60)
    second = run(body, 3, only=[1])
    status, errors = wait_for_end(first)
    assert status == [KILLED], errors
    # The rank that arrives first builds: the restarted one must arrive later.
    assert wait_until(lambda: "1 builds" in run.notes(), 60)
    # An elastic launcher restarts the rank like this.
    status, errors = wait_for_end(second + run(body, 3, only=[0, 2]))
    assert status == [0, 0, 0], errors
    notes = noted(run, "has")[early:]
    assert len(notes) == 3 and len(set(notes)) == 1 and notes[0].endswith("item 0 of 1"), run.notes()


def test_a_waiting_rank_that_is_killed_and_restarted(run):
    builder = """
    def build():
        note("builds")
        wait_for("again")
        return ["a"]
    told(rustloader.share(build, key="train"))
    while sum(" has " in line for line in lines()) < 3: time.sleep(0.01)
    """
    first = run(builder, 3, only=[0])
    assert wait_until(lambda: "0 builds" in run.notes(), 60)
    second = run(SHARE, 3, only=[1])
    assert wait_until(lambda: "1 waits" in run.notes(), 60)
    os.kill(second[0].pid, signal.SIGKILL)
    assert wait_for_end(second)[0] == [KILLED]
    others = run("note('again')\n" + SHARE, 3, only=[1, 2])
    status, errors = wait_for_end(first + others)
    assert status == [0, 0, 0] and len(set(noted(run, "has"))) == 1, errors
    assert len(noted(run, "builds")) == 1


def test_an_error_while_building_is_raised_in_every_rank(run):
    status, errors = wait_for_end(run("rustloader.share(lambda: 1 // 0, key='train')"))
    assert status == [1, 1] and all("ZeroDivisionError" in text for text in errors), errors


def test_a_rank_that_never_finishes_is_a_timeout(run):
    body = """
    def build():
        note("builds")
        time.sleep(300)
    rustloader.share(build, key="train", timeout=2)
    """
    run(body, only=[0])
    assert wait_until(lambda: "0 builds" in run.notes(), 60)
    status, errors = wait_for_end(run(body, only=[1]))
    text = "TimeoutError: share(key='train'): the rank of this machine that builds the object did not finish within 2 s"
    assert status == [1] and text in errors[0], errors


def test_a_wait_without_a_limit_consists_of_shorter_ones(run):
    body = """
    def build():
        note("builds")
        while lines().count("1 waits") < 5: time.sleep(0.01)
        return ["built"]
    # The fifth wait is long, so that the answer does not come just as it expires.
    def before_wait():
        ranks._MAX_WAIT = 0.05 if lines().count("1 waits") < 4 else 1e6
    at("_bind", before=before_wait)
    told(rustloader.share(build, key="train", timeout=float("inf")))
    while sum(" has " in line for line in lines()) < 2: time.sleep(0.01)
    """
    first = run(body, only=[0])
    assert wait_until(lambda: "0 builds" in run.notes(), 60)
    status, errors = wait_for_end([*first, *run(body, only=[1])])
    assert status == [0, 0], errors
    assert noted(run, "builds") == ["builds"], run.notes()


SECONDS, BYTES = "timeout must be a number of seconds, 0 or more", "threshold must be a number of bytes, 0 or more"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        *(("timeout", value, SECONDS) for value in (-1, -0.001, float("nan"), float("-inf"))),
        *(("threshold", value, BYTES) for value in ("1MiB", -1, float("nan"), None)),
        ("key", 5, "key must be a str"),
    ],
)
def test_invalid_arguments_are_refused(name, value, text):
    with pytest.raises(TypeError if name == "key" else ValueError, match=f"^{text}, got {value!r}$"):
        share(["a"], **{name: value})


@pytest.mark.parametrize("when", ["building", "serving"])
def test_forked_children_do_not_hold_the_name(run, when):
    body = f"""
    def forked():
        if rank == "0":
            pid = os.fork()
            if pid == 0:
                note(f"child {{os.getpid()}}")
                os.close(1), os.close(2)
                time.sleep(300)
                os._exit(0)
            wait_for(f"child {{pid}}")
            wait_for("go")
            end()
    def build():
        {when == "building"} and forked()
        return [rank]
    told(rustloader.share(build, key="train", timeout=60))
    note("go on")
    forked()
    """
    first = run(body, only=[0])
    assert wait_until(lambda: noted(run, "child"), 60)
    (pid,) = (int(line.split()[1]) for line in noted(run, "child"))
    try:
        with run.file.open("a") as file:
            file.write("x go\n")
        assert wait_for_end(first)[0] == [KILLED]
        status, errors = wait_for_end(run(body, only=[1]))
        assert status == [0] and noted(run, "has")[-1].endswith("1 1"), errors
    finally:
        os.kill(pid, signal.SIGKILL)


def test_torchrun(tmp_path):
    program, notes = tmp_path / "program.py", tmp_path / "notes"
    notes.touch()
    waits = "\nwhile sum(' has ' in line for line in lines()) < 2: time.sleep(0.01)"
    program.write_text(HEAD + SHARE + waits)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(program)], env={**os.environ, "NOTES": str(notes)}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    lines = [line.partition(" ")[2] for line in notes.read_text().splitlines()]
    has = [line for line in lines if line.startswith("has")]
    assert lines.count("builds") == 1 and len(has) == 2 and has[0] == has[1], lines


def test_datasets_share_each_attribute_by_its_name(run):
    body = """
    from torch.utils.data import ConcatDataset, Dataset
    class Data(Dataset):
        def __init__(self, start):
            self.names = [str(start + number) for number in range(10_000)]
        def __len__(self):
            return len(self.names)
    whole = rustloader.share(ConcatDataset([Data(0), Data(7)]), key="train", threshold=100_000)
    for part in whole.datasets:
        told(part.names)
    while sum(" has " in line for line in lines()) < 4: time.sleep(0.01)
    """
    status, errors = wait_for_end(run(body))
    assert status == [0, 0], errors
    notes = noted(run, "has")
    assert len(set(notes)) == 2 and all(notes.count(line) == 2 for line in notes), notes


MEET = """
    def meet(word):
        note(word)
        while sum(line.endswith(word) for line in lines()) < 2: time.sleep(0.01)
"""


def test_ranks_share_one_cache(run):
    body = """
    import torch
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 100
        def __getitem__(self, index):
            return torch.full((10,), index)
    cached, own = rustloader.cache(Data(), key="train"), range(int(rank), 100, 2)
    loader = rustloader.DataLoader(torch.utils.data.Subset(cached, own), batch_size=5, num_workers=1)
    assert torch.cat(list(loader))[:, 0].tolist() == [*own]
    meet("filled")
    assert all(int(cached[n][0]) == n for n in range(100))
    meet("read")
    note(f"cache {os.fstat(cached.table.fileno()).st_ino} {cached.usage().hits} {cached.usage().misses}")
    """
    status, errors = wait_for_end(run(MEET + body))
    assert status == [0, 0], errors
    one, other = noted(run, "cache")
    assert one == other and one.split()[2:] == ["200", "100"], (one, other)


def test_ranks_with_different_datasets_share_no_cache(run):
    body = """
    try:
        rustloader.cache(range(98 + int(rank)), key="train")
    finally:
        meet("came")
    """
    status, errors = wait_for_end(run(MEET + body))
    assert sorted(status) == [0, 1] and "all ranks must make the same calls with a key" in "".join(errors), errors


# In this process


@pytest.fixture
def two(monkeypatch, request):
    """This process is rank 0 of 2."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_PORT", f"{os.getpid()}-{request.node.name}")
    yield
    ranks._at_exit()
    ranks._uses.clear()
    # A thread that has served all ranks ends by itself.
    assert wait_until(lambda: count_threads() == 0) and not ranks._own and not ranks._servers


def count_threads():
    return sum(thread.name == "rustloader-share" for thread in threading.enumerate())


def address(key):
    """The name of the next use of a key."""
    name = ranks._address(key, launchers.run_name())
    ranks._uses[key] -= 1
    return name


def connected(name, data=b""):
    client = socket.socket(socket.AF_UNIX)
    try:
        client.settimeout(60)
        client.connect(name)
        if data:  # sending nothing fails, too, if the other end has closed
            client.sendall(data)
    except OSError:
        client.close()
        raise
    return client


def is_dropped(client):
    """True if the other end closes the connection without an answer."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_peers_that_send_nothing_or_garbage_block_no_rank(two):
    name = address("x")
    shared = share(["a"], key="x")
    assert count_threads() == 1
    silent, gone = connected(name), connected(name)
    gone.close()
    with silent, connected(name, b"GET / HTTP/1.0\r\n") as garbage, connected(name, ranks._HELLO + b"1") as good:
        assert is_dropped(garbage)
        answer, fds, _, _ = socket.recv_fds(good, 1, 1)
        assert answer == b"1" and os.fstat(fds[0]).st_ino == os.fstat(shared.store.fileno()).st_ino
        os.close(fds[0])
        # All ranks have connected.
        assert is_dropped(silent) and wait_until(lambda: count_threads() == 0)
    with pytest.raises(ConnectionRefusedError):
        connected(name)


def test_a_rank_that_connects_twice_counts_once(two, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    name = address("x")
    assert share(["a"], key="x") == ["a"]
    for rank in (b"1", b"1", b"2"):
        with connected(name, ranks._HELLO + rank) as client:
            _, fds, _, _ = socket.recv_fds(client, 1, 1)
            os.close(fds[0])
    assert wait_until(lambda: count_threads() == 0)


def test_many_silent_peers_are_dropped_oldest_first(two, monkeypatch):
    monkeypatch.setattr(ranks, "_MAX_WAITING", 3)
    name = address("x")
    assert share(["a"], key="x") == ["a"]
    clients = [connected(name) for _ in range(4)]
    assert is_dropped(clients[0])
    with connected(name, ranks._HELLO + b"1") as good:
        _, fds, _, _ = socket.recv_fds(good, 1, 1)
        os.close(fds[0])
    for client in clients:
        client.close()


@pytest.mark.warns
def test_ranks_that_do_not_connect_are_reported(two, caplog):
    share(["a"], key="x", timeout=0.05)
    assert wait_until(lambda: count_threads() == 0)
    text = "share(key='x'): only 1 of 2 ranks of this machine connected within 0 s; later ranks build their own copies"
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [text]


@pytest.mark.warns
def test_without_the_name_of_a_run_each_rank_has_a_copy(two, caplog, monkeypatch):
    monkeypatch.delenv("MASTER_PORT")
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    assert share(lambda: ["a"], key="x") == ["a"]
    assert "nothing in the environment names the run" in caplog.text and count_threads() == 0


def test_runs_users_keys_and_uses_have_names_of_their_own(two, monkeypatch):
    def both():
        names = [ranks._address("a", launchers.run_name()), ranks._address("a", launchers.run_name())]
        ranks._uses.clear()
        return names

    names = [*both(), address("b"), address("a1"), address("\udcff")]
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "17")
        names += both()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    names += both()
    assert len(set(names)) == len(names) == 17


def test_a_process_of_another_user_is_refused(two, monkeypatch):
    """Both ends ask the kernel who the other is."""
    monkeypatch.setattr(ranks, "_peer", lambda sock: (4711, os.geteuid() + 1))
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(address("squatted"))
        squatter.listen()
        with pytest.raises(PermissionError, match=r"'squatted'\): the name belongs to process 4711 of user"):
            share(["a"], key="squatted")
    name = address("asked")
    assert share(["a"], key="asked") == ["a"]
    # The client sends nothing: the other end may close first.
    with connected(name) as client:
        assert is_dropped(client)
        # The thread that has dropped it ends by itself.
        assert wait_until(lambda: count_threads() == 1, 60)


def test_the_kernel_names_the_peer():
    one, other = socket.socketpair()
    with one, other:
        assert ranks._peer(one) == (os.getpid(), os.geteuid())


def answering(name, answer):
    """Accepts one connection at a name, and calls answer(client)."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(name)
    server.listen()

    def serve():
        with server, server.accept()[0] as client:
            client.recv(100)
            answer(client)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_answers_that_are_no_shared_object(two, monkeypatch):
    with open("/proc/self/exe", "rb") as file:
        thread = answering(address("x"), lambda client: socket.send_fds(client, [b"1"], [file.fileno()]))
        with pytest.raises(ValueError, match="not a sealed file in memory"):
            share(["a"], key="x")
        thread.join()
    thread = answering(address("x"), lambda client: client.sendall(b"HTTP/1.0 400"))
    with pytest.raises(OSError, match=f"process {os.getpid()} sent no usable descriptor: use another key"):
        share(["a"], key="x")
    thread.join()
    # The server exits without an answer, and the name is free.
    thread = answering(address("x"), lambda client: None)
    assert share(["a"], key="x") == ["a"]
    thread.join()


def test_no_free_descriptor_is_an_error_with_a_remedy(two):
    def body():
        import resource

        sent, _ = os.pipe()
        ready, limited = threading.Event(), threading.Event()

        def answer(client):
            ready.set()
            limited.wait()
            socket.send_fds(client, [b"1"], [sent])

        thread = answering(address("x"), answer)
        real = ranks.socket.recv_fds

        def receive(*args):
            ready.wait()
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            limited.set()
            return real(*args)

        ranks.socket.recv_fds = receive
        try:
            share(["a"], key="x")
        except OSError as error:
            return [error.errno, str(error)]
        finally:
            ranks.socket.recv_fds = real
            thread.join()

    number, text = in_child(lambda: {"value": body()})["value"]
    assert number == 24 and "ulimit -n" in text


def test_different_objects_for_a_key_are_an_error():
    def differ(own, shared):
        with pytest.raises(ValueError, match=r"share\(key='k'\): this rank passes .* must make the same calls"):
            agreement.check("k", own, shared)

    names = [str(number) for number in range(100)]
    differ(names, share(names[1:]))
    differ(names, share(tuple(names)))
    differ(names, share([*names[:-1], "x"]))
    differ(dict.fromkeys(names), share(dict.fromkeys(names[::-1])))
    differ(np.arange(5), share(np.arange(5.0)))
    differ(np.arange(6).reshape(2, 3), share(np.arange(6).reshape(3, 2)))
    differ(np.arange(5), share(np.arange(1, 6)))
    differ(torch.arange(5), share(torch.arange(1, 6)))
    differ(["x" * 1000], share(["y" * 1000]))
    mixed = [float("nan"), np.zeros(3), None, {"a": np.zeros(2)}]
    arrays = np.array([np.nan]), np.zeros((2, 0)), np.array(5), np.array(["2020-01-01"], "M8[D]"), np.zeros(2, "i4,f8")
    for same in (
        names,
        tuple(names),
        {1: 2},
        mixed,
        *arrays,
        torch.tensor(1.5),
        torch.zeros(2, dtype=torch.bfloat16),
        [],
    ):
        agreement.check("k", same, share(same))
    agreement.check("k", lambda: 0, share(names))


def test_attributes_of_other_ranks_datasets_are_compared(run):
    body = """
    class Data:
        def __init__(self):
            self.names = [rank] * 1000
        def __getitem__(self, index):
            return self.names[index]
    try:
        rustloader.share(Data(), key="k", threshold=1000)
    except ValueError as error:
        note("differs")
        raise
    wait_for("differs")
    """
    status, errors = wait_for_end(run(body))
    assert sorted(status) == [0, 1], errors
    assert "share(key='k/Data.names'): this rank passes " in "".join(errors), errors
    assert "rustloader.share() failed at Data.names" in "".join(errors), errors


def test_without_a_launcher_a_key_does_nothing(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert share(lambda: ["a"], key="x") == ["a"] == share(["a"], key="x")
    assert count_threads() == 0
    with pytest.raises(TypeError, match="the function returns a dataset, a TensorDataset"):
        share(lambda: torch.utils.data.TensorDataset(torch.zeros(2)), key="x")


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "8"}, None),
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"}, (4, "2")),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, (None, "1")),
        ({"WORLD_SIZE": "2"}, (None, f"pid {os.getpid()}")),
    ],
)
def test_local_ranks_are_those_of_the_launcher(monkeypatch, environment, expected):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "MPI_", "LOCAL_", "WORLD_")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launchers.local_ranks() == expected
