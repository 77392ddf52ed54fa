"""The counters of processes that a memory cgroup's OOM killer has killed."""

import contextlib
import os
import subprocess
import sys

import pytest
from cgroups import memory_cgroup, remove
from support import wait_until

from rustloader.workers.memory_events import OomKills

pytestmark = pytest.mark.ours


class Tree:
    """Fake file systems of the kernel."""

    def __init__(self, folder, memberships, is_unified=True):
        self.folder = folder
        self.write({"../proc/self/cgroup": memberships + "\n"})
        self.write({"cgroup.controllers": "memory\n"} if is_unified else {})

    def write(self, files):
        """Writes files of the cgroup file system. A number stands for the text with this number of kills."""
        for path, content in files.items():
            file = self.folder / "cgroup" / path
            (self.folder / "cgroup").mkdir(exist_ok=True)
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, int):
                other = "oom_kill_disable 0\nunder_oom 0\n" if "oom_control" in path else "low 0\nhigh 9\noom 7\n"
                content = f"{other}oom_kill {content}\n"
            file.write_text(content)

    def kills(self):
        return OomKills(str(self.folder / "proc"), str(self.folder / "cgroup"))


V1, V2, LOCAL = "memory.oom_control", "memory.events", "memory.events.local"
# The cgroups of the process, the files at first, and steps: files that change, and whether that counts as growth.
GROWTH = {
    "version 2": (
        "0::/a/b",
        {f"a/b/{V2}": 3},
        # Each increase counts once.
        [({}, False), ({f"a/b/{V2}": 4}, True), ({}, False), ({f"a/b/{V2}": 6}, True), ({}, False)],
    ),
    "version 1": (
        "9:cpu,cpuacct:/x\n4:memory:/a\n0::/",
        {f"memory/a/{V1}": 0, f"memory/x/{V1}": 0},
        # /x is not the memory cgroup of this process.
        [({f"memory/x/{V1}": 1}, False), ({f"memory/a/{V1}": 1}, True), ({}, False)],
    ),
    "version 1 with other controllers": ("4:cpu,memory:/a", {f"memory/a/{V1}": 1}, [({f"memory/a/{V1}": 2}, True)]),
    "version 1, levels above": (
        "4:memory:/a/b",
        {f"memory/{V1}": 2, f"memory/a/{V1}": 2, f"memory/a/b/{V1}": 2},
        [({f"memory/{path}{V1}": 3}, True) for path in ("", "a/", "a/b/")]
        + [({f"memory/a/b/c/{V1}": 3, f"memory/b/{V1}": 3}, False)],
    ),
    "both versions": ("4:cpu:/a\n0::/a", {f"unified/a/{V2}": 1}, [({f"unified/a/{V2}": 2}, True)]),
    # Of a cgroup above, only its own processes count: a sibling container was out of memory.
    "a sibling": (
        "0::/a/b",
        {f"a/b/{V2}": 0, f"a/b/{LOCAL}": 0, f"a/{V2}": 0, f"a/{LOCAL}": 0},
        [({f"a/{V2}": 5}, False), ({f"a/{V2}": 6, f"a/{LOCAL}": 1}, True), ({f"a/b/{V2}": 1}, True)],
    ),
    "a path that is not mounted in a container": ("0::/docker/1f3a", {V2: 0}, [({V2: 1}, True)]),
    "a path above the root of the mount": ("0::/../x", {f"x/{V2}": 0}, [({f"x/{V2}": 1}, True)]),
    "a counter that shrinks": ("0::/a", {f"a/{V2}": 5}, [({f"a/{V2}": 1}, False), ({f"a/{V2}": 2}, True)]),
    "a new cgroup": (
        "0::/a",
        {f"a/{V2}": 1, f"b/{V2}": 7},
        [({"../proc/self/cgroup": "0::/b\n"}, False), ({f"b/{V2}": 8}, True)],
    ),
}


@pytest.mark.parametrize("name", GROWTH)
def test_growth_of_a_counter(tmp_path, name):
    memberships, files, steps = GROWTH[name]
    tree = Tree(tmp_path, memberships, not any(path.startswith(("memory/", "unified/")) for path in files))
    tree.write(files)
    kills = tree.kills()
    for at, (changes, grew) in enumerate(steps):
        tree.write(changes)
        assert kills.grew() is grew, at


def test_files_that_are_missing_or_strange(tmp_path):
    tree = Tree(tmp_path, "no line of the kernel\n::\n\n4:memory\n0::/a")
    kills = tree.kills()
    assert not kills.grew()
    for text in ("", "oom_kill\n", "oom_kill many\n", "oom_kill -3\n", "oom_killed 4\n", "\xff\xfe\n"):
        tree.write({f"a/{V2}": text})
        assert not kills.grew(), text
    tree.write({f"a/{V2}": 2})
    assert not kills.grew()
    (tmp_path / "cgroup/a/memory.events").unlink()
    assert not kills.grew()
    (tmp_path / "cgroup/a/memory.events").mkdir()
    assert not kills.grew()
    (tmp_path / "proc/self/cgroup").unlink()
    assert not kills.grew() and not tree.kills().grew()


# Allocates memory until it is killed.
GREEDY = "taken = []\nwhile True: taken.append(b'x' * (1 << 20))"


@pytest.fixture
def small_cgroup():
    """The folder of a memory cgroup with a limit of 48 MiB."""
    parent, limit_file, _ = memory_cgroup()
    folder = f"{parent}/rustloader-oom-{os.getpid()}"
    try:
        os.mkdir(folder)
        os.stat(f"{folder}/cgroup.procs")
        for name in (limit_file, "memory.memsw.limit_in_bytes", "memory.swap.max"):
            if os.path.exists(f"{folder}/{name}"):
                with open(f"{folder}/{name}", "w") as file:
                    file.write("0" if name == "memory.swap.max" else str(48 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        pytest.skip(f"no memory cgroup can be made: {error}")
    yield folder
    assert wait_until(lambda: remove(folder)), "the cgroup could not be removed"


# Runs in the cgroup. At the limit, the kernel kills the child, which is larger and has a higher OOM score.
PARENT = f"""
import os, subprocess, sys
from rustloader.workers.memory_events import OomKills
with open(os.path.join(sys.argv[1], "cgroup.procs"), "w") as file:
    file.write(str(os.getpid()))
def child(code):
    def first(): open("/proc/self/oom_score_adj", "w").write("1000")
    return subprocess.run([sys.executable, "-c", code], preexec_fn=first).returncode
kills = OomKills()
print(kills.grew(), child("import os; os.kill(os.getpid(), 9)"), kills.grew())
print(child({GREEDY!r}), kills.grew(), kills.grew())
"""


def test_a_process_that_a_memory_cgroup_kills_is_counted(small_cgroup):
    script = subprocess.run([sys.executable, "-c", PARENT, small_cgroup], capture_output=True, text=True, timeout=200)
    assert (script.returncode, script.stdout) == (0, "False -9 False\n-9 True False\n"), script.stderr
