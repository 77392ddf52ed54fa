use std::sync::Arc;

use super::*;
use crate::children::Child;
use crate::error::Error;
use crate::shm::arena::Arena;
use crate::shm::block::CONSUMER;
use crate::sys::event::EventFd;
use crate::wire::{Leaf, ResultKind, Timings};
use crate::worker::port::Keep;

const LEN: usize = 100_000;

fn port() -> Arc<Port> {
    let arena = Arena::create_sized(1 << 30, 1, 8).unwrap();
    let doorbell = EventFd::new().unwrap().as_fd().try_clone_to_owned().unwrap();
    Arc::new(Port::open(arena, 0, doorbell).unwrap())
}

fn array_of(port: &Port, len: usize, zeroed: bool) -> Option<NonNull<u8>> {
    port.allocate_array(len, zeroed).unwrap()
}

fn free(port: &Port, memory: *mut u8) {
    // SAFETY: the tests read an array's memory after its end only while they hold its block.
    unsafe { port.free_array(memory) }
}

fn resize(port: &Port, memory: *mut u8, len: usize) -> Resized {
    // SAFETY: the tests read nothing from `len` on.
    unsafe { port.resize_array(memory, len) }
}

fn block_of(port: &Port, memory: NonNull<u8>) -> u32 {
    port.adoptable(memory.as_ptr() as usize, LEN as u64).unwrap().0
}

fn bytes(memory: NonNull<u8>) -> &'static [u8] {
    // SAFETY: an array of LEN bytes that the test keeps alive, or whose block it holds.
    unsafe { std::slice::from_raw_parts(memory.as_ptr(), LEN) }
}

#[test]
fn a_freed_array_leaves_its_block_to_the_next_one() {
    let port = port();
    let one = array_of(&port, LEN, false).unwrap();
    let two = array_of(&port, LEN, false).unwrap();
    assert_ne!(one, two);
    free(&port, one.as_ptr());
    assert_eq!(array_of(&port, LEN, false), Some(one));
    // Memory that is not an array, or is already freed, is not freed.
    free(&port, two.as_ptr().wrapping_add(4096));
    free(&port, std::ptr::null_mut());
    assert_eq!(port.array_len(two.as_ptr()), LEN);
    free(&port, two.as_ptr());
    free(&port, two.as_ptr());
    assert_eq!(port.array_len(two.as_ptr()), 0);
    assert_eq!(array_of(&port, LEN, false), Some(two));
    assert_ne!(array_of(&port, LEN, false), Some(two));
}

#[test]
fn a_zeroed_array_is_zero_even_in_a_reused_block() {
    let port = port();
    let array = array_of(&port, LEN, false).unwrap();
    // SAFETY: an array of LEN bytes.
    unsafe { array.write_bytes(7, LEN) };
    free(&port, array.as_ptr());
    assert_eq!(array_of(&port, LEN, true), Some(array));
    assert!(bytes(array).iter().all(|byte| *byte == 0));
}

#[test]
fn a_noted_array_stays_until_it_is_taken() {
    let port = port();
    let array = array_of(&port, LEN, true).unwrap();
    let block = block_of(&port, array);
    assert!(port.has_array(block) && port.note_array(block));
    assert!(!port.note_array(block), "one message at a time");
    assert!(!port.is_freed(block));
    assert!(!port.take_freed(block), "it is alive");
    assert!(port.note_array(block));
    free(&port, array.as_ptr());
    assert!(port.is_freed(block));
    assert_ne!(array_of(&port, LEN, false), Some(array));
    assert!(port.take_freed(block));
    assert!(!port.has_array(block) && !port.take_freed(block));
    port.release(block);
    assert_eq!(array_of(&port, LEN, false), Some(array));
}

#[test]
fn the_block_of_a_freed_array_passes_to_the_consumer() {
    let port = port();
    let array = array_of(&port, LEN, true).unwrap();
    let block = block_of(&port, array);
    assert!(port.note_array(block));
    let leaf = Leaf { block, len: LEN as u64 };
    let unknown = port.send(0, ResultKind::Plain, &[(leaf, Keep::Unknown { offset: 0 })], b"", Timings::default());
    assert!(matches!(unknown, Err(Error::Usage { .. })), "{unknown:?}");
    free(&port, array.as_ptr());
    assert!(port.take_freed(block));
    port.send(1, ResultKind::Plain, &[(leaf, Keep::Freed)], b"", Timings::default()).unwrap();
    let state = || port.arena().table(0)[block as usize].state.load(Ordering::Relaxed);
    assert_eq!(state(), CONSUMER);
    assert_ne!(array_of(&port, LEN, false), Some(array));
    port.arena().release(0, block, CONSUMER);
    assert_eq!(array_of(&port, LEN, false), Some(array));
}

