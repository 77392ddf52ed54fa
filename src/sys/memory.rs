//! The memory that is left before the kernel refuses allocations or kills processes.

use super::cgroup::{Level, Roots, levels, text};
use super::checked;
use super::failpoint::failpoint;

/// The memory left below a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Headroom {
    /// Bytes left; `u64::MAX` without a known limit.
    pub bytes: u64,
    /// The limit itself, in bytes.
    pub size: u64,
    /// True for the limit of a cgroup, false for that of the machine.
    pub is_cgroup: bool,
    /// A description of the limit, with its size.
    pub limit: String,
}

/// Returns the entry of [`limits`] with the least memory left.
pub fn available(roots: &Roots) -> Headroom {
    let unknown =
        || Headroom { bytes: u64::MAX, size: u64::MAX, is_cgroup: false, limit: "no memory limit is known".to_owned() };
    limits(roots).into_iter().min_by_key(|room| room.bytes).unwrap_or_else(unknown)
}

/// Returns the headroom of the machine (free and reclaimable memory, and swap) and of each level of the process's
/// memory cgroup (v1 and v2). Reclaimable page cache counts as free. A missing or unreadable file counts as no limit.
/// Reads a few small files, which takes tens of microseconds.
pub fn limits(roots: &Roots) -> Vec<Headroom> {
    let levels = levels(roots, "memory");
    machine(roots).into_iter().chain(levels.iter().filter_map(of_level)).collect()
}

/// Returns the total memory and swap of the machine in bytes, used or not.
pub fn total_ram_and_swap() -> u64 {
    // SAFETY: an all-zero sysinfo is valid.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is a local struct that the kernel fills. If the call is refused, the struct stays zeroed.
    let _ = failpoint!("sysinfo", checked(unsafe { libc::sysinfo(&mut info) }));
    // The fields' types differ between architectures.
    let unit = u64::from(info.mem_unit).max(1);
    (info.totalram as u64).saturating_add(info.totalswap as u64).saturating_mul(unit)
}

fn machine(roots: &Roots) -> Option<Headroom> {
    let text = text(&roots.proc_.join("meminfo"))?;
    let bytes = |name| field(&text, name).map(|kib| kib.saturating_mul(1024));
    let (total, swap) = (bytes("MemTotal:")?, bytes("SwapTotal:").unwrap_or(0));
    let free = bytes("MemAvailable:").or_else(|| bytes("MemFree:"))?;
    Some(Headroom {
        bytes: free.saturating_add(bytes("SwapFree:").unwrap_or(0)),
        size: total.saturating_add(swap),
        is_cgroup: false,
        limit: format!("the machine has {total} bytes of memory and {swap} bytes of swap"),
    })
}

/// Returns the headroom of a level of a memory cgroup; `None` if the level has no limit. Page cache of this level and
/// of the levels below it counts as free, even pages that were read more than once ("active"). After a few epochs, page
/// cache often fills the remainder of the limit, and the kernel drops page cache before it refuses memory.
fn of_level(level: &Level) -> Option<Headroom> {
    let (file, usage, caches) = if level.is_v2 {
        ("memory.max", "memory.current", ["inactive_file", "active_file"])
    } else {
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ["total_inactive_file", "total_active_file"])
    };
    let number = |name| level.text(name)?.parse::<u64>().ok();
    // In v2 "max" is not a number; in v1 the default is near 2^63.
    let size = number(file).filter(|size| *size < 1 << 62)?;
    let usage = number(usage)?;
    let stat = level.text("memory.stat").unwrap_or_default();
    let cache = caches.iter().filter_map(|cache| field(&stat, cache)).fold(0, u64::saturating_add).min(usage);
    Some(Headroom {
        bytes: size.saturating_sub(usage - cache),
        size,
        is_cgroup: true,
        limit: format!("the memory cgroup {} is limited to {size} bytes ({file})", level.name.display()),
    })
}

/// Returns the number after `name` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_ascii_whitespace);
    let mut words = lines.find_map(|mut words| (words.next() == Some(name)).then_some(words))?;
    words.next()?.parse().ok()
}
