//! Failpoints, for tests: the n-th system call of a kind fails, or the process ends or stops at it. Two moments in a
//! worker's task also have failpoints (`moment.rs`).
//!
//! Without the cargo feature `failpoints` none of this is compiled, and [`failpoint!`] expands to the call. Only
//! atomics are used, so failpoints work in forked children.

/// `failpoint!("kind", call)` evaluates to the result of `call`, or to the error of a failpoint that applies.
macro_rules! failpoint {
    ($kind:literal, $call:expr) => {{
        #[cfg(feature = "failpoints")]
        let result = match $crate::sys::failpoint::hit($kind) {
            Some(errno) => Err(From::from(errno)),
            None => $call,
        };
        #[cfg(not(feature = "failpoints"))]
        let result = $call;
        result
    }};
}
pub(super) use failpoint;

#[cfg(feature = "failpoints")]
pub use points::{Effect, calls, clear, environment, hit, kinds, set, set_from};

#[cfg(feature = "failpoints")]
mod points {
    use std::ffi::CStr;
    use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

    use rustix::io::Errno;

    use crate::error::{Error, Result};

    /// The effect of a failpoint. It replaces the call, except for [`Effect::Stop`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Effect {
        /// The call fails with this `errno`.
        Errno(i32),
        /// The process calls `_exit` with this code.
        Exit(i32),
        /// The process kills itself with SIGKILL.
        Kill,
        /// The process stops itself with SIGSTOP. When it continues, it makes the call.
        Stop,
    }

    /// Expands to an array of the names as strings.
    macro_rules! names {
        ($($name:ident)*) => { &[$(stringify!($name)),*] };
    }

    /// The kinds of calls that have a failpoint.
    const KINDS: &[&str] = names! {
        memfd_create getrlimit ftruncate seal mmap mprotect dontdump populate map_in remove
        eventfd eventfd_write eventfd_read pidfd_open pidfd_poll waitid pidfd_get_info
        pidfd_send_signal socket_send socket_receive futex_wait futex_wake ppoll epoll_create epoll_ctl epoll_wait fstat
        peek sigaction seal_write get_seals pwrite atfork kill thread timer sysinfo proc private pipe
        fstatfs renameat task_taken task_done
    };

    /// The state of one kind.
    struct Point {
        /// Calls so far in this process.
        calls: AtomicU64,
        /// The number of the first call that the failpoint affects; 0 for none.
        first: AtomicU64,
        /// The number of the last call that the failpoint affects.
        last: AtomicU64,
        /// The code of the effect: 0 errno, 1 exit, 2 kill, 3 stop.
        effect: AtomicI32,
        /// The errno or the exit code.
        value: AtomicI32,
    }

    static POINTS: [Point; KINDS.len()] = [const {
        Point {
            calls: AtomicU64::new(0),
            first: AtomicU64::new(0),
            last: AtomicU64::new(0),
            effect: AtomicI32::new(0),
            value: AtomicI32::new(0),
        }
    }; KINDS.len()];

    /// The process that last read the environment. A forked child reads it again.
    static READ_BY: AtomicI32 = AtomicI32::new(0);

    /// Returns the kinds that [`set`] accepts.
    pub fn kinds() -> &'static [&'static str] {
        KINDS
    }

    /// Returns the number of calls of `kind` in this process.
    pub fn calls(kind: &str) -> u64 {
        read_environment();
        point(kind).map_or(0, |point| point.calls.load(Ordering::Acquire))
    }

    /// Sets a failpoint for one call of `kind` in this process: the `nth` from now on, where 1 is the next call.
    pub fn set(kind: &str, nth: u64, effect: Effect) -> Result<()> {
        read_environment();
        arm(kind, nth, false, effect)
    }

    /// Sets a failpoint as [`set`] does, but for that call and all later calls of `kind`.
    pub fn set_from(kind: &str, nth: u64, effect: Effect) -> Result<()> {
        read_environment();
        arm(kind, nth, true, effect)
    }

    /// Removes every failpoint. The counts of calls stay.
    pub fn clear() {
        for point in &POINTS {
            point.first.store(0, Ordering::Release);
        }
    }

    /// Counts a call of `kind`, for the macro. Returns the error with which the call must fail, if any.
    #[doc(hidden)]
    pub fn hit(kind: &str) -> Option<Errno> {
        read_environment();
        let Some(point) = point(kind) else { panic!("failpoint {kind} is not in the list of kinds") };
        let call = point.calls.fetch_add(1, Ordering::AcqRel) + 1;
        let first = point.first.load(Ordering::Acquire);
        if first == 0 || call < first || call > point.last.load(Ordering::Acquire) {
            return None;
        }
        let value = point.value.load(Ordering::Acquire);
        match point.effect.load(Ordering::Acquire) {
            0 => Some(Errno::from_raw_os_error(value)),
            // SAFETY: _exit has no precondition.
            1 => unsafe { libc::_exit(value) },
            3 => {
                // SAFETY: raise takes a plain number.
                unsafe { libc::raise(libc::SIGSTOP) };
                None
            }
            _ => loop {
                // SAFETY: kill and getpid take plain numbers.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            },
        }
    }

    fn point(kind: &str) -> Option<&'static Point> {
        KINDS.iter().position(|name| *name == kind).map(|at| &POINTS[at])
    }

    fn arm(kind: &str, nth: u64, onwards: bool, effect: Effect) -> Result<()> {
        let point = point(kind).ok_or_else(|| Error::usage(format!("there is no failpoint {kind:?}")))?;
        if nth == 0 {
            return Err(Error::usage("failpoints count calls from 1"));
        }
        let (number, value) = match effect {
            Effect::Errno(errno) => (0, errno),
            Effect::Exit(code) => (1, code),
            Effect::Kill => (2, 0),
            Effect::Stop => (3, 0),
        };
        point.first.store(0, Ordering::Release);
        point.effect.store(number, Ordering::Release);
        point.value.store(value, Ordering::Release);
        let first = point.calls.load(Ordering::Acquire) + nth;
        point.last.store(if onwards { u64::MAX } else { first }, Ordering::Release);
        point.first.store(first, Ordering::Release);
        Ok(())
    }

    /// Sets the failpoints of `RUSTLOADER_FAILPOINT`, once per process: `kind:nth:effect`, separated by commas. `nth+`
    /// means "the nth call and all later ones"; an effect is an errno's name or number, `exit=code`, `kill` or `stop`.
    ///
    /// Each process reads the variable at its first call and counts from there; a child inherits no failpoints or
    /// counts from its parent. So if the variable is set between the main process's first call and a fork, it affects
    /// only the children. If it is removed in that interval, it affects only the main process.
    fn read_environment() {
        // SAFETY: getpid has no precondition.
        let me = unsafe { libc::getpid() };
        if READ_BY.swap(me, Ordering::AcqRel) == me {
            return;
        }
        clear();
        for point in &POINTS {
            point.calls.store(0, Ordering::Release);
        }
        let Some(text) = environment(c"RUSTLOADER_FAILPOINT") else { return };
        for item in text.split(',').filter(|item| !item.is_empty()) {
            let Some((kind, nth, onwards, effect)) = parse(item) else {
                panic!("RUSTLOADER_FAILPOINT: {item:?} is not kind:nth:effect");
            };
            if let Err(error) = arm(kind, nth, onwards, effect) {
                panic!("RUSTLOADER_FAILPOINT: {error}");
            }
        }
    }

    /// Returns the value of an environment variable. Does not take the lock of std::env, which a forked child may
    /// inherit locked.
    pub fn environment(name: &CStr) -> Option<String> {
        // SAFETY: the name is a C string; tests do not change the environment while another thread reads it.
        let text = unsafe { libc::getenv(name.as_ptr()) };
        if text.is_null() {
            return None;
        }
        // SAFETY: getenv returned a C string, which stays until the variable is changed.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }

    fn parse(item: &str) -> Option<(&str, u64, bool, Effect)> {
        let mut parts = item.trim().splitn(3, ':');
        let (kind, nth, effect) = (parts.next()?, parts.next()?, parts.next()?);
        let (nth, onwards) = nth.strip_suffix('+').map_or((nth, false), |nth| (nth, true));
        let effect = match effect {
            "kill" => Effect::Kill,
            "stop" => Effect::Stop,
            _ => match effect.strip_prefix("exit=") {
                Some(code) => Effect::Exit(code.parse().ok()?),
                None => Effect::Errno(errno_of(effect)?),
            },
        };
        Some((kind, nth.parse().ok()?, onwards, effect))
    }

    fn errno_of(text: &str) -> Option<i32> {
        macro_rules! by_name {
            ($($name:ident)*) => {
                match text {
                    $(stringify!($name) => Some(libc::$name),)*
                    number => number.parse().ok(),
                }
            };
        }
        by_name! {
            EACCES EAGAIN EBADF ECHILD EFAULT EFBIG EINTR EINVAL EMFILE ENFILE ENOENT
            ENOMEM ENOSPC ENOSYS EOPNOTSUPP EPERM ESRCH
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn the_environment_is_read_as_written() {
            assert_eq!(parse("mmap:2:ENOMEM"), Some(("mmap", 2, false, Effect::Errno(libc::ENOMEM))));
            assert_eq!(parse("mmap:1+:12"), Some(("mmap", 1, true, Effect::Errno(12))));
            assert_eq!(parse("mmap:1:kill"), Some(("mmap", 1, false, Effect::Kill)));
            assert_eq!(parse("mmap:1:stop"), Some(("mmap", 1, false, Effect::Stop)));
            assert_eq!(parse("mmap:1:exit=3"), Some(("mmap", 1, false, Effect::Exit(3))));
            assert_eq!(parse("mmap:1:EWHAT"), None);
            assert_eq!(parse("mmap:kill"), None);
        }
    }
}
