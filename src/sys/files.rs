//! Files that have names.

use std::ffi::CStr;
use std::os::fd::BorrowedFd;

use rustix::fs::RenameFlags;
use rustix::io::Errno;

use super::failpoint::failpoint;
use super::refused;
use crate::error::Result;

/// The types of file systems whose files are in memory: tmpfs, ramfs and hugetlbfs.
const IN_MEMORY: [u64; 3] = [0x0102_1994, 0x8584_58f6, 0x9584_58f6];

/// Returns true if a file's pages are memory that the kernel cannot reclaim by writing them to the file's disk, or if
/// the kernel does not say.
pub fn is_in_memory(fd: BorrowedFd<'_>) -> bool {
    let system = failpoint!("fstatfs", rustix::fs::fstatfs(fd));
    system.map_or(true, |system| IN_MEMORY.contains(&(system.f_type as u32).into()))
}

/// Gives a file in `folder` another name there. Returns false if that name exists.
pub fn rename_to_new(folder: BorrowedFd<'_>, from: &CStr, to: &CStr) -> Result<bool> {
    let call = || rustix::fs::renameat_with(folder, from, folder, to, RenameFlags::NOREPLACE);
    match failpoint!("renameat", call()) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(errno) => Err(refused(
            "renameat2",
            errno,
            "this file system has neither hard links nor a rename that replaces nothing",
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::super::memfd;
    use super::*;

    #[test]
    fn files_in_memory_are_recognized() {
        let memory = memfd::create("rustloader-test", 1).unwrap();
        assert!(is_in_memory(memory.as_fd()));
        assert!(!is_in_memory(File::open("/proc/self/stat").unwrap().as_fd()));
    }

    #[test]
    fn a_rename_replaces_no_file() {
        let path = std::env::temp_dir().join(format!("rustloader-{}-rename", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        let folder = File::open(&path).unwrap();
        let rename = || rename_to_new(folder.as_fd(), c"one", c"other").unwrap();
        for content in ["1", "2"] {
            std::fs::write(path.join("one"), content).unwrap();
            assert_eq!(rename(), content == "1");
        }
        assert_eq!(std::fs::read_to_string(path.join("other")).unwrap(), "1");
        std::fs::remove_dir_all(path).unwrap();
    }
}
