//! Shared memory maps of a file.

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use super::cgroup::Roots;
use super::failpoint::failpoint;
use super::memory;
use super::{errno, read_file, retry};
use crate::error::{Error, Result};

/// Puts pages into the page tables as reads would, 16 at a time (Linux 5.14).
const MADV_POPULATE_READ: libc::c_int = 22;

/// Fills in pages as a write would, and answers an errno where a write would be SIGBUS (Linux 5.14).
const MADV_POPULATE_WRITE: libc::c_int = 23;

/// The size of a page of memory in bytes.
pub fn page_size() -> usize {
    // SAFETY: sysconf takes a plain number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Bytes of address space that this process may still map; `None` without a limit.
pub fn address_space_left() -> Option<u64> {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a struct of ours for the kernel to fill.
    let mut call = || unsafe { libc::getrlimit64(libc::RLIMIT_AS, &mut limit) };
    if failpoint!("getrlimit", -1, call()) == -1 || limit.rlim_cur == libc::RLIM64_INFINITY {
        return None;
    }
    let statm = read_file("/proc/self/statm".as_ref()).unwrap_or_default();
    let pages = String::from_utf8_lossy(&statm).split(' ').next().and_then(|word| word.parse::<u64>().ok());
    Some(limit.rlim_cur.saturating_sub(pages.unwrap_or(0) * page_size() as u64))
}

/// A file mapped whole, for reading and writing, shared with every process that maps it. Kept out of core dumps. A
/// forked child has it too. The bytes change under us at any time: only atomics and raw copies may touch them.
#[derive(Debug)]
pub struct Mapping {
    /// The first byte; on a page boundary.
    start: NonNull<u8>,
    /// How many bytes of the file are mapped.
    len: usize,
    /// The size of a page.
    page: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; what lies in it is guarded by those who use the pointer.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods hand out no reference into it.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `fd`, which must be that long and stay so (be sealed): touching what lies behind a
    /// file's end is SIGBUS.
    pub fn new(fd: BorrowedFd<'_>, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::usage("a mapping of 0 bytes"));
        }
        // SAFETY: a stat64 of zeroes is a valid one.
        let mut stat: libc::stat64 = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` is a struct of ours for the kernel to fill.
        if failpoint!("fstat", -1, unsafe { libc::fstat64(fd.as_raw_fd(), &mut stat) }) == -1 {
            return Err(Error::last_os("fstat", "the descriptor was closed by somebody else"));
        }
        if (stat.st_size as u64) < len as u64 {
            let size = stat.st_size;
            return Err(Error::usage(format!("a mapping of {len} bytes of a file that has {size}")));
        }
        // Not accessible yet: after mlockall(MCL_FUTURE) the kernel would fill every page in, far more than there is memory.
        let (protection, flags) = (libc::PROT_NONE, libc::MAP_SHARED | libc::MAP_NORESERVE);
        let (any, fd) = (std::ptr::null_mut(), fd.as_raw_fd());
        // SAFETY: the kernel chooses an address where nothing lies.
        let call = || unsafe { libc::mmap(any, len, protection, flags, fd, 0) };
        let start = failpoint!("mmap", libc::MAP_FAILED, call());
        if start == libc::MAP_FAILED {
            return Err(Error::last_os_with("mmap", |_| address_space_hint(len as u64)));
        }
        let Some(start) = NonNull::new(start.cast::<u8>()) else {
            return Err(Error::usage("mmap answered address 0"));
        };
        let mapping = Self { start, len, page: page_size() };
        // Locked pages would stay when they are given back; what was never locked is none the worse.
        // SAFETY: the range is the mapping just made.
        unsafe { libc::munlock(mapping.start.as_ptr().cast(), len) };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: as above.
        let call = || unsafe { libc::mprotect(mapping.start.as_ptr().cast(), len, protection) };
        if failpoint!("mprotect", -1, call()) == -1 {
            return Err(Error::last_os("mprotect", "run without the sandbox or tool that restricts it"));
        }
        // A kernel that refuses only makes core dumps larger.
        // SAFETY: the range is the mapping just made.
        let call = || unsafe { libc::madvise(mapping.start.as_ptr().cast(), len, libc::MADV_DONTDUMP) };
        failpoint!("dontdump", -1, call());
        Ok(mapping)
    }

    /// Its first byte. Valid for [`Mapping::len`] bytes while the mapping lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Its length in bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Makes sure that every page which `range` touches has memory and can be written without a fault.
    ///
    /// Errors: [`Error::NoMemory`] where the kernel has no page, [`Error::Usage`] outside of the mapping. Before Linux
    /// 5.14, and where a sandbox refuses the call, there is no answer but SIGBUS on a machine without a free page. A memory cgroup does not refuse either, it
    /// kills: compare with [`memory::available`] first.
    pub fn populate(&self, range: Range<usize>) -> Result<()> {
        let pages = self.touched(&range)?;
        let call = || failpoint!("populate", -1, self.advise(&pages, MADV_POPULATE_WRITE));
        if !pages.is_empty() && retry(call) != 0 {
            match out_of_memory(&pages, errno()) {
                Some(error) => return Err(error),
                // EINVAL from an older kernel, whatever else from a sandbox.
                None => self.touch(&pages),
            }
        }
        Ok(())
    }

    /// Puts those pages which `range` touches, and which have memory already, into this process's page tables. As a shared
    /// mapping needs no word of the first write to a page, they can be written from then on without a fault; that takes less
    /// than half of the time that [`Mapping::populate`] takes for such pages (0.38 us each, not 0.92).
    ///
    /// Errors: as of [`Mapping::populate`]. A kernel that does not know the call leaves it to faults.
    pub fn map_in(&self, range: Range<usize>) -> Result<()> {
        let pages = self.touched(&range)?;
        let call = || failpoint!("map_in", -1, self.advise(&pages, MADV_POPULATE_READ));
        if !pages.is_empty() && retry(call) != 0 {
            out_of_memory(&pages, errno()).map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// Gives the memory of the whole pages inside `range` back to the machine, for all processes; they read as zeroes
    /// afterwards. The rest of `range` stays as it is.
    pub fn remove(&self, range: Range<usize>) -> Result<()> {
        self.check(&range)?;
        let Some(pages) = self.inside(&range) else { return Ok(()) };
        if retry(|| failpoint!("remove", -1, self.advise(&pages, libc::MADV_REMOVE))) == 0 {
            return Ok(());
        }
        Err(Error::last_os("madvise(MADV_REMOVE)", "the memory stays with the DataLoader until it ends"))
    }

    fn check(&self, range: &Range<usize>) -> Result<()> {
        if range.start <= range.end && range.end <= self.len {
            return Ok(());
        }
        Err(Error::usage(format!("bytes {range:?} of a mapping of {} bytes", self.len)))
    }

    /// All pages that `range` touches.
    fn touched(&self, range: &Range<usize>) -> Result<Range<usize>> {
        self.check(range)?;
        let start = range.start / self.page * self.page;
        Ok(start..if range.is_empty() { start } else { range.end.next_multiple_of(self.page) })
    }

    /// The whole pages inside `range`, if there are any. The file's last page counts as whole where `range` reaches its
    /// end.
    fn inside(&self, range: &Range<usize>) -> Option<Range<usize>> {
        let start = range.start.next_multiple_of(self.page);
        let end = if range.end == self.len { self.len } else { range.end / self.page * self.page };
        (start < end).then_some(start..end)
    }

    fn advise(&self, pages: &Range<usize>, advice: libc::c_int) -> libc::c_int {
        let start = self.start.as_ptr().wrapping_add(pages.start);
        // SAFETY: `pages` lies in the mapping up to its last page's end, and none of our advices unmaps; MADV_REMOVE
        // changes bytes, which the owner of the range has asked for.
        unsafe { libc::madvise(start.cast(), pages.len(), advice) }
    }

    /// Writes every page with the value that it has.
    fn touch(&self, pages: &Range<usize>) {
        for offset in pages.clone().step_by(self.page) {
            // SAFETY: the byte lies in the mapping, and all who share it use atomics or own the range.
            let byte = unsafe { AtomicU8::from_ptr(self.start.as_ptr().add(offset)) };
            // Not fetch_add(0): compilers may turn that into a load, which does not make the page writable.
            let value = byte.load(Ordering::Relaxed);
            let _ = byte.compare_exchange(value, value, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` and is given up once; who took pointers gave its word to outlive none.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// What [`Mapping::new`] would answer, for a process that has too little address space `left`.
pub fn no_address_space(wanted: u64, left: u64) -> Error {
    let hint = format!("{}; {left} bytes of it are left", address_space_hint(wanted));
    Error::Os { call: "mmap", errno: libc::ENOMEM, hint }
}

fn address_space_hint(wanted: u64) -> String {
    format!(
        "{wanted} bytes of address space were wanted: raise `ulimit -v` (RLIMIT_AS), or run without the sanitizer or \
         tool that restricts address space"
    )
}

/// What an errno of a populating madvise means, if it tells of memory.
fn out_of_memory(pages: &Range<usize>, errno: i32) -> Option<Error> {
    let why = match errno {
        libc::EHWPOISON => "the machine's memory has a hardware fault there",
        libc::EFAULT | libc::ENOMEM | libc::EAGAIN => "the kernel has no free page for it",
        _ => return None,
    };
    let room = memory::available(&Roots::default());
    Some(Error::NoMemory {
        wanted: pages.len() as u64,
        limit: format!("{why} (madvise: {}); {}", std::io::Error::from_raw_os_error(errno), room.limit),
        headroom: room.bytes,
        passing: false,
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use super::super::memfd;
    use super::*;

    fn file(len: usize) -> OwnedFd {
        memfd::create("rustloader-test", len as u64).unwrap()
    }

    /// Bytes of memory that the file takes.
    fn used(fd: &OwnedFd) -> u64 {
        use std::os::unix::fs::MetadataExt;
        std::fs::File::from(fd.try_clone().unwrap()).metadata().unwrap().blocks() * 512
    }

    fn read(mapping: &Mapping, offset: usize) -> u8 {
        assert!(offset < mapping.len());
        // SAFETY: the byte lies in the mapping, and this thread alone uses it.
        unsafe { mapping.as_ptr().add(offset).read() }
    }

    fn write(mapping: &Mapping, offset: usize, value: u8) {
        assert!(offset < mapping.len());
        // SAFETY: the byte lies in the mapping, and this thread alone uses it.
        unsafe { mapping.as_ptr().add(offset).write(value) }
    }

    /// Page faults of this thread so far that found their page.
    fn faults() -> i64 {
        // SAFETY: a rusage of zeroes is a valid one, and the kernel fills it.
        unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &mut usage), 0);
            usage.ru_minflt
        }
    }

    #[test]
    fn pages_that_were_mapped_in_are_written_without_a_fault() {
        let (page, count) = (page_size(), 256);
        let fd = file(count * page);
        let maker = Mapping::new(fd.as_fd(), count * page).unwrap();
        maker.populate(0..count * page).unwrap();
        let other = Mapping::new(fd.as_fd(), count * page).unwrap();
        other.map_in(0..count / 2 * page).unwrap();
        other.map_in(0..0).unwrap();
        let writes = |range: Range<usize>| {
            let before = faults();
            range.for_each(|n| write(&other, n * page, 1));
            faults() - before
        };
        // A few for the test's own stack and code, and a sanitizer's shadow of the bytes.
        let mapped = writes(0..count / 2);
        assert!(mapped < count as i64 / 8, "{mapped} faults");
        let unmapped = writes(count / 2..count);
        assert!(unmapped >= count as i64 / 4, "{unmapped} faults");
        assert_eq!(used(&fd), (count * page) as u64);
    }

    #[test]
    fn populate_rounds_outward_and_remove_inward() {
        let page = page_size();
        let fd = file(8 * page);
        let mapping = Mapping::new(fd.as_fd(), 8 * page).unwrap();
        assert_eq!(used(&fd), 0);
        mapping.populate(page + 1..3 * page + 1).unwrap();
        assert_eq!(used(&fd), 3 * page as u64);
        write(&mapping, page, 1);
        write(&mapping, 2 * page, 2);
        mapping.remove(page + 1..3 * page + 1).unwrap();
        assert_eq!(used(&fd), 2 * page as u64);
        assert_eq!((read(&mapping, page), read(&mapping, 2 * page)), (1, 0));
    }

    #[test]
    fn two_mappings_share_their_bytes() {
        let fd = file(page_size());
        let (one, two) = (Mapping::new(fd.as_fd(), 100).unwrap(), Mapping::new(fd.as_fd(), 100).unwrap());
        write(&one, 99, 7);
        assert_eq!(read(&two, 99), 7);
        two.populate(0..100).unwrap();
        assert_eq!(read(&two, 99), 7);
        two.remove(0..100).unwrap();
        assert_eq!(read(&one, 99), 0);
    }

    #[test]
    fn touching_keeps_the_bytes() {
        let page = page_size();
        let fd = file(4 * page);
        let mapping = Mapping::new(fd.as_fd(), 4 * page).unwrap();
        write(&mapping, page, 9);
        mapping.touch(&(0..3 * page));
        assert_eq!(used(&fd), 3 * page as u64);
        assert_eq!(read(&mapping, page), 9);
    }

    #[test]
    fn ranges_outside_are_refused() {
        let fd = file(page_size());
        assert!(matches!(Mapping::new(fd.as_fd(), 0), Err(Error::Usage { .. })));
        assert!(matches!(Mapping::new(fd.as_fd(), page_size() + 1), Err(Error::Usage { .. })));
        let mapping = Mapping::new(fd.as_fd(), page_size()).unwrap();
        let backwards = Range { start: 2, end: 1 };
        for range in [0..page_size() + 1, backwards, usize::MAX..usize::MAX] {
            assert!(matches!(mapping.populate(range.clone()), Err(Error::Usage { .. })));
            assert!(matches!(mapping.map_in(range.clone()), Err(Error::Usage { .. })));
            assert!(matches!(mapping.remove(range), Err(Error::Usage { .. })));
        }
        mapping.populate(page_size()..page_size()).unwrap();
        mapping.remove(1..page_size() - 1).unwrap();
    }
}
