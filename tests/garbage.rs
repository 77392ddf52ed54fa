//! A broken worker may write anything to rings, headers and tables: reading it is an error, never a crash.

use std::sync::atomic::Ordering::Relaxed;

use proptest::prelude::*;
use rustloader::engine::completions::{Completions, Incoming, Message};
use rustloader::shm::alloc::Allocator;
use rustloader::shm::arena::Arena;
use rustloader::shm::block::WORKER;
use rustloader::shm::doorbell;
use rustloader::wire::{Load, ResultEntry, ResultKind, TaskEntry, Timings, read_message};

fn words() -> impl Strategy<Value = [u64; 8]> {
    let word = prop_oneof![any::<u64>(), 0..64u64, Just(u64::MAX), (0..7u64, 0..64u64).prop_map(|(k, b)| k | b << 32)];
    proptest::array::uniform8(word)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn entries_of_arbitrary_words_are_read_or_refused(words in words()) {
        let _ = TaskEntry::from_words(&words);
        let _ = ResultEntry::from_words(&words);
    }

    #[test]
    fn messages_of_arbitrary_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Ok((leaves, start)) = read_message(&bytes) {
            prop_assert!(start <= bytes.len());
            prop_assert!(leaves.len() * 16 + 8 == start);
        }
    }

    #[test]
    fn an_arena_full_of_garbage_is_an_error_not_a_crash(
        entries in proptest::collection::vec(words(), 1..16),
        tail in prop_oneof![any::<u32>(), 0..20u32],
        blocks in prop_oneof![any::<u32>(), 0..4u32],
        rows in proptest::collection::vec((any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>()), 1..8),
        returned in prop_oneof![any::<u32>(), 0..8u32],
        marks in any::<u64>(),
        payload in proptest::collection::vec(any::<u8>(), 0..64),
    ) {
        let arena = Arena::create_sized(1 << 30, 2, 8).unwrap();
        // One valid block, so that some of the entries lead somewhere.
        let mut allocator = Allocator::new(arena.clone(), 0);
        let valid = allocator.allocate(4096, WORKER).unwrap();
        let memory = arena.block_memory(0, valid, 4096).unwrap();
        // SAFETY: the block has 4096 bytes, and nothing else uses it.
        unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), memory.as_ptr(), payload.len()) };
        let mut completions = Completions::new(&arena);
        let control = arena.control(0);
        {
            use rustloader::shm::ring::RingMemory;
            let ring = arena.result_ring(0);
            for (slot, entry) in ring.slots().iter().zip(&entries) {
                slot.0.iter().zip(entry).for_each(|(word, value)| word.store(*value, Relaxed));
            }
        }
        control.results.tail.0.store(tail, Relaxed);
        let head = arena.region_head(0);
        head.blocks.store(blocks, Relaxed);
        head.returned.store(returned, Relaxed);
        for (entry, (state, next, offset, capacity)) in arena.table(0)[1..].iter().zip(&rows) {
            entry.state.store(*state, Relaxed);
            entry.next.store(*next, Relaxed);
            entry.offset.store(*offset, Relaxed);
            entry.capacity.store(*capacity, Relaxed);
        }
        arena.bitmap()[0].store(marks, Relaxed);
        doorbell::mark(arena.bitmap(), 0);
        for _ in 0..32 {
            match completions.next(&arena) {
                Ok(Some((_, incoming))) => drop(Message::open(&arena, &incoming, Vec::new())),
                Ok(None) | Err(_) => break,
            }
        }
        for block in [valid, 0, 1, 2, 3, blocks, returned] {
            let (timings, load) = (Timings::default(), Load::default());
            let (kind, block) = (ResultKind::Plain, Some(block));
            let entry = ResultEntry { task: 0, kind, block, len: 64, checksum: 0, timings, load };
            if let Ok(mut message) = Message::open(&arena, &Incoming { worker: 0, entry }, Vec::new()) {
                for leaf in 0..message.leaves.len() {
                    drop(message.leaves.take(leaf));
                }
            }
        }
        let _ = allocator.collect();
    }
}
