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

    def __init__(self, folder, memberships):
        self.folder = folder
        self.write("proc/self/cgroup", memberships)

    def write(self, path, text):
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def version_1(self, path, kills):
        text = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
        self.write(f"cgroup/memory{path}/memory.oom_control", text)

    def version_2(self, path, kills, local=None, base=""):
        """Writes the numbers of kills with and without those in the cgroups below."""
        for name, count in (("memory.events", kills), ("memory.events.local", local)):
            if count is not None:
                text = f"low 0\nhigh 9\nmax 99\noom 7\noom_kill {count}\noom_group_kill 5\n"
                self.write(f"cgroup{base}{path}/{name}", text)

    def kills(self):
        return OomKills(str(self.folder / "proc"), str(self.folder / "cgroup"))


@pytest.fixture
def tree(tmp_path):
    def make(memberships, unified=True):
        if unified:
            (tmp_path / "cgroup").mkdir()
            (tmp_path / "cgroup/cgroup.controllers").write_text("memory\n")
        return Tree(tmp_path, memberships)

    return make


def test_version_2(tree):
    cgroup = tree("0::/a/b\n")
    cgroup.version_2("/a/b", 3)
    kills = cgroup.kills()
    assert not kills.grew()
    cgroup.version_2("/a/b", 4)
    assert kills.grew()
    # Each increase counts once.
    assert not kills.grew()
    cgroup.version_2("/a/b", 6)
    assert kills.grew() and not kills.grew()


def test_version_1(tree):
    cgroup = tree("9:cpu,cpuacct:/x\n4:memory:/a\n0::/\n", unified=False)
    cgroup.version_1("/a", 0)
    # Not the memory cgroup of this process.
    cgroup.write("cgroup/memory/x/memory.oom_control", "oom_kill 0\n")
    kills = cgroup.kills()
    cgroup.write("cgroup/memory/x/memory.oom_control", "oom_kill 1\n")
    assert not kills.grew()
    cgroup.version_1("/a", 1)
    assert kills.grew() and not kills.grew()


def test_version_1_with_other_controllers_in_the_same_hierarchy(tree):
    cgroup = tree("4:cpu,memory:/a\n", unified=False)
    cgroup.version_1("/a", 1)
    kills = cgroup.kills()
    cgroup.version_1("/a", 2)
    assert kills.grew()


def test_both_versions_at_once(tree):
    cgroup = tree("4:cpu:/a\n0::/a\n", unified=False)
    cgroup.version_2("/a", 1, base="/unified")
    kills = cgroup.kills()
    cgroup.version_2("/a", 2, base="/unified")
    assert kills.grew()


def test_of_a_cgroup_above_only_its_own_processes_count(tree):
    """A sibling container was out of memory."""
    cgroup = tree("0::/a/b\n")
    cgroup.version_2("/a/b", 0, 0)
    cgroup.version_2("/a", 0, 0)
    kills = cgroup.kills()
    cgroup.version_2("/a", 5, 0)
    assert not kills.grew()
    cgroup.version_2("/a", 6, 1)
    assert kills.grew()
    # Kills in the process's own cgroup count.
    cgroup.version_2("/a/b", 1, 0)
    assert kills.grew()


def test_the_levels_above_count_in_version_1(tree):
    cgroup = tree("4:memory:/a/b\n", unified=False)
    for path in ("", "/a", "/a/b"):
        cgroup.version_1(path, 2)
    kills = cgroup.kills()
    for path in ("", "/a", "/a/b"):
        cgroup.version_1(path, 3)
        assert kills.grew(), path
    cgroup.version_1("/a/b/c", 3)
    cgroup.version_1("/b", 3)
    assert not kills.grew()


def test_in_a_container_the_path_may_not_be_mounted(tree):
    cgroup = tree("0::/docker/1f3a\n")
    cgroup.version_2("", 0)
    kills = cgroup.kills()
    cgroup.version_2("", 1)
    assert kills.grew()


def test_a_path_above_the_root_of_the_mount(tree):
    cgroup = tree("0::/../x\n")
    cgroup.version_2("/x", 0)
    kills = cgroup.kills()
    cgroup.version_2("/x", 1)
    assert kills.grew()


def test_a_counter_that_shrinks_begins_again(tree):
    cgroup = tree("0::/a\n")
    cgroup.version_2("/a", 5)
    kills = cgroup.kills()
    cgroup.version_2("/a", 1)
    assert not kills.grew()
    cgroup.version_2("/a", 2)
    assert kills.grew()


def test_a_new_cgroup_has_no_growth_at_first(tree):
    cgroup = tree("0::/a\n")
    cgroup.version_2("/a", 1)
    cgroup.version_2("/b", 7)
    kills = cgroup.kills()
    cgroup.write("proc/self/cgroup", "0::/b\n")
    assert not kills.grew()
    cgroup.version_2("/b", 8)
    assert kills.grew()


def test_files_that_are_missing_or_strange(tree):
    cgroup = tree("no line of the kernel\n::\n\n4:memory\n0::/a\n")
    kills = cgroup.kills()
    assert not kills.grew()
    for text in ("", "oom_kill\n", "oom_kill many\n", "oom_kill -3\n", "oom_killed 4\n", "\xff\xfe\n"):
        cgroup.write("cgroup/a/memory.events", text)
        assert not kills.grew(), text
    cgroup.version_2("/a", 2)
    assert not kills.grew()
    (cgroup.folder / "cgroup/a/memory.events").unlink()
    assert not kills.grew()
    (cgroup.folder / "cgroup/a/memory.events").mkdir()
    assert not kills.grew()
    (cgroup.folder / "proc/self/cgroup").unlink()
    assert not kills.grew() and not cgroup.kills().grew()


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
