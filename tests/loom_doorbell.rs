//! Models of wake-ups and of the bitmap. `make test-loom` runs them.
//!
//! The models rely on what the kernel guarantees: a futex wait returns at once if the word differs from the expected
//! value, and an eventfd stays readable until it is read. So a sleeper waits only if its last check finds no work and
//! the bell still has the value of its ticket.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::thread;
use rustloader::shm::doorbell::{Ticket, mark, take};
use rustloader::shm::layout::Sleeper;

#[test]
fn no_wake_up_is_lost() {
    loom::model(|| {
        let sleeper = Arc::new(Sleeper::default());
        let work = Arc::new(AtomicU32::new(0));
        let ringer = {
            let (sleeper, work) = (sleeper.clone(), work.clone());
            thread::spawn(move || {
                work.store(1, Ordering::Release);
                sleeper.must_ring()
            })
        };
        let Ticket(ticket) = sleeper.announce();
        let saw = work.load(Ordering::Acquire) == 1;
        if saw {
            sleeper.awake();
        }
        let rang = ringer.join().unwrap();
        if !saw {
            // The sleeper is about to wait: the ringer must have rung, so that the wait ends.
            assert!(rang);
            assert_ne!(sleeper.bell.load(Ordering::Acquire), ticket);
        }
    });
}

#[test]
fn a_ringer_that_is_stopped_halfway_does_not_prevent_another_ring() {
    loom::model(|| {
        let sleeper = Arc::new(Sleeper::default());
        let work = Arc::new(AtomicU32::new(0));
        // One ringer has published, and is stopped before it rings.
        work.fetch_add(1, Ordering::Release);
        let other = {
            let (sleeper, work) = (sleeper.clone(), work.clone());
            thread::spawn(move || {
                work.fetch_add(1, Ordering::Release);
                sleeper.must_ring()
            })
        };
        let mut seen = 0;
        while seen < 2 {
            let Ticket(ticket) = sleeper.announce();
            let now = work.load(Ordering::Acquire);
            if now == seen && sleeper.bell.load(Ordering::Acquire) == ticket {
                // Asleep: only the second ringer's ring ends the wait.
                while sleeper.bell.load(Ordering::Acquire) == ticket {
                    thread::yield_now();
                }
            }
            sleeper.awake();
            seen = work.load(Ordering::Acquire);
        }
        other.join().unwrap();
    });
}

#[test]
fn a_marked_ring_is_never_overlooked() {
    loom::model(|| {
        let bitmap: Arc<Vec<AtomicU64>> = Arc::new(vec![AtomicU64::new(0)]);
        let published: Arc<[AtomicU32; 2]> = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let workers: Vec<_> = (0..2u32)
            .map(|worker| {
                let (bitmap, published) = (bitmap.clone(), published.clone());
                thread::spawn(move || {
                    published[worker as usize].store(1, Ordering::Release);
                    mark(&bitmap, worker);
                })
            })
            .collect();
        let mut found = [0, 0];
        let look = |found: &mut [u32; 2]| {
            let marks = take(&bitmap[0]);
            for worker in 0..2 {
                if marks & (1 << worker) != 0 {
                    // The worker published before it set the mark.
                    assert_eq!(published[worker].load(Ordering::Acquire), 1);
                    found[worker] += 1;
                }
            }
        };
        look(&mut found);
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        look(&mut found);
        assert_eq!(found, [1, 1]);
    });
}
