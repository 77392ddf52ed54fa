//! Memory limits, read from made-up /proc and /sys/fs/cgroup trees.

use std::path::{Path, PathBuf};

use rustloader::sys::cgroup::{Roots, cpu_quota};
use rustloader::sys::memory::{Headroom, available, limits, total_ram_and_swap};

const MEMINFO: &str =
    "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  600 kB\nSwapTotal:  50 kB\nSwapFree:  20 kB\n";
const MACHINE: u64 = 620 * 1024;

/// A new tree under the target directory.
struct Tree(PathBuf);

impl Tree {
    fn new(name: &str) -> Self {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("sys_memory_{name}_{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        let tree = Self(root);
        tree.file("proc/meminfo", MEMINFO)
    }

    fn file(self, path: &str, text: &str) -> Self {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
        self
    }

    /// Adds a v2 level with a limit and a usage.
    fn v2(self, level: &str, max: &str, current: u64) -> Self {
        self.file(&format!("cgroup{level}/memory.max"), &format!("{max}\n"))
            .file(&format!("cgroup{level}/memory.current"), &format!("{current}\n"))
    }

    fn v1(self, level: &str, limit: u64, usage: u64) -> Self {
        self.file(&format!("cgroup/memory{level}/memory.limit_in_bytes"), &format!("{limit}\n"))
            .file(&format!("cgroup/memory{level}/memory.usage_in_bytes"), &format!("{usage}\n"))
    }

    fn roots(&self) -> Roots {
        Roots { proc_: self.0.join("proc"), cgroup: self.0.join("cgroup") }
    }

    fn available(&self) -> Headroom {
        available(&self.roots())
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_machine_alone() {
    let room = Tree::new("machine").available();
    assert_eq!(room.bytes, MACHINE);
    assert_eq!(room.limit, "the machine has 1024000 bytes of memory and 51200 bytes of swap");
}

#[test]
fn nothing_to_read_is_no_limit() {
    let nowhere = PathBuf::from("/nonexistent");
    let room = available(&Roots { proc_: nowhere.clone(), cgroup: nowhere });
    assert_eq!(room.bytes, u64::MAX);
}

#[test]
fn every_level_of_v2_counts() {
    let tree = Tree::new("v2")
        .file("proc/self/cgroup", "0::/a/b\n")
        .file("cgroup/cgroup.controllers", "memory\n")
        .v2("/a", "300000", 100_000)
        .v2("/a/b", "max", 100_000);
    let room = tree.available();
    assert_eq!(room.bytes, 200_000);
    assert_eq!(room.limit, "the memory cgroup /a is limited to 300000 bytes (memory.max)");
    let sizes: Vec<_> = limits(&tree.roots()).iter().map(|room| (room.is_cgroup, room.size, room.bytes)).collect();
    assert_eq!(sizes, [(false, 1050 * 1024, MACHINE), (true, 300_000, 200_000)]);
    let tree = tree
        .v2("/a/b", "150000", 140_000)
        .file("cgroup/a/b/memory.stat", "anon 1\ninactive_file 2000\nactive_file 3000\n");
    let room = tree.available();
    assert_eq!(room.bytes, 15_000);
    assert_eq!(room.limit, "the memory cgroup /a/b is limited to 150000 bytes (memory.max)");
}

#[test]
fn a_limit_counts_up_to_the_machine_and_a_container_sees_its_own_level_as_the_root() {
    for (path, level, max, current, bytes) in [
        ("/a", "/a", "99999999999", 0, MACHINE),
        ("/a", "/a", "1000", 2000, 0),
        ("/", "", "5000", 1000, 4000),
        ("/docker/0123", "", "5000", 1000, 4000),
        ("/../../elsewhere", "", "5000", 1000, 4000),
    ] {
        let tree = Tree::new("level")
            .file("proc/self/cgroup", &format!("0::{path}\n"))
            .file("cgroup/cgroup.controllers", "")
            .v2(level, max, current);
        let room = tree.available();
        assert_eq!(room.bytes, bytes, "{path} {max}");
        let root = "the memory cgroup / is limited to 5000 bytes (memory.max)";
        assert_eq!(room.limit == root, level.is_empty(), "{}", room.limit);
    }
}

#[test]
fn v1_has_its_own_files_and_its_own_value_for_no_limit() {
    let tree = Tree::new("v1")
        .file("proc/self/cgroup", "12:cpu,cpuacct:/x\n4:memory:/a/b\n0::/a\n")
        .v1("", 9_223_372_036_854_771_712, 10)
        .v1("/a", 20_000, 10_000)
        .file("cgroup/memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 1500\ntotal_active_file 500\n")
        .v1("/a/b", 9_223_372_036_854_771_712, 10);
    let room = tree.available();
    assert_eq!(room.bytes, 12_000);
    assert_eq!(room.limit, "the memory cgroup /a is limited to 20000 bytes (memory.limit_in_bytes)");
}

#[test]
fn the_tightest_cpu_quota_counts() {
    let tree = Tree::new("cpu_v2")
        .file("proc/self/cgroup", "0::/pod/container\n")
        .file("cgroup/cgroup.controllers", "cpu\n")
        .file("cgroup/cpu.max", "max 100000\n")
        .file("cgroup/pod/cpu.max", "150000 100000\n");
    assert_eq!(cpu_quota(&tree.roots()), Some(1.5));
    let tree = tree.file("cgroup/pod/container/cpu.max", "50000 100000\n");
    assert_eq!(cpu_quota(&tree.roots()), Some(0.5));
    let tree = Tree::new("cpu_v1")
        .file("proc/self/cgroup", "5:memory:/\n4:cpu,cpuacct:/job\n0::/\n")
        .file("cgroup/cpu/cpu.cfs_quota_us", "-1\n")
        .file("cgroup/cpu/cpu.cfs_period_us", "100000\n")
        .file("cgroup/cpu/job/cpu.cfs_quota_us", "50000\n")
        .file("cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
    assert_eq!(cpu_quota(&tree.roots()), Some(0.5));
}

#[test]
fn without_a_cpu_quota_there_is_none() {
    let tree = Tree::new("no_cpu")
        .file("proc/self/cgroup", "0::/\n")
        .file("cgroup/cgroup.controllers", "cpu\n")
        .file("cgroup/cpu.max", "max 100000\n");
    assert_eq!(cpu_quota(&tree.roots()), None);
    assert_eq!(cpu_quota(&Tree::new("no_cgroup").roots()), None);
}

#[test]
fn invalid_files_are_no_limit() {
    let tree = Tree::new("rubbish")
        .file("proc/self/cgroup", "what\n0::/a\n:::\n")
        .file("cgroup/cgroup.controllers", "")
        .file("cgroup/a/memory.max", "many")
        .file("proc/meminfo", "MemTotal:\nMemAvailable: x kB\n");
    assert_eq!(tree.available().bytes, u64::MAX);
}

#[test]
fn this_machine_has_memory() {
    let room = available(&Roots::default());
    assert!(room.bytes > 0 && room.bytes < u64::MAX, "{room:?}");
    assert!(total_ram_and_swap() >= 1 << 20);
}
