//! How much memory can still be had before the kernel refuses or kills.

use std::path::{Component, Path, PathBuf};

use super::failpoint::failpoint;
use super::read_file;

/// Where the kernel shows its numbers. Tests point it to files of their own.
#[derive(Clone, Debug)]
pub struct MemoryRoots {
    /// `/proc`.
    pub proc_: PathBuf,
    /// `/sys/fs/cgroup`.
    pub cgroup: PathBuf,
}

impl Default for MemoryRoots {
    /// The kernel's own; for tests with failpoints, trees under the directory that `RUSTLOADER_MEMORY_ROOT` names.
    fn default() -> Self {
        #[cfg(feature = "failpoints")]
        if let Some(root) = super::failpoint::environment(c"RUSTLOADER_MEMORY_ROOT") {
            let root = PathBuf::from(root);
            return Self { proc_: root.join("proc"), cgroup: root.join("cgroup") };
        }
        Self { proc_: "/proc".into(), cgroup: "/sys/fs/cgroup".into() }
    }
}

/// What is left below the tightest limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Headroom {
    /// How many bytes; `u64::MAX` where no limit is known.
    pub bytes: u64,
    /// Which limit, in words, with its size.
    pub limit: String,
}

impl Headroom {
    /// This one or the other, whichever is tighter.
    fn or_less(self, other: Option<Self>) -> Self {
        other.into_iter().fold(self, |least, other| if other.bytes < least.bytes { other } else { least })
    }
}

/// The least of what the machine has (free and reclaimable memory, and swap) and of what each level of the process's
/// memory cgroup (v1 and v2) lets it take. Page cache that can be dropped counts as free. A file that is missing or
/// unreadable is no limit. Reads a handful of small files: some tens of microseconds.
pub fn available(roots: &MemoryRoots) -> Headroom {
    let nothing = Headroom { bytes: u64::MAX, limit: "no limit of memory is known".to_owned() };
    let least = nothing.or_less(machine(roots));
    let membership = text(&roots.proc_.join("self/cgroup")).unwrap_or_default();
    membership
        .lines()
        .flat_map(|line| cgroup_levels(roots, line))
        .fold(least, |least, room| least.or_less(Some(room)))
}

/// The memory and swap of the machine in bytes, used or not.
pub fn total_ram_and_swap() -> u64 {
    // SAFETY: a sysinfo of zeroes is a valid one.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is a struct of ours for the kernel to fill. Refused, it stays 0.
    failpoint!("sysinfo", -1, unsafe { libc::sysinfo(&mut info) });
    // The fields' types differ between architectures.
    let unit = u64::from(info.mem_unit).max(1);
    (info.totalram as u64).saturating_add(info.totalswap as u64).saturating_mul(unit)
}

fn machine(roots: &MemoryRoots) -> Option<Headroom> {
    let text = text(&roots.proc_.join("meminfo"))?;
    let bytes = |name| field(&text, name).map(|kib| kib.saturating_mul(1024));
    let (total, swap) = (bytes("MemTotal:")?, bytes("SwapTotal:").unwrap_or(0));
    let free = bytes("MemAvailable:").or_else(|| bytes("MemFree:"))?;
    Some(Headroom {
        bytes: free.saturating_add(bytes("SwapFree:").unwrap_or(0)),
        limit: format!("the machine has {total} bytes of memory and {swap} bytes of swap"),
    })
}

/// What each level of the cgroup in a line of /proc/self/cgroup leaves.
fn cgroup_levels(roots: &MemoryRoots, line: &str) -> Vec<Headroom> {
    let mut parts = line.splitn(3, ':');
    let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
        return Vec::new();
    };
    let (base, files) = match controllers {
        "" if roots.cgroup.join("cgroup.controllers").exists() => (roots.cgroup.clone(), &V2),
        "" => (roots.cgroup.join("unified"), &V2),
        _ if controllers.split(',').any(|name| name == "memory") => (roots.cgroup.join("memory"), &V1),
        _ => return Vec::new(),
    };
    // In a container the path may name levels that are not mounted here ("/docker/1f.."), or lie above what is
    // ("/../x"); the mount's root then is the container's own level.
    let names = Path::new(path).components().filter_map(|component| match component {
        Component::Normal(name) => Some(name),
        _ => None,
    });
    let mut level = base.clone();
    let mut levels = vec![level.clone()];
    for name in names {
        level.push(name);
        levels.push(level.clone());
    }
    levels.iter().filter_map(|level| files.headroom(level, &base)).collect()
}

/// The names of a version's files.
struct Files {
    limit: &'static str,
    usage: &'static str,
    /// The line of `memory.stat` with the page cache, of this level and those below, that was not used lately.
    cache: &'static str,
}

const V2: Files = Files { limit: "memory.max", usage: "memory.current", cache: "inactive_file" };
const V1: Files =
    Files { limit: "memory.limit_in_bytes", usage: "memory.usage_in_bytes", cache: "total_inactive_file" };

impl Files {
    fn headroom(&self, level: &Path, base: &Path) -> Option<Headroom> {
        let number = |name| text(&level.join(name))?.trim().parse::<u64>().ok();
        // "max" is no number; v1 says "none" by a number near 2^63.
        let limit = number(self.limit).filter(|limit| *limit < 1 << 62)?;
        let usage = number(self.usage)?;
        let stat = text(&level.join("memory.stat")).unwrap_or_default();
        let cache = field(&stat, self.cache).unwrap_or(0).min(usage);
        let name = Path::new("/").join(level.strip_prefix(base).unwrap_or(level));
        Some(Headroom {
            bytes: limit.saturating_sub(usage - cache),
            limit: format!(
                "the memory cgroup {} is limited to {limit} bytes ({})",
                name.display(),
                self.limit
            ),
        })
    }
}

/// A file's content; `None` where it cannot be read.
fn text(path: &Path) -> Option<String> {
    String::from_utf8(read_file(path).ok()?).ok()
}

/// The number behind `name` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_ascii_whitespace);
    let mut words = lines.find_map(|mut words| (words.next() == Some(name)).then_some(words))?;
    words.next()?.parse().ok()
}
