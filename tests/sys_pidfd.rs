//! How `PidFd` reports the life and end of processes.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use rustloader::sys::pidfd::{ExitStatus, PidFd, child_status, has_exited, start_time};

#[path = "common/children.rs"]
mod children;

use children::Child;

fn exit(code: i32) -> ! {
    // SAFETY: _exit has no precondition.
    unsafe { libc::_exit(code) }
}

fn await_exit(process: &PidFd) {
    let start = Instant::now();
    while !process.has_exited().unwrap() {
        assert!(start.elapsed() < Duration::from_secs(60), "the child does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether the kernel keeps the status of a process that was reaped.
fn keeps_status() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap(), numbers.next().unwrap_or(0)) >= (6, 15)
}

fn check(child: Child, process: &PidFd, expected: ExitStatus) {
    let pid = child.0;
    await_exit(process);
    assert_eq!(process.status(), Some(expected));
    // Reading the status does not reap it.
    assert_eq!(process.status(), Some(expected));
    child.wait();
    assert!(process.has_exited().unwrap());
    assert_eq!(process.status(), keeps_status().then_some(expected), "after another waiter reaped it");
    process.send_signal(libc::SIGKILL).unwrap();
    assert!(PidFd::open(pid).is_err());
}

#[test]
fn an_exit_code_is_seen_before_and_after_reaping() {
    for code in [0, 1, 255] {
        let child = Child::fork(|| exit(code));
        let process = PidFd::open(child.0).unwrap();
        check(child, &process, ExitStatus::Code(code));
    }
}

#[test]
fn a_signal_is_seen_before_and_after_reaping() {
    for signal in [libc::SIGKILL, libc::SIGTERM, libc::SIGABRT] {
        let child = Child::sleeping();
        let process = PidFd::open(child.0).unwrap();
        assert!(!process.has_exited().unwrap());
        assert_eq!(process.status(), None);
        process.send_signal(signal).unwrap();
        check(child, &process, ExitStatus::Signal(signal));
    }
}

#[test]
fn a_stopped_process_lives() {
    let child = Child::sleeping();
    let process = PidFd::open(child.0).unwrap();
    process.send_signal(libc::SIGSTOP).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert!(!process.has_exited().unwrap());
    assert_eq!(process.status(), None);
    process.send_signal(libc::SIGKILL).unwrap();
    check(child, &process, ExitStatus::Signal(libc::SIGKILL));
}

#[test]
fn a_process_that_is_not_a_child_can_be_watched() {
    // SAFETY: getppid has no precondition.
    let process = PidFd::open(unsafe { libc::getppid() }).unwrap();
    assert!(!process.has_exited().unwrap());
    assert_eq!(process.status(), None);
}

#[test]
fn a_descriptor_that_other_code_closed_is_an_error_and_not_a_death() {
    let process = PidFd::open(std::process::id() as i32).unwrap();
    // In a child, where no other test can reuse the number.
    let child = Child::fork(|| {
        // SAFETY: the number is closed on purpose; the child leaves without dropping `process`.
        unsafe { libc::close(process.as_fd().as_raw_fd()) };
        let is_error = process.has_exited().is_err() && process.status().is_none();
        exit(i32::from(!is_error))
    });
    assert_eq!(child.wait(), 0);
}

#[test]
fn start_times_grow() {
    let first = start_time(std::process::id() as i32).unwrap();
    let child = Child::sleeping();
    let pid = child.0;
    let second = start_time(pid).unwrap();
    assert!(second >= first);
    assert_eq!(start_time(pid).unwrap(), second);
    child.kill();
    assert!(start_time(pid).is_err());
}

#[test]
fn without_a_pidfd_the_end_of_a_child_is_known_until_it_is_reaped() {
    let child = Child::sleeping();
    let pid = child.0;
    let time = start_time(pid).unwrap();
    assert_eq!(child_status(pid), None);
    assert!(!has_exited(pid, time) && !has_exited(pid, 0));
    assert!(has_exited(pid, time + 1), "the pid belongs to another process");
    child.signal(libc::SIGKILL);
    await_exit(&PidFd::open(pid).unwrap());
    for _ in 0..2 {
        assert_eq!(child_status(pid), Some(ExitStatus::Signal(libc::SIGKILL)));
        assert!(has_exited(pid, time));
    }
    child.wait();
    assert!(has_exited(pid, time) && has_exited(pid, 0));
    assert_eq!(child_status(pid), None);
    assert_eq!(child_status(std::process::id() as i32), None);
    assert_eq!(child_status(-1), None);
}
