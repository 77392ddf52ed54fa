//! Clocks, and yielding the processor.

use std::time::Duration;

use rustix::event::Timespec;

/// Returns the CLOCK_MONOTONIC time. Its origin is unspecified, but the same for all processes of the machine.
pub fn monotonic() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a local struct that the kernel fills.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the [`monotonic`] time in nanoseconds. It overflows after 584 years.
pub fn monotonic_ns() -> u64 {
    monotonic().as_nanos() as u64
}

/// Returns the CPU time of this process and of its reaped children, in nanoseconds; at least 1.
pub fn process_cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a local struct that the kernel fills.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    // SAFETY: an all-zero rusage is valid, and the kernel fills it.
    let children = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        [usage.ru_utime, usage.ru_stime]
    };
    let of_children = children.map(|it| Duration::new(it.tv_sec as u64, it.tv_usec as u32 * 1000));
    let all = Duration::new(time.tv_sec as u64, time.tv_nsec as u32) + of_children[0] + of_children[1];
    (all.as_nanos() as u64).max(1)
}

/// Returns the nanoseconds during which this process's main thread was ready to run but had no core; 0 if unknown.
pub fn queued_ns() -> u64 {
    let bytes = super::read_file("/proc/self/schedstat".as_ref()).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    text.split_whitespace().nth(1).and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// Yields the processor to another ready thread.
pub fn yield_now() {
    rustix::thread::sched_yield();
}

/// Converts a duration, saturating at the maximum.
pub(super) fn timespec(time: Duration) -> Timespec {
    Timespec::try_from(time).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_does_not_run_backwards() {
        let before = monotonic();
        yield_now();
        assert!(monotonic() >= before);
        assert!(u128::from(monotonic_ns()) >= before.as_nanos());
    }

    #[test]
    fn processor_time_grows_with_work() {
        let (cpu, before) = (process_cpu_ns(), monotonic());
        while process_cpu_ns() < cpu + 1_000_000 {
            assert!(monotonic() - before < Duration::from_secs(60));
        }
        assert!(queued_ns() <= queued_ns());
    }
}
