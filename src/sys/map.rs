//! Shared memory mappings of files.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};
use rustix::process::Resource;

use super::cgroup::Roots;
use super::failpoint::failpoint;
use super::memory;
use super::{limit, read_file, refused, retry_on_intr};
use crate::error::{Error, Result};

/// Returns the size of a page of memory in bytes.
pub fn page_size() -> usize {
    // SAFETY: sysconf takes a plain number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Returns the number of bytes of address space left to this process; `None` without a limit.
pub fn address_space_left() -> Option<u64> {
    let limit = limit(Resource::As)?;
    let statm = read_file("/proc/self/statm".as_ref()).unwrap_or_default();
    let pages = String::from_utf8_lossy(&statm).split(' ').next().and_then(|word| word.parse::<u64>().ok());
    Some(limit.saturating_sub(pages.unwrap_or(0) * page_size() as u64))
}

/// A shared, writable mapping of a file, excluded from core dumps and inherited by forked children. Other processes may
/// change the bytes at any time, so only atomics and raw copies may access them.
#[derive(Debug)]
pub struct Mapping {
    /// The address of the first byte; on a page boundary.
    start: NonNull<u8>,
    len: usize,
    /// The size of a page.
    page: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; users of the pointer synchronize their accesses.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods return no reference into it.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `fd`. The file must keep at least that length, as a sealed file does, because an
    /// access beyond a file's end raises SIGBUS.
    pub fn new(fd: BorrowedFd<'_>, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::usage("a mapping must have at least one byte"));
        }
        let size = size_of_file(fd)?;
        if size < len as u64 {
            return Err(Error::usage(format!("{len} bytes of a file that has {size} bytes cannot be mapped")));
        }
        // The pages are not accessible at first: after mlockall(MCL_FUTURE), the kernel would populate every accessible
        // page, which could take more memory than the machine has.
        let start = map_file(fd, len, ProtFlags::empty(), MapFlags::SHARED)?;
        let mapping = Self { start, len, page: page_size() };
        let start = start.as_ptr().cast();
        // Locked pages cannot be released, so unlock them. For pages that were never locked this does nothing.
        // SAFETY: the range is the mapping just made.
        let _ = unsafe { rustix::mm::munlock(start, len) };
        let protection = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the range is the mapping just made.
        failpoint!("mprotect", unsafe { rustix::mm::mprotect(start, len, protection) })
            .map_err(|errno| refused("mprotect", errno, "run without the sandbox or tool that restricts it"))?;
        // A refusal only makes core dumps larger.
        let _ = failpoint!("dontdump", mapping.advise(&(0..len), Advice::LinuxDontDump));
        Ok(mapping)
    }

    /// Returns the address of the first byte, valid for [`Mapping::len`] bytes while the mapping lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the length in bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Ensures that every page that `range` touches has memory and can be written without a fault.
    ///
    /// Errors: [`Error::NoMemory`] if the kernel has no page, [`Error::Usage`] outside the mapping. Before Linux 5.14,
    /// and where a sandbox refuses the call, a lack of free pages raises SIGBUS. A memory cgroup kills the process
    /// instead of refusing the call: check [`memory::available`] first.
    pub fn populate(&self, range: Range<usize>) -> Result<()> {
        let pages = self.touched(&range)?;
        let call = || failpoint!("populate", self.advise(&pages, Advice::LinuxPopulateWrite));
        if !pages.is_empty()
            && let Err(errno) = retry_on_intr(call)
        {
            match out_of_memory(&pages, errno) {
                Some(error) => return Err(error),
                // EINVAL from an older kernel, any other errno from a sandbox.
                None => self.touch(&pages),
            }
        }
        Ok(())
    }

    /// Maps the present pages that `range` touches into this process's page tables. For a shared mapping of a memfd,
    /// the kernel does not track the first write to a page, so later writes do not fault. For present pages this takes
    /// less than half the time of [`Mapping::populate`] (0.38 us instead of 0.92 us per page).
    ///
    /// Errors: as for [`Mapping::populate`]. Without kernel support it does nothing.
    pub fn map_in(&self, range: Range<usize>) -> Result<()> {
        let pages = self.touched(&range)?;
        let call = || failpoint!("map_in", self.advise(&pages, Advice::LinuxPopulateRead));
        match retry_on_intr(|| if pages.is_empty() { Ok(()) } else { call() }) {
            Ok(()) => Ok(()),
            Err(errno) => out_of_memory(&pages, errno).map_or(Ok(()), Err),
        }
    }

    /// Releases the memory of the whole pages inside `range`, for all processes. These pages read as zeroes afterwards.
    /// The remainder of `range` is unchanged.
    pub fn remove(&self, range: Range<usize>) -> Result<()> {
        self.check(&range)?;
        let Some(pages) = self.inside(&range) else { return Ok(()) };
        retry_on_intr(|| failpoint!("remove", self.advise(&pages, Advice::LinuxRemove))).map_err(|errno| {
            refused("madvise(MADV_REMOVE)", errno, "the memory stays with the DataLoader until it ends")
        })
    }

    fn check(&self, range: &Range<usize>) -> Result<()> {
        if range.start <= range.end && range.end <= self.len {
            return Ok(());
        }
        Err(Error::usage(format!("bytes {range:?} are outside a mapping of {} bytes", self.len)))
    }

    /// Returns the pages that `range` touches.
    fn touched(&self, range: &Range<usize>) -> Result<Range<usize>> {
        self.check(range)?;
        let start = range.start / self.page * self.page;
        Ok(start..if range.is_empty() { start } else { range.end.next_multiple_of(self.page) })
    }

    /// Returns the whole pages inside `range`, if any. The mapping's last page counts as whole if `range` reaches the
    /// mapping's end.
    fn inside(&self, range: &Range<usize>) -> Option<Range<usize>> {
        let start = range.start.next_multiple_of(self.page);
        let end = if range.end == self.len { self.len } else { range.end / self.page * self.page };
        (start < end).then_some(start..end)
    }

    fn advise(&self, pages: &Range<usize>, advice: Advice) -> rustix::io::Result<()> {
        let start = self.start.as_ptr().wrapping_add(pages.start);
        // SAFETY: `pages` is in the mapping, up to the end of its last page. No caller passes advice that unmaps pages.
        // MADV_REMOVE changes bytes, as the owner of the range requests.
        unsafe { rustix::mm::madvise(start.cast(), pages.len(), advice) }
    }

    /// Makes every page writable, by writing a byte's current value back to it.
    fn touch(&self, pages: &Range<usize>) {
        for offset in pages.clone().step_by(self.page) {
            // SAFETY: the byte is in the mapping; all users of the range use atomics or own it.
            let byte = unsafe { AtomicU8::from_ptr(self.start.as_ptr().add(offset)) };
            // Not fetch_add(0): compilers may turn that into a load, which does not make the page writable.
            let value = byte.load(Ordering::Relaxed);
            let _ = byte.compare_exchange(value, value, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` mapped the range, it is unmapped once, and no pointer into it may outlive `self`.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Returns the length of an open file in bytes.
pub(super) fn size_of_file(fd: BorrowedFd<'_>) -> Result<u64> {
    let stat = failpoint!("fstat", rustix::fs::fstat(fd));
    stat.map(|stat| stat.st_size as u64)
        .map_err(|errno| refused("fstat", errno, "the descriptor was closed by other code"))
}

/// Maps the first `len` bytes of a file at an address that the kernel chooses. No swap space is reserved for its pages.
pub(super) fn map_file(fd: BorrowedFd<'_>, len: usize, protection: ProtFlags, flags: MapFlags) -> Result<NonNull<u8>> {
    let (any, flags) = (std::ptr::null_mut(), flags | MapFlags::NORESERVE);
    // SAFETY: the kernel chooses a free address range.
    let start = failpoint!("mmap", unsafe { rustix::mm::mmap(any, len, protection, flags, fd, 0) })
        .map_err(|errno| refused("mmap", errno, address_space_hint(len as u64)))?;
    NonNull::new(start.cast()).ok_or_else(|| Error::usage("mmap returned address 0"))
}

/// Returns the error that [`Mapping::new`] would return if only `left` bytes of address space were left.
pub fn no_address_space(wanted: u64, left: u64) -> Error {
    let hint = format!("{}; {left} bytes are left", address_space_hint(wanted));
    Error::Os { call: "mmap", errno: libc::ENOMEM, hint }
}

pub(super) fn address_space_hint(wanted: u64) -> String {
    format!(
        "{wanted} bytes of address space are needed: raise `ulimit -v` (RLIMIT_AS), or run without the sanitizer or \
         tool that restricts address space"
    )
}

/// Converts the errno of a populating madvise to an error, if the errno means a lack of memory or faulty memory.
fn out_of_memory(pages: &Range<usize>, errno: Errno) -> Option<Error> {
    let reason = match errno {
        Errno::HWPOISON => "the machine's memory has a hardware fault",
        Errno::FAULT | Errno::NOMEM | Errno::AGAIN => "the kernel has no free page",
        _ => return None,
    };
    let room = memory::available(&Roots::default());
    Some(Error::NoMemory {
        wanted: pages.len() as u64,
        limit: format!("{reason} (madvise: {}); {}", std::io::Error::from(errno), room.limit),
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

    /// Returns the number of bytes of memory that the file takes.
    fn used(fd: &OwnedFd) -> u64 {
        use std::os::unix::fs::MetadataExt;
        std::fs::File::from(fd.try_clone().unwrap()).metadata().unwrap().blocks() * 512
    }

    fn read(mapping: &Mapping, offset: usize) -> u8 {
        assert!(offset < mapping.len());
        // SAFETY: the byte is in the mapping, and only this thread uses it.
        unsafe { mapping.as_ptr().add(offset).read() }
    }

    fn write(mapping: &Mapping, offset: usize, value: u8) {
        assert!(offset < mapping.len());
        // SAFETY: the byte is in the mapping, and only this thread uses it.
        unsafe { mapping.as_ptr().add(offset).write(value) }
    }

    /// Returns the number of minor page faults of this thread so far.
    fn faults() -> i64 {
        // SAFETY: an all-zero rusage is valid, and the kernel fills it.
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
        let creator = Mapping::new(fd.as_fd(), count * page).unwrap();
        creator.populate(0..count * page).unwrap();
        let other = Mapping::new(fd.as_fd(), count * page).unwrap();
        other.map_in(0..count / 2 * page).unwrap();
        other.map_in(0..0).unwrap();
        let writes = |range: Range<usize>| {
            let before = faults();
            range.for_each(|n| write(&other, n * page, 1));
            faults() - before
        };
        // A few faults come from the test's own stack and code, and from a sanitizer's shadow memory.
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
