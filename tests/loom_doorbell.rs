//! The wake-up that could be lost, and the bitmap. Run by `make test` with `--cfg loom`.
//!
//! The kernel's part is modelled by its promise: a futex wait returns at once when the word is no longer what the
//! sleeper has seen, an eventfd keeps a ring until it is read. So a sleeper may sleep indefinitely only if the bell
//! is still what its ticket says, and nothing was there when it looked once more.
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
            // It sleeps: the ringer must have rung, and the futex must not wait on.
            assert!(rang);
            assert_ne!(sleeper.bell.load(Ordering::Acquire), ticket);
        }
    });
}

#[test]
fn a_ringer_that_is_stopped_half_way_hides_nobody_elses_ring() {
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
                // Asleep: the second ringer must come, and its ring count.
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
                    // What a mark names has been published before.
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
