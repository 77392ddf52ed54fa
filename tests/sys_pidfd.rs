//! How `PidFd` reports the life and end of processes.

use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rustloader::sys::pidfd::{ExitStatus, PidFd, child_status, has_exited, start_time};

/// Forks a child that does `work` and then exits with code 0.
fn fork(work: impl FnOnce()) -> i32 {
    // SAFETY: the child calls only functions that are safe after a fork, and ends with _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        // If the test fails, no process is left behind.
        // SAFETY: alarm takes a plain number.
        unsafe { libc::alarm(120) };
        exit(if catch_unwind(AssertUnwindSafe(work)).is_ok() { 0 } else { 1 });
    }
    pid
}

fn exit(code: i32) {
    // SAFETY: _exit has no precondition.
    unsafe { libc::_exit(code) }
}

fn sleep_forever() {
    loop {
        // SAFETY: pause has no precondition.
        unsafe { libc::pause() };
    }
}

fn reap(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: `status` is a local variable for the kernel to fill.
    let answer = unsafe { libc::waitpid(pid, &mut status, 0) };
    assert_eq!(answer, pid);
    status
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

fn check(pid: i32, process: &PidFd, expected: ExitStatus) {
    await_exit(process);
    assert_eq!(process.status(), Some(expected));
    // Reading the status does not reap it.
    assert_eq!(process.status(), Some(expected));
    reap(pid);
    assert!(process.has_exited().unwrap());
    assert_eq!(process.status(), keeps_status().then_some(expected), "after another waiter reaped it");
    process.send_signal(libc::SIGKILL).unwrap();
    assert!(PidFd::open(pid).is_err());
}

#[test]
fn an_exit_code_is_seen_before_and_after_reaping() {
    for code in [0, 1, 255] {
        let pid = fork(|| exit(code));
        let process = PidFd::open(pid).unwrap();
        check(pid, &process, ExitStatus::Code(code));
    }
}

#[test]
fn a_signal_is_seen_before_and_after_reaping() {
    for signal in [libc::SIGKILL, libc::SIGTERM, libc::SIGABRT] {
        let pid = fork(sleep_forever);
        let process = PidFd::open(pid).unwrap();
        assert!(!process.has_exited().unwrap());
        assert_eq!(process.status(), None);
        process.send_signal(signal).unwrap();
        check(pid, &process, ExitStatus::Signal(signal));
    }
}

#[test]
fn a_stopped_process_lives() {
    let pid = fork(sleep_forever);
    let process = PidFd::open(pid).unwrap();
    process.send_signal(libc::SIGSTOP).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert!(!process.has_exited().unwrap());
    assert_eq!(process.status(), None);
    process.send_signal(libc::SIGKILL).unwrap();
    check(pid, &process, ExitStatus::Signal(libc::SIGKILL));
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
    let pid = fork(|| {
        // SAFETY: the number is closed on purpose; the child leaves without dropping `process`.
        unsafe { libc::close(process.as_fd().as_raw_fd()) };
        exit(if process.has_exited().is_err() && process.status().is_none() { 0 } else { 1 });
    });
    assert_eq!(reap(pid), 0);
}

#[test]
fn start_times_grow() {
    let first = start_time(std::process::id() as i32).unwrap();
    let pid = fork(sleep_forever);
    let second = start_time(pid).unwrap();
    assert!(second >= first);
    assert_eq!(start_time(pid).unwrap(), second);
    PidFd::open(pid).unwrap().send_signal(libc::SIGKILL).unwrap();
    reap(pid);
    assert!(start_time(pid).is_err());
}

#[test]
fn without_a_pidfd_the_end_of_a_child_is_known_until_it_is_reaped() {
    let pid = fork(sleep_forever);
    let time = start_time(pid).unwrap();
    assert_eq!(child_status(pid), None);
    assert!(!has_exited(pid, time) && !has_exited(pid, 0));
    assert!(has_exited(pid, time + 1), "the pid belongs to another process");
    // SAFETY: kill takes plain numbers.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    await_exit(&PidFd::open(pid).unwrap());
    for _ in 0..2 {
        assert_eq!(child_status(pid), Some(ExitStatus::Signal(libc::SIGKILL)));
        assert!(has_exited(pid, time));
    }
    reap(pid);
    assert!(has_exited(pid, time) && has_exited(pid, 0));
    assert_eq!(child_status(pid), None);
    assert_eq!(child_status(std::process::id() as i32), None);
    assert_eq!(child_status(-1), None);
}
