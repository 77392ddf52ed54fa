//! Models of the shared queue. `make test-loom` runs them.
//!
//! A worker may be killed between any two of its steps. Other processes see the swap of a slot's state, the later move
//! of the head, and the changes of `asleep`. So the models stop a worker before it moves the head, and while it sleeps.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::Ordering;
use loom::thread;
use rustloader::shm::doorbell::Ticket;
use rustloader::shm::layout::{SLOT_WORDS, Sleeper};
use rustloader::shm::queue::QueueMemory;
use rustloader::shm::queue::heap::HeapQueue;
use rustloader::shm::ring::Entry;

fn entry(position: u64) -> Entry {
    [position + 10; SLOT_WORDS]
}

/// Returns the positions that a worker claims in `times` attempts. Checks that each entry is whole.
fn claimed(queue: &HeapQueue, worker: u32, times: usize) -> Vec<u64> {
    let mut claimer = queue.claimer(worker);
    let mut found = Vec::new();
    for _ in 0..times {
        if let Some((position, words)) = claimer.claim().unwrap() {
            assert_eq!(words, entry(position));
            found.push(position);
        }
    }
    found
}

#[test]
fn two_workers_never_claim_the_same_entry_and_none_is_lost() {
    loom::model(|| {
        let queue = HeapQueue::new(2);
        let mut main = queue.submitter();
        main.push(&entry(0)).unwrap();
        let worker_1 = {
            let queue = queue.clone();
            thread::spawn(move || claimed(&queue, 1, 2))
        };
        let worker_0 = {
            let queue = queue.clone();
            thread::spawn(move || claimed(&queue, 0, 1))
        };
        main.push(&entry(1)).unwrap();
        let (by_0, by_1) = (worker_0.join().unwrap(), worker_1.join().unwrap());
        let by_2 = claimed(&queue, 2, 2);
        for (worker, found) in [(0, &by_0), (1, &by_1), (2, &by_2)] {
            assert!(found.is_sorted());
            found.iter().for_each(|position| assert!(main.answered(*position, worker)));
        }
        let mut all = [by_0, by_1, by_2].concat();
        all.sort_unstable();
        assert_eq!(all, [0, 1]);
    });
}

#[test]
fn a_slot_is_reused_only_after_its_entry_was_read() {
    loom::model(|| {
        let queue = HeapQueue::new(1);
        let mut main = queue.submitter();
        main.push(&entry(0)).unwrap();
        let workers: Vec<_> = (0..2)
            .map(|worker| {
                let queue = queue.clone();
                thread::spawn(move || claimed(&queue, worker, 1))
            })
            .collect();
        // The push succeeds if a worker holds the first entry, which is never answered.
        let pushed = main.push(&entry(1)).is_ok();
        let found: Vec<_> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
        let rest = claimed(&queue, 2, 1);
        let mut all = [found.concat(), rest].concat();
        all.sort_unstable();
        assert_eq!(all, if pushed { vec![0, 1] } else { vec![0] });
        let holder = found.iter().position(|found| found.contains(&0));
        assert_eq!(main.holder(0), Some(holder.map_or(2, |worker| worker as u32)));
    });
}

#[test]
fn an_entry_is_claimed_or_withdrawn() {
    loom::model(|| {
        let queue = HeapQueue::new(2);
        let mut main = queue.submitter();
        main.push(&entry(0)).unwrap();
        main.push(&entry(1)).unwrap();
        let worker = {
            let queue = queue.clone();
            thread::spawn(move || claimed(&queue, 0, 2))
        };
        let withdrawn: Vec<_> = (0..2).filter(|position| main.withdraw(*position).is_some()).collect();
        let found = worker.join().unwrap();
        for position in 0..2 {
            assert_ne!(found.contains(&position), withdrawn.contains(&position), "{position}");
            assert_eq!(main.holder(position), found.contains(&position).then_some(0));
        }
        // The slots of both entries are reused.
        assert_eq!((main.push(&entry(2)), main.push(&entry(3))), (Ok(2), Ok(3)));
        assert_eq!(claimed(&queue, 1, 2), [2, 3]);
    });
}

#[test]
fn a_worker_that_stops_after_its_swap_holds_one_entry_and_no_other_worker_waits_for_it() {
    loom::model(|| {
        let queue = HeapQueue::new(2);
        let mut main = queue.submitter();
        main.push(&entry(0)).unwrap();
        main.push(&entry(1)).unwrap();
        let killed = {
            let queue = queue.clone();
            thread::spawn(move || {
                // The steps of `Claimer::claim` up to its swap.
                let slot = queue.slot(0);
                let seen = slot.state.load(Ordering::Acquire);
                slot.state.compare_exchange(1 << 18, seen | 2, Ordering::Release, Ordering::Relaxed).is_ok()
            })
        };
        let found = claimed(&queue, 1, 2);
        let holds = killed.join().unwrap();
        assert_eq!(found, if holds { vec![1] } else { vec![0, 1] });
        assert_eq!(main.held_by(0), holds.then_some(0));
        main.push(&entry(2)).unwrap();
        assert_eq!(claimed(&queue, 1, 1), [2]);
        assert_eq!(main.held_by(0), holds.then_some(0));
    });
}

/// Announces that a worker is about to sleep, and then checks for the entry, as `Port::receive` does. Returns whether
/// the worker has claimed the entry, and its ticket.
fn announce_and_claim(queue: &HeapQueue, worker: u32, sleeper: &Sleeper) -> (bool, u32) {
    let Ticket(ticket) = sleeper.announce();
    (claimed(queue, worker, 1) == [0], ticket)
}

#[test]
fn an_entry_that_is_queued_while_workers_fall_asleep_is_claimed_or_rings() {
    loom::model(|| {
        let (queue, sleeper) = (HeapQueue::new(2), Arc::new(Sleeper::default()));
        let main = {
            let (mut main, sleeper) = (queue.submitter(), sleeper.clone());
            thread::spawn(move || {
                main.push(&entry(0)).unwrap();
                sleeper.must_ring()
            })
        };
        let other = {
            let (queue, sleeper) = (queue.clone(), sleeper.clone());
            thread::spawn(move || announce_and_claim(&queue, 1, &sleeper))
        };
        let (mine, my_ticket) = announce_and_claim(&queue, 0, &sleeper);
        let (others, other_ticket) = other.join().unwrap();
        let rang = main.join().unwrap();
        assert!(!(mine && others));
        if !mine && !others {
            // Neither has claimed the entry: the bell must have been rung after at least one of the announcements.
            let bell = sleeper.bell.load(Ordering::Acquire);
            assert!(rang && (bell != my_ticket || bell != other_ticket));
        }
    });
}

#[test]
fn a_sleeper_that_was_killed_or_has_found_work_does_not_hide_another() {
    loom::model(|| {
        let (queue, sleeper) = (HeapQueue::new(2), Arc::new(Sleeper::default()));
        // A worker that is killed while it sleeps.
        sleeper.announce();
        // A worker that finds other work withdraws only its own announcement.
        let busy = {
            let sleeper = sleeper.clone();
            thread::spawn(move || {
                sleeper.announce();
                sleeper.awake();
            })
        };
        let main = {
            let (mut main, sleeper) = (queue.submitter(), sleeper.clone());
            thread::spawn(move || {
                main.push(&entry(0)).unwrap();
                sleeper.must_ring()
            })
        };
        let (found, ticket) = announce_and_claim(&queue, 0, &sleeper);
        busy.join().unwrap();
        let rang = main.join().unwrap();
        assert!(found || (rang && sleeper.bell.load(Ordering::Acquire) != ticket));
    });
}
