//! The monotonic clock, and giving up the processor.

use std::time::Duration;

/// The time since an unnamed point (boot), the same point for all processes of the machine.
pub fn monotonic() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec of ours for the kernel to fill.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// [`monotonic`] in nanoseconds; enough for 584 years.
pub fn monotonic_ns() -> u64 {
    monotonic().as_nanos() as u64
}

/// For so long somebody who waits lets others run before it goes to sleep: a wake-up costs more than most small batches.
pub const YIELD_FOR: Duration = Duration::from_micros(20);

/// Lets another thread that is ready to run have the processor.
pub fn yield_now() {
    // SAFETY: sched_yield has no precondition.
    unsafe { libc::sched_yield() };
}

/// A duration as the kernel wants it; one too long for it becomes the longest.
pub(super) fn timespec(time: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: time.subsec_nanos() as _,
    }
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
}
