//! Models of rings, bitmap and bells combined: a worker that is told to leave, and a result on its way to the main
//! process. `make test-loom` runs them.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::thread;
use rustloader::shm::doorbell::{Ticket, mark, take};
use rustloader::shm::layout::{SLOT_WORDS, Sleeper};
use rustloader::shm::ring::heap::HeapRing;

/// `Handle::stop_workers` against `Port::receive`: the worker leaves, or the bell ends its wait.
#[test]
fn a_worker_that_falls_asleep_while_it_is_stopped_is_woken() {
    loom::model(|| {
        let (stop, sleeper) = (Arc::new(AtomicU32::new(0)), Arc::new(Sleeper::default()));
        let main = {
            let (stop, sleeper) = (stop.clone(), sleeper.clone());
            thread::spawn(move || {
                stop.store(1, Ordering::Relaxed);
                sleeper.ring_always();
            })
        };
        let Ticket(ticket) = sleeper.announce();
        let leaves = stop.load(Ordering::Relaxed) != 0;
        let waits = !leaves && sleeper.bell.load(Ordering::Acquire) == ticket;
        main.join().unwrap();
        if waits {
            // The wake-up comes after the ring and finds the worker waiting. The worker then checks the flag again.
            assert_ne!(sleeper.bell.load(Ordering::Acquire), ticket);
        }
        assert_eq!(stop.load(Ordering::Relaxed), 1);
    });
}

/// A worker that is told to leave while a task is on its way sees the flag or the task before it sleeps.
#[test]
fn a_task_that_is_sent_while_the_worker_is_stopped_is_taken_once_or_not_at_all() {
    loom::model(|| {
        let (mut tasks, mut received) = HeapRing::new(2).split();
        let (stop, sleeper) = (Arc::new(AtomicU32::new(0)), Arc::new(Sleeper::default()));
        let main = {
            let (stop, sleeper) = (stop.clone(), sleeper.clone());
            thread::spawn(move || {
                tasks.push(&[1; SLOT_WORDS]).unwrap();
                let rang = sleeper.must_ring();
                stop.store(1, Ordering::Relaxed);
                sleeper.ring_always();
                rang
            })
        };
        let Ticket(ticket) = sleeper.announce();
        let leaves = stop.load(Ordering::Relaxed) != 0;
        let mut taken = if leaves { 0 } else { u32::from(received.pop().unwrap().is_some()) };
        main.join().unwrap();
        let sleeps = !leaves && taken == 0 && sleeper.bell.load(Ordering::Acquire) == ticket;
        assert!(!sleeps, "the worker sees neither the task nor the flag, and sleeps");
        taken += u32::from(received.pop().unwrap().is_some());
        assert_eq!(taken, 1);
    });
}

/// `Port::publish` against the main process's wait, with the ring, the bitmap and the bell.
#[test]
fn a_result_is_found_before_the_sleep_or_rings() {
    loom::model(|| {
        let (mut results, mut consumer) = HeapRing::new(2).split();
        let bitmap: Arc<Vec<AtomicU64>> = Arc::new(vec![AtomicU64::new(0)]);
        let sleeper = Arc::new(Sleeper::default());
        let worker = {
            let (bitmap, sleeper) = (bitmap.clone(), sleeper.clone());
            thread::spawn(move || {
                results.push(&[7; SLOT_WORDS]).unwrap();
                mark(&bitmap, 0);
                sleeper.must_ring()
            })
        };
        let mut drain = || match take(&bitmap[0]) {
            0 => None,
            _ => Some(consumer.pop().unwrap().expect("a marked ring has an entry")),
        };
        let mut found = drain();
        if found.is_none() {
            sleeper.announce();
            found = drain();
            if found.is_some() {
                sleeper.awake();
            }
        }
        let rang = worker.join().unwrap();
        if found.is_none() {
            assert!(rang, "the main process sleeps and is never woken");
            found = drain();
        }
        assert_eq!(found, Some([7; SLOT_WORDS]));
    });
}
