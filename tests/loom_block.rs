//! Models of the ownership of a block: releases by two holders, the return stack, a fork's mark, and an arena that is
//! pooled or retired. `make test-loom` runs them.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use rustloader::shm::block::{
    CONSUMER, DELIVERED, FORKED, Left, Parking, RETURNING, Remains, WORKER, give_back, is_unseen, mark_if,
    push_returned, recover, release, release_owned, take_returned,
};
use rustloader::shm::layout::BlockEntry;

struct Region {
    head: AtomicU32,
    blocks: [BlockEntry; 2],
}

fn region(first: u32, second: u32) -> Arc<Region> {
    let region = Region { head: AtomicU32::new(0), blocks: [BlockEntry::default(), BlockEntry::default()] };
    region.blocks[0].state.store(first, Ordering::Relaxed);
    region.blocks[1].state.store(second, Ordering::Relaxed);
    Arc::new(region)
}

/// Releases the consumer's hold on a block.
fn consumer_lets_go(region: &Region, id: u32) {
    let block = &region.blocks[id as usize];
    if release(&block.state, CONSUMER) == Left::Last {
        push_returned(&region.head, block, id);
    }
}

/// Empties the return stack as the owner does, and returns the IDs of the freed blocks.
fn taken(region: &Region) -> Vec<u32> {
    let mut freed = Vec::new();
    take_returned(&region.head, 2, |id| &region.blocks[id as usize], |id| freed.push(id)).unwrap();
    freed
}

#[test]
fn exactly_one_of_two_holders_frees_the_block() {
    loom::model(|| {
        let region = region(CONSUMER | WORKER, 0);
        let consumer = {
            let region = region.clone();
            thread::spawn(move || consumer_lets_go(&region, 0))
        };
        let by_owner = release_owned(&region.blocks[0].state, WORKER) == Left::Last;
        consumer.join().unwrap();
        let by_stack = taken(&region) == [0];
        assert!(by_owner ^ by_stack);
        assert_eq!(region.blocks[0].state.load(Ordering::Relaxed), 0);
    });
}

#[test]
fn the_return_stack_neither_loses_nor_duplicates_a_block() {
    loom::model(|| {
        let region = region(CONSUMER, CONSUMER);
        let droppers: Vec<_> = (0..2)
            .map(|id| {
                let region = region.clone();
                thread::spawn(move || consumer_lets_go(&region, id))
            })
            .collect();
        let mut all = taken(&region);
        droppers.into_iter().for_each(|dropper| dropper.join().unwrap());
        all.extend(taken(&region));
        all.sort_unstable();
        assert_eq!(all, [0, 1]);
    });
}

#[test]
fn a_block_that_is_reused_at_once_is_not_on_the_stack_twice() {
    loom::model(|| {
        let region = region(CONSUMER, CONSUMER);
        let other = {
            let region = region.clone();
            thread::spawn(move || consumer_lets_go(&region, 1))
        };
        consumer_lets_go(&region, 0);
        let mut returned = 0;
        for id in taken(&region) {
            // The owner sends the block again, and the consumer releases it again.
            region.blocks[id as usize].state.store(CONSUMER, Ordering::Release);
            consumer_lets_go(&region, id);
            returned += 1;
        }
        other.join().unwrap();
        let mut left = taken(&region);
        left.sort_unstable();
        left.dedup();
        assert_eq!(left, [0, 1]);
        assert!(returned >= 1);
    });
}

#[test]
fn a_forks_mark_keeps_the_block_or_comes_too_late() {
    loom::model(|| {
        let region = region(CONSUMER | DELIVERED, 0);
        let consumer = {
            let region = region.clone();
            thread::spawn(move || consumer_lets_go(&region, 0))
        };
        let marked = mark_if(&region.blocks[0].state, CONSUMER | DELIVERED, FORKED);
        consumer.join().unwrap();
        let state = region.blocks[0].state.load(Ordering::Relaxed);
        if marked {
            // The child may read the block, so the block is not free until the mark is removed.
            assert_eq!(state, FORKED);
            assert_eq!(release(&region.blocks[0].state, FORKED), Left::Last);
            push_returned(&region.head, &region.blocks[0], 0);
        } else {
            assert_eq!(state, RETURNING);
        }
        assert_eq!(taken(&region), [0]);
    });
}

/// An arena between two iterators, with one block that may have pages.
struct Parked {
    parking: Parking,
    region: Arc<Region>,
    /// Number of times that the block has lost its pages.
    punched: AtomicU32,
    /// 1 if a new owner has taken the block.
    owned: AtomicU32,
}

fn parked(state: u32) -> Arc<Parked> {
    Arc::new(Parked {
        parking: Parking::default(),
        region: region(state, 0),
        punched: AtomicU32::new(0),
        owned: AtomicU32::new(0),
    })
}

impl Parked {
    fn state(&self) -> &AtomicU32 {
        &self.region.blocks[0].state
    }

    fn punch(&self) {
        assert_eq!(self.owned.load(Ordering::Relaxed), 0, "a new owner's block loses its pages");
        self.punched.fetch_add(1, Ordering::Relaxed);
    }

    /// Releases the hold of the user, who drops the tensors in the block, or of the forked children, which have ended.
    fn let_go(&self, bits: u32) {
        if release(self.state(), bits) == Left::Last {
            give_back(&self.parking, &self.region.head, &self.region.blocks[0], 0, || self.punch());
        }
    }
}

#[test]
fn a_block_that_is_released_while_the_arena_is_retired_loses_its_pages() {
    loom::model(|| {
        let arena = parked(CONSUMER | DELIVERED | FORKED);
        let droppers = [CONSUMER, FORKED].map(|bits| {
            let arena = arena.clone();
            thread::spawn(move || arena.let_go(bits))
        });
        arena.parking.begin();
        let early = is_unseen(arena.state());
        if early {
            arena.punch();
        }
        droppers.into_iter().for_each(|dropper| dropper.join().unwrap());
        assert!(arena.punched.load(Ordering::Relaxed) >= 1, "neither the scan nor the last release punched the block");
    });
}

#[test]
fn a_block_that_is_returned_late_is_not_punched_once_it_has_a_new_owner() {
    loom::model(|| {
        let arena = parked(CONSUMER | WORKER | DELIVERED);
        let user = {
            let arena = arena.clone();
            thread::spawn(move || arena.let_go(CONSUMER))
        };
        arena.parking.begin();
        let remains = recover(arena.state());
        assert_ne!(remains, Remains::WorkersChild);
        arena.parking.end();
        // A new owner takes the block if its state says that it is free, or if it is on the return stack.
        let free = arena.state().load(Ordering::Acquire) == 0;
        let back = taken(&arena.region) == [0];
        assert!(!(free && back));
        if free || back {
            arena.owned.store(1, Ordering::Relaxed);
        }
        user.join().unwrap();
        let late = taken(&arena.region) == [0];
        assert!(late ^ back ^ free, "the block is lost or freed twice");
        assert_eq!(arena.state().load(Ordering::Relaxed), 0);
    });
}
