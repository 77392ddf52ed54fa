//! Who holds a block: two holders that let go, the return stack, a fork's mark. Run by `make test` with `--cfg loom`.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use rustloader::shm::block::{
    CONSUMER, DELIVERED, FORKED, Left, RETURNING, WORKER, mark_if, push_returned, release, release_owned,
    take_returned,
};
use rustloader::shm::layout::Block;

struct Region {
    head: AtomicU32,
    blocks: [Block; 2],
}

fn region(first: u32, second: u32) -> Arc<Region> {
    let region = Region { head: AtomicU32::new(0), blocks: [Block::default(), Block::default()] };
    region.blocks[0].state.store(first, Ordering::Relaxed);
    region.blocks[1].state.store(second, Ordering::Relaxed);
    Arc::new(region)
}

/// The consumer's way to let go.
fn consumer_lets_go(region: &Region, id: u32) {
    let block = &region.blocks[id as usize];
    if release(&block.state, CONSUMER) == Left::Last {
        push_returned(&region.head, block, id);
    }
}

/// What the owner finds on the stack.
fn taken(region: &Region) -> Vec<u32> {
    let mut freed = Vec::new();
    take_returned(&region.head, 2, |id| &region.blocks[id as usize], |id| freed.push(id)).unwrap();
    freed
}

#[test]
fn of_two_holders_just_one_gives_the_block_back() {
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
fn the_return_stack_loses_nothing_and_doubles_nothing() {
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
            // The owner sends it again, and the consumer drops it again.
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
            // The child may look at it: it is not free until the mark is gone.
            assert_eq!(state, FORKED);
            assert_eq!(release(&region.blocks[0].state, FORKED), Left::Last);
            push_returned(&region.head, &region.blocks[0], 0);
        } else {
            assert_eq!(state, RETURNING);
        }
        assert_eq!(taken(&region), [0]);
    });
}