#[test]
fn a_block_of_a_message_outlives_the_workers_object_and_is_taken_back_if_nothing_is_sent() {
    let port = port();
    let (block, memory) = port.allocate(LEN as u64).unwrap();
    port.transfer_early(block);
    port.release(block);
    assert_ne!(port.allocate(LEN as u64).unwrap().0, block);
    port.take_back(block);
    assert_eq!(port.allocate(LEN as u64).unwrap(), (block, memory));
    port.transfer_early(block);
    assert_eq!(port.adoptable(memory as usize, LEN as u64), None, "another message includes it");
    port.release(block);
    let leaf = Leaf { block, len: LEN as u64 };
    port.send(0, ResultKind::Plain, &[(leaf, Keep::TransferredEarly)], b"", Timings::default()).unwrap();
    assert_eq!(port.arena().table(0)[block as usize].state.load(Ordering::Relaxed), CONSUMER);
    port.arena().release(0, block, CONSUMER);
    assert_eq!(port.allocate(LEN as u64).unwrap().0, block);
}

#[test]
fn an_array_grows_in_place_while_its_block_has_room() {
    let port = port();
    let array = array_of(&port, LEN, true).unwrap();
    assert_eq!(resize(&port, array.as_ptr(), LEN + 4000), Resized::InPlace);
    assert_eq!(port.array_len(array.as_ptr()), LEN + 4000);
    assert_eq!(resize(&port, array.as_ptr(), 10 * LEN), Resized::Move(LEN + 4000));
    assert_eq!(resize(&port, array.as_ptr(), LEN), Resized::InPlace);
    assert_eq!(resize(&port, array.as_ptr(), LEN / 3), Resized::Move(LEN), "most of the block would be unused");
    assert!(port.note_array(block_of(&port, array)));
    assert_eq!(resize(&port, array.as_ptr(), LEN), Resized::Move(LEN), "a message includes it");
    assert_eq!(resize(&port, array.as_ptr().wrapping_add(1), LEN), Resized::Move(0));
}

#[test]
fn arrays_get_a_share_of_the_region_and_none_after_the_end() {
    let port = port();
    let each = ARRAYS_FROM as usize / 4;
    let arrays: Vec<_> = (0..4).map(|_| array_of(&port, each, false).unwrap()).collect();
    assert_eq!(array_of(&port, 1, false), None);
    free(&port, arrays[0].as_ptr());
    assert_eq!(resize(&port, arrays[1].as_ptr(), each - 4096), Resized::InPlace);
    assert_eq!(array_of(&port, each + 4097, false), None);
    let larger = array_of(&port, each + 4096, false).unwrap();
    free(&port, larger.as_ptr());
    port.leave();
    assert_eq!(array_of(&port, LEN, false), None);
    free(&port, arrays[2].as_ptr());
    assert_eq!(port.array_len(arrays[2].as_ptr()), each, "the region is unchanged");
    assert_eq!(resize(&port, arrays[2].as_ptr(), each - 1), Resized::Move(each));
}

#[test]
fn arrays_do_not_make_other_blocks_lose_their_pages() {
    let port = port();
    let (block, memory) = port.allocate(10 << 20).unwrap();
    port.release(block);
    for _ in 0..10_000 {
        let array = array_of(&port, LEN, false).unwrap();
        free(&port, array.as_ptr());
    }
    assert_eq!(port.arena().table(0)[block as usize].warm.load(Ordering::Relaxed), 10 << 20);
    assert_eq!(port.allocate(10 << 20).unwrap(), (block, memory));
}

#[test]
fn a_child_has_private_copies_and_changes_nothing() {
    let port = port();
    watch(&port).unwrap();
    let array = array_of(&port, LEN, true).unwrap();
    // SAFETY: an array of LEN bytes that only this thread and its child use.
    let first = || unsafe { array.as_ptr().read_volatile() };
    let child = Child::fork(|| {
        // SAFETY: the child's private copy of the array.
        unsafe { array.write_bytes(9, LEN) };
        let mut as_expected = first() == 9 && array_of(&port, LEN, false).is_none();
        as_expected &= port.array_len(array.as_ptr()) == LEN && port.array_len(std::ptr::null_mut()) == 0;
        as_expected &= resize(&port, array.as_ptr(), LEN) == Resized::Move(LEN);
        free(&port, array.as_ptr());
        as_expected && !port.has_array(0) && !port.note_array(0) && !port.take_freed(0)
    });
    // In the parent, the fork returned only after the child had its copy.
    // SAFETY: an array of LEN bytes.
    unsafe { array.write_bytes(5, LEN) };
    assert_eq!((child.wait(), first()), (0, 5));
    assert_eq!(port.array_len(array.as_ptr()), LEN);
    free(&port, array.as_ptr());
    assert_eq!(port.array_len(array.as_ptr()), 0);
}
