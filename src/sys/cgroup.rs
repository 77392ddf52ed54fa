//! The cgroups of this process, versions 1 and 2, and their CPU quota.

use std::path::{Component, Path, PathBuf};

use super::read_file;

/// The root folders of the kernel's file systems. Tests use other folders.
#[derive(Clone, Debug)]
pub struct Roots {
    /// `/proc`.
    pub proc_: PathBuf,
    /// `/sys/fs/cgroup`.
    pub cgroup: PathBuf,
}

impl Default for Roots {
    /// Returns the system's roots. In tests with failpoints, returns subfolders of the folder that
    /// `RUSTLOADER_MEMORY_ROOT` names.
    fn default() -> Self {
        #[cfg(feature = "failpoints")]
        if let Some(root) = super::failpoint::environment(c"RUSTLOADER_MEMORY_ROOT") {
            let root = PathBuf::from(root);
            return Self { proc_: root.join("proc"), cgroup: root.join("cgroup") };
        }
        Self { proc_: "/proc".into(), cgroup: "/sys/fs/cgroup".into() }
    }
}

/// One level of a cgroup hierarchy.
pub(super) struct Level {
    /// True if the level belongs to version 2, whose files have other names.
    pub is_v2: bool,
    pub folder: PathBuf,
    /// The path of the level from the root of the hierarchy as this process sees it, such as "/a/b".
    pub name: PathBuf,
}

impl Level {
    /// Returns the trimmed text of a file of this level; `None` if it is unreadable.
    pub fn text(&self, file: &str) -> Option<String> {
        text(&self.folder.join(file)).map(|text| text.trim().to_owned())
    }

    /// Returns the number of cores that this level allows (CPU time per unit of wall time); `None` without a quota.
    fn cpu_quota(&self) -> Option<f64> {
        let (quota, period) = if self.is_v2 {
            let text = self.text("cpu.max")?;
            let (quota, period) = text.split_once(' ')?;
            (quota.to_owned(), period.to_owned())
        } else {
            (self.text("cpu.cfs_quota_us")?, self.text("cpu.cfs_period_us")?)
        };
        // "max", and -1 in version 1, mean that there is no quota.
        let (quota, period) = (quota.parse::<u64>().ok()?, period.parse::<u64>().ok()?);
        (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
    }
}

/// Returns the number of cores allowed by the strictest level of this process's cgroups; `None` without a quota.
pub fn cpu_quota(roots: &Roots) -> Option<f64> {
    levels(roots, "cpu").iter().filter_map(Level::cpu_quota).reduce(f64::min)
}

/// Returns the levels of this process's cgroups for a controller, from the root down.
pub(super) fn levels(roots: &Roots, controller: &str) -> Vec<Level> {
    let membership = text(&roots.proc_.join("self/cgroup")).unwrap_or_default();
    membership.lines().flat_map(|line| levels_of_line(roots, controller, line)).collect()
}

/// Returns the levels of the cgroup in one line of /proc/self/cgroup; none if the line is for other controllers.
fn levels_of_line(roots: &Roots, controller: &str, line: &str) -> Vec<Level> {
    let mut parts = line.splitn(3, ':');
    let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
        return Vec::new();
    };
    let base = match controllers {
        "" if roots.cgroup.join("cgroup.controllers").exists() => roots.cgroup.clone(),
        "" => roots.cgroup.join("unified"),
        _ if controllers.split(',').any(|name| name == controller) => roots.cgroup.join(controller),
        _ => return Vec::new(),
    };
    let is_v2 = controllers.is_empty();
    // In a container, the path may contain levels that are not mounted ("/docker/1f.."), or lead above the root of the
    // mount ("/../x"). The root of the mount is then the level of the container itself.
    let names = Path::new(path).components().filter_map(|component| match component {
        Component::Normal(name) => Some(name),
        _ => None,
    });
    let mut levels = vec![Level { is_v2, folder: base, name: "/".into() }];
    for name in names {
        let above = &levels[levels.len() - 1];
        levels.push(Level { is_v2, folder: above.folder.join(name), name: above.name.join(name) });
    }
    levels
}

/// Returns the text of a file; `None` if it is unreadable.
pub(super) fn text(path: &Path) -> Option<String> {
    String::from_utf8(read_file(path).ok()?).ok()
}
