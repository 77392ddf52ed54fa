//! Failpoints, and errors of calls that they refuse: `cargo test --features failpoints`. `test_refusals.py` refuses each
//! call of whole loaders.
#![cfg(feature = "failpoints")]

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rustloader::error::Error;
use rustloader::sys::event::EventFd;
use rustloader::sys::failpoint::{self, Effect};
use rustloader::sys::fork_witness::ForkWitness;
use rustloader::sys::map::{Mapping, page_size};
use rustloader::sys::memfd;
use rustloader::sys::pidfd::PidFd;
use rustloader::sys::poll::{PollSet, WaitOutcome};
use rustloader::transport::Remote;
use rustloader::worker::port::Port;

#[path = "common/children.rs"]
mod children;

use children::Child;

/// Failpoints belong to the process, so tests run one at a time.
static ONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    let guard = ONE.lock().unwrap_or_else(|poison| poison.into_inner());
    failpoint::clear();
    guard
}

fn refuse(kind: &str, errno: i32) {
    failpoint::set(kind, 1, Effect::Errno(errno)).unwrap();
}

/// Asserts that a call fails with this errno under this name, with a hint.
fn assert_os<T>(result: Result<T, Error>, name: &str, refused: i32) {
    match result.err() {
        Some(Error::Os { call, errno, hint }) => {
            assert!((call, errno) == (name, refused) && !hint.is_empty(), "{call}");
        }
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn errors_name_their_call() {
    let _alone = alone();
    let fd = memfd::create("a", page_size() as u64).unwrap();
    let (map, process) =
        (Mapping::new(fd.as_fd(), page_size()).unwrap(), PidFd::open(std::process::id() as i32).unwrap());
    type Call<'a> = &'a dyn Fn() -> Result<(), Error>;
    let calls: [(&str, i32, &str, Call<'_>); 8] = [
        ("memfd_create", libc::EMFILE, "memfd_create", &|| memfd::create("a", 1).map(drop)),
        ("ftruncate", libc::ENOSPC, "ftruncate", &|| memfd::create("a", 1).map(drop)),
        ("seal", libc::EPERM, "fcntl(F_ADD_SEALS)", &|| memfd::seal(fd.as_fd())),
        ("mmap", libc::ENOMEM, "mmap", &|| Mapping::new(fd.as_fd(), 1).map(drop)),
        ("remove", libc::EOPNOTSUPP, "madvise(MADV_REMOVE)", &|| map.remove(0..page_size())),
        ("pidfd_open", libc::ENOSYS, "pidfd_open", &|| PidFd::open(1).map(drop)),
        ("pidfd_send_signal", libc::EPERM, "pidfd_send_signal", &|| process.send_signal(0)),
        ("eventfd", libc::EMFILE, "eventfd", &|| EventFd::new().map(drop)),
    ];
    for (kind, errno, name, call) in calls {
        refuse(kind, errno);
        assert_os(call(), name, errno);
    }
}

#[test]
fn a_memfd_is_created_on_a_kernel_without_noexec() {
    let _alone = alone();
    let before = failpoint::calls("memfd_create");
    refuse("memfd_create", libc::EINVAL);
    let fd = memfd::create("a", 1).unwrap();
    assert_eq!(failpoint::calls("memfd_create"), before + 2);
    memfd::seal(fd.as_fd()).unwrap();
}

#[test]
fn children_that_cannot_be_watched_count_as_alive() {
    let _alone = alone();
    refuse("memfd_create", libc::ENFILE);
    assert_os(ForkWitness::new(), "memfd_create", libc::ENFILE);
    let (witness, mapping) = ForkWitness::new().unwrap();
    drop(mapping);
    refuse("seal_write", libc::EPERM);
    assert!(!witness.all_ended());
    refuse("fstat", libc::EPERM);
    assert!(!witness.all_ended());
    assert!(witness.all_ended());
}

#[test]
fn pages_are_touched_if_an_old_kernel_or_a_sandbox_cannot_populate_them() {
    let _alone = alone();
    refuse("ftruncate", libc::EINTR);
    let fd = memfd::create("a", 4 * page_size() as u64).unwrap();
    let mapping = Mapping::new(fd.as_fd(), 4 * page_size()).unwrap();
    refuse("populate", libc::EINVAL);
    mapping.populate(0..2 * page_size()).unwrap();
    refuse("populate", libc::EPERM);
    mapping.populate(2 * page_size()..4 * page_size()).unwrap();
    refuse("populate", libc::EINTR);
    mapping.populate(0..2 * page_size()).unwrap();
}

#[test]
fn processes_may_be_hidden() {
    let _alone = alone();
    let me = std::process::id() as i32;
    refuse("pidfd_open", libc::ENOSYS);
    assert_os(PidFd::open(me), "pidfd_open", libc::ENOSYS);
    let process = PidFd::open(me).unwrap();
    refuse("waitid", libc::EINTR);
    assert_eq!(process.status(), None);
    refuse("waitid", libc::ECHILD);
    refuse("pidfd_get_info", libc::ENOTTY);
    assert_eq!(process.status(), None);
    refuse("pidfd_send_signal", libc::ESRCH);
    process.send_signal(0).unwrap();
    refuse("pidfd_send_signal", libc::EPERM);
    assert_os(process.send_signal(0), "pidfd_send_signal", libc::EPERM);
}

#[test]
fn doorbells_go_on_after_a_signal() {
    let _alone = alone();
    refuse("eventfd", libc::EMFILE);
    assert_os(EventFd::new(), "eventfd", libc::EMFILE);
    let event = EventFd::new().unwrap();
    refuse("eventfd_write", libc::EINTR);
    event.ring().unwrap();
    refuse("eventfd_read", libc::EINTR);
    event.drain().unwrap();
}

#[test]
fn without_an_epoll_many_are_polled() {
    let _alone = alone();
    failpoint::set_from("epoll_create", 1, Effect::Errno(libc::EMFILE)).unwrap();
    let events: Vec<EventFd> = (0..50).map(|_| EventFd::new().unwrap()).collect();
    let mut set = PollSet::new();
    for (token, event) in events.iter().enumerate() {
        set.add(event.as_fd().as_raw_fd(), token as u64).unwrap();
    }
    events[40].ring().unwrap();
    let (before, mut ready) = (failpoint::calls("ppoll"), Vec::new());
    assert_eq!(set.wait(Some(Duration::from_secs(60)), &mut ready).unwrap(), WaitOutcome::Ready);
    assert_eq!((ready.as_slice(), failpoint::calls("ppoll")), ([40].as_slice(), before + 1));
    set.remove(40).unwrap();
}

#[test]
fn ppoll_replaces_an_epoll_that_fails() {
    let _alone = alone();
    let events: Vec<EventFd> = (0..50).map(|_| EventFd::new().unwrap()).collect();
    for refused in ["epoll_ctl", "epoll_wait"] {
        let mut set = PollSet::new();
        for (token, event) in events.iter().enumerate() {
            if token == 40 {
                failpoint::set_from(refused, 1, Effect::Errno(libc::ENOSPC)).unwrap();
            }
            set.add(event.as_fd().as_raw_fd(), token as u64).unwrap();
        }
        events[45].ring().unwrap();
        let mut ready = Vec::new();
        assert_eq!(set.wait(Some(Duration::from_secs(60)), &mut ready).unwrap(), WaitOutcome::Ready);
        assert_eq!(ready, [45], "{refused}");
        failpoint::clear();
    }
}

#[test]
fn the_nth_call_counts_and_names_are_checked() {
    let _alone = alone();
    failpoint::set("eventfd", 3, Effect::Errno(libc::EMFILE)).unwrap();
    let answers: Vec<bool> = (0..4).map(|_| EventFd::new().is_ok()).collect();
    assert_eq!(answers, [true, true, false, true]);
    failpoint::set_from("eventfd", 2, Effect::Errno(libc::EMFILE)).unwrap();
    let answers: Vec<bool> = (0..4).map(|_| EventFd::new().is_ok()).collect();
    assert_eq!(answers, [true, false, false, false]);
    failpoint::clear();
    EventFd::new().unwrap();
    assert!(matches!(failpoint::set("nothing", 1, Effect::Kill), Err(Error::Usage { .. })));
    assert!(matches!(failpoint::set("eventfd", 0, Effect::Kill), Err(Error::Usage { .. })));
    assert!(failpoint::kinds().contains(&"eventfd"));
}

/// Not a test of its own: [`the_environment_drives_a_process`] runs it in another process.
#[test]
#[ignore = "run by the_environment_drives_a_process"]
fn driven() {
    EventFd::new().unwrap();
    let code = if EventFd::new().is_ok() { 10 } else { 11 };
    rustloader::sys::signal::exit_now(code);
}

#[test]
fn the_environment_drives_a_process() {
    // Another test limits the descriptors of this process for a moment.
    let _alone = alone();
    let run = |text: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "driven", "--ignored"]).env("RUSTLOADER_FAILPOINT", text);
        command.output().unwrap().status
    };
    assert_eq!(run("").code(), Some(10));
    assert_eq!(run("eventfd:2:EMFILE").code(), Some(11));
    assert_eq!(run("mmap:1:kill,eventfd:2+:24").code(), Some(11));
    assert_eq!(run("eventfd:2:exit=33").code(), Some(33));
    assert_eq!(run("eventfd:1:kill").signal(), Some(libc::SIGKILL));
    assert_eq!(run("eventfd:1").code(), Some(101));
}

#[test]
fn a_forked_child_is_driven_apart_from_its_parent() {
    let _alone = alone();
    let child = Child::fork(|| {
        failpoint::set("eventfd", 1, Effect::Exit(5)).unwrap();
        EventFd::new().is_ok()
    });
    assert_eq!(libc::WEXITSTATUS(child.wait()), 5);
    EventFd::new().unwrap();
}

#[test]
fn a_worker_elsewhere_whose_port_is_refused_ends_its_connection() {
    let _alone = alone();
    let (one, mut other) = UnixStream::pair().unwrap();
    other.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let remote = Remote::start(one.into(), 8, 1 << 29, || {}, || {}).unwrap();
    let kept = Arc::downgrade(&remote);
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a local struct.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
    // One more than the first descriptor that a copy may have.
    let none = libc::rlimit { rlim_cur: 4, ..limit };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &none) }, 0);
    let port = Port::over(remote);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    assert_os(port, "dup", libc::EMFILE);
    let mut received = Vec::new();
    other.read_to_end(&mut received).unwrap();
    assert!(received.is_empty(), "nothing is sent, as after a death");
    // Waits for its threads, so that their calls do not count in the next test.
    while kept.strong_count() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}
