//! Waiting on few and on many descriptors, and interruption by a signal that has a handler.

use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicU32;
use std::sync::mpsc;
use std::time::Duration;

use rustloader::error::Error;
use rustloader::sys::event::EventFd;
use rustloader::sys::futex::{self, Wake};
use rustloader::sys::poll::{PollSet, WaitOutcome};

/// Few descriptors use ppoll, many use epoll.
const COUNTS: [usize; 4] = [1, 32, 33, 200];

fn rig(count: usize) -> (Vec<EventFd>, PollSet) {
    let events: Vec<EventFd> = (0..count).map(|_| EventFd::new().unwrap()).collect();
    let mut set = PollSet::new();
    for (at, event) in events.iter().enumerate() {
        set.add(event.as_fd().as_raw_fd(), 1000 + at as u64).unwrap();
    }
    assert_eq!(set.len(), count);
    (events, set)
}

fn wait(set: &mut PollSet, millis: u64) -> (WaitOutcome, Vec<u64>) {
    let mut ready = vec![7];
    let outcome = set.wait(Some(Duration::from_millis(millis)), &mut ready).unwrap();
    ready.sort_unstable();
    (outcome, ready)
}

#[test]
fn readable_descriptors_are_reported() {
    for count in COUNTS {
        let (events, mut set) = rig(count);
        assert_eq!(wait(&mut set, 1), (WaitOutcome::TimedOut, vec![]));
        assert_eq!(wait(&mut set, 0), (WaitOutcome::TimedOut, vec![]));
        let last = count - 1;
        events[last].ring().unwrap();
        events[0].ring().unwrap();
        let mut expected = vec![1000, 1000 + last as u64];
        expected.dedup();
        assert_eq!(wait(&mut set, 1000), (WaitOutcome::Ready, expected));
        events[0].drain().unwrap();
        events[last].drain().unwrap();
        assert_eq!(wait(&mut set, 0), (WaitOutcome::TimedOut, vec![]));
    }
}

#[test]
fn every_descriptor_gets_its_turn() {
    let (events, mut set) = rig(200);
    events.iter().for_each(|event| event.ring().unwrap());
    let mut seen = std::collections::HashSet::new();
    for _ in 0..200 {
        seen.extend(wait(&mut set, 1000).1);
    }
    assert_eq!(seen.len(), 200);
}

#[test]
fn what_was_removed_is_not_waited_on() {
    for count in COUNTS {
        let (events, mut set) = rig(count);
        events.iter().for_each(|event| event.ring().unwrap());
        for token in (1000..1000 + count as u64).rev() {
            set.remove(token).unwrap();
        }
        assert!(set.is_empty());
        assert_eq!(wait(&mut set, 0), (WaitOutcome::TimedOut, vec![]));
        set.add(events[0].as_fd().as_raw_fd(), 5).unwrap();
        assert_eq!(wait(&mut set, 1000), (WaitOutcome::Ready, vec![5]));
    }
}

#[test]
fn tokens_and_descriptors_are_unique() {
    let (events, mut set) = rig(2);
    let other = EventFd::new().unwrap();
    assert!(matches!(set.add(other.as_fd().as_raw_fd(), 1000), Err(Error::Usage { .. })));
    assert!(matches!(set.add(events[0].as_fd().as_raw_fd(), 1), Err(Error::Usage { .. })));
    assert!(matches!(set.remove(1), Err(Error::Usage { .. })));
    assert_eq!(set.len(), 2);
}

#[test]
fn the_end_of_a_pipe_is_readable() {
    for count in COUNTS {
        let (_events, mut set) = rig(count);
        let (reader, writer) = std::io::pipe().unwrap();
        set.add(reader.as_raw_fd(), 1).unwrap();
        drop(writer);
        assert_eq!(wait(&mut set, 1000), (WaitOutcome::Ready, vec![1]));
        set.remove(1).unwrap();
    }
}

#[test]
fn a_descriptor_closed_too_early_is_forgotten_by_its_removal() {
    for count in COUNTS {
        let (mut events, mut set) = rig(count);
        let first = events.swap_remove(0);
        first.ring().unwrap();
        // Another descriptor holds the file open, as a forked sibling would: epoll keeps reporting it.
        let duplicate = first.as_fd().try_clone_to_owned().unwrap();
        let number = first.as_fd().as_raw_fd();
        drop(first);
        // Another test may already have reused the number, which does not matter.
        set.remove(1000).unwrap();
        assert_eq!(wait(&mut set, 0), (WaitOutcome::TimedOut, vec![]), "number {number} of {count}");
        drop(duplicate);
    }
}

extern "C" fn ignore(_signal: i32) {}

/// Runs `wait` in a new thread, and sends that thread signals until it returns.
fn interrupted<T: Send + 'static>(wait: impl FnOnce() -> T + Send + 'static) -> T {
    // SAFETY: a zeroed sigaction is valid, and has no flags (calls are not restarted); the handler does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as extern "C" fn(i32) as libc::sighandler_t;
        libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
    }
    let (send, receive) = mpsc::channel();
    let sleeper = std::thread::spawn(move || {
        // SAFETY: pthread_self has no precondition.
        send.send(unsafe { libc::pthread_self() }).unwrap();
        wait()
    });
    let thread = receive.recv().unwrap();
    while !sleeper.is_finished() {
        // SAFETY: the thread has not been joined.
        unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
        std::thread::sleep(Duration::from_millis(1));
    }
    sleeper.join().unwrap()
}

#[test]
fn signals_are_reported() {
    for count in COUNTS {
        let outcome = interrupted(move || {
            let (_events, mut set) = rig(count);
            set.wait(None, &mut Vec::new()).unwrap()
        });
        assert_eq!(outcome, WaitOutcome::Interrupted);
    }
    let woken = interrupted(|| futex::wait(&AtomicU32::new(0), 0, Some(Duration::from_secs(60))).unwrap());
    assert_eq!(woken, Wake::Interrupted);
}
