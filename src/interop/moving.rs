//! Protection of storages that torch moves to other memory while tensors use them. `share_memory_()` and torch's queues
//! move storages.
//!
//! torch copies such a storage into new memory, puts the new memory into the storage, and frees the old memory. An
//! array or DLPack view of a tensor keeps the storage alive, but not its old memory. In addition, an encoder that
//! copies without the GIL could read freed memory.
//!
//! So torch's function runs within a [`Move`]. The function calls the deleter of the old memory on the same thread,
//! where [`catch`] passes the memory to the [`Move`] instead of freeing it. The storage then keeps the old memory until
//! the storage itself is freed. Moves and [`Reading`]s exclude each other. Both begin and end while their thread holds
//! the GIL, so simple counters are sufficient.
//!
//! Without a move, the cost is one atomic load per freed tensor, and two counter updates per encoded batch.

use std::cell::Cell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::sys::fork;

/// A counter that reads 0 in a forked child, because the counted moves and readings belong to threads of the parent.
#[derive(Debug)]
struct Count(AtomicU64);

/// The number of low bits of a [`Count`] that hold its value. The bits above hold the fork generation.
const COUNT_BITS: u32 = 32;

impl Count {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    fn stamp() -> u64 {
        fork::generation() << COUNT_BITS
    }

    fn update(&self, change: impl Fn(u64) -> u64) {
        let stamp = Self::stamp();
        let next = |value: u64| {
            let count = if value >> COUNT_BITS == stamp >> COUNT_BITS { value & u64::from(u32::MAX) } else { 0 };
            Some(stamp | change(count))
        };
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
    }

    fn is_zero(&self) -> bool {
        let value = self.0.load(Ordering::Acquire);
        value == 0 || value >> COUNT_BITS != Self::stamp() >> COUNT_BITS || value as u32 == 0
    }
}

static MOVES: Count = Count::new();
static READINGS: Count = Count::new();

thread_local! {
    /// The innermost move of this thread.
    static INNERMOST: Cell<*mut PendingMove> = const { Cell::new(std::ptr::null_mut()) };
    /// Number of readings in progress on this thread.
    static OWN_READINGS: Cell<u32> = const { Cell::new(0) };
}

/// Interval between two checks of a count by a waiting thread.
const PAUSE: Duration = Duration::from_micros(100);

/// A block (see `dlpack::block`) whose deleter was called during a move. Dropping the value frees the block.
#[derive(Debug)]
pub struct Freed {
    block: *mut c_void,
    free: unsafe fn(*mut c_void),
}

// SAFETY: a block may be freed on any thread (`Memory: Send`).
unsafe impl Send for Freed {}
// SAFETY: a shared reference gives no access to the block.
unsafe impl Sync for Freed {}

impl Drop for Freed {
    fn drop(&mut self) {
        // SAFETY: `catch` took the block over from its deleter, which was called once and did not free it.
        unsafe { (self.free)(self.block) }
    }
}

/// The record of a move, in which `catch` stores the storage's old memory. The records of a thread form a list.
struct PendingMove {
    address: *const u8,
    caught: Option<Freed>,
    outer: *mut PendingMove,
}

/// A move, by this thread, of the storage whose memory is at a given address. While this value lives, no other thread
/// reads tensors without the GIL.
pub struct Move {
    pending: Box<PendingMove>,
    /// Makes the type `!Send`, so that the value stays on its thread.
    _thread: PhantomData<*mut ()>,
}

impl Move {
    /// Begins a move, after waiting for the readings of other threads. `pause` must release the GIL and sleep.
    pub fn begin(address: *const u8, pause: impl Fn(Duration)) -> Self {
        MOVES.update(|count| count + 1);
        // A finalizer may move a storage while its own thread encodes a batch. The thread must not wait for itself.
        while OWN_READINGS.get() == 0 && !READINGS.is_zero() {
            pause(PAUSE);
        }
        let mut pending = Box::new(PendingMove { address, caught: None, outer: INNERMOST.get() });
        INNERMOST.set(&raw mut *pending);
        Self { pending, _thread: PhantomData }
    }

    /// Ends the move. Returns the storage's old memory if this crate created it and torch has freed it.
    pub fn end(mut self) -> Option<Freed> {
        self.pending.caught.take()
    }
}

impl Drop for Move {
    fn drop(&mut self) {
        INNERMOST.set(self.pending.outer);
        MOVES.update(|count| count.saturating_sub(1));
    }
}

/// Stores `block` in this thread's [`Move`] of the storage whose memory is at `data`, and returns true. Returns false
/// if there is no such move. A deleter calls this before it frees the block.
///
/// # Safety
/// `free` must be able to free `block` on any thread. If this returns true, the caller must not use `block` any more.
#[inline]
pub unsafe fn catch(data: *const u8, block: *mut c_void, free: unsafe fn(*mut c_void)) -> bool {
    if MOVES.is_zero() {
        return false;
    }
    let mut at = INNERMOST.get();
    // SAFETY: the list contains records of this thread, each of which lives until it leaves the list. No other thread
    // uses them.
    while let Some(pending) = unsafe { at.as_mut() } {
        if pending.address == data && pending.caught.is_none() {
            pending.caught = Some(Freed { block, free });
            return true;
        }
        at = pending.outer;
    }
    false
}

/// A period in which this thread reads the memory of tensors without the GIL. While this value lives, no other thread
/// moves a storage.
#[derive(Debug)]
pub struct Reading {
    /// Makes the type `!Send`, so that the value stays on its thread.
    _thread: PhantomData<*mut ()>,
}

impl Reading {
    /// Begins a reading, after waiting for the moves of other threads. `pause` must release the GIL and sleep.
    pub fn begin(pause: impl Fn(Duration)) -> Self {
        while INNERMOST.get().is_null() && OWN_READINGS.get() == 0 && !MOVES.is_zero() {
            pause(PAUSE);
        }
        READINGS.update(|count| count + 1);
        OWN_READINGS.set(OWN_READINGS.get() + 1);
        Self { _thread: PhantomData }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        OWN_READINGS.set(OWN_READINGS.get() - 1);
        READINGS.update(|count| count.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// Serializes these tests, because the counts are global to the process.
    static ALONE: Mutex<()> = Mutex::new(());

    unsafe fn set(flag: *mut c_void) {
        // SAFETY: `flag` points to the flag of a test, which outlives the block.
        unsafe { &*flag.cast::<AtomicBool>() }.store(true, Ordering::Relaxed);
    }

    fn is_caught(data: *const u8, flag: &AtomicBool) -> bool {
        // SAFETY: `set` may be called with the flag on any thread.
        unsafe { catch(data, std::ptr::from_ref(flag).cast_mut().cast(), set) }
    }

    #[test]
    fn a_move_catches_only_the_memory_of_its_storage() {
        let _alone = ALONE.lock().unwrap_or_else(|it| it.into_inner());
        let (freed, byte, other) = (AtomicBool::new(false), 1u8, 2u8);
        assert!(!is_caught(&byte, &freed));
        let outer = Move::begin(&byte, |_| panic!("nothing reads"));
        let inner = Move::begin(&other, |_| panic!("nothing reads"));
        assert!(!is_caught(std::ptr::null(), &freed));
        assert!(is_caught(&byte, &freed));
        assert!(!is_caught(&byte, &freed));
        assert!(std::thread::scope(|scope| scope.spawn(|| !is_caught(&2u8, &freed)).join().unwrap()));
        assert!(inner.end().is_none());
        let memory = outer.end();
        assert!(!is_caught(&byte, &freed));
        assert!(!freed.load(Ordering::Relaxed));
        drop(memory);
        assert!(freed.load(Ordering::Relaxed));
    }

    #[test]
    fn moves_and_readings_wait_for_one_another() {
        let _alone = ALONE.lock().unwrap_or_else(|it| it.into_inner());
        let waited = AtomicBool::new(false);
        let note = |time| {
            waited.store(true, Ordering::Relaxed);
            std::thread::sleep(time);
        };
        std::thread::scope(|scope| {
            let reading = Reading::begin(|_| panic!("nothing moves"));
            let mover = scope.spawn(|| drop(Move::begin(&1, note)));
            while !waited.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            assert!(!mover.is_finished());
            drop(reading);
        });
        waited.store(false, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let moving = Move::begin(&1, |_| panic!("nothing reads"));
            let reader = scope.spawn(|| drop(Reading::begin(note)));
            while !waited.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            assert!(!reader.is_finished());
            drop(moving);
        });
        assert!(MOVES.is_zero() && READINGS.is_zero());
    }

    #[test]
    fn a_thread_does_not_wait_for_itself() {
        let _alone = ALONE.lock().unwrap_or_else(|it| it.into_inner());
        let never = |_| panic!("it waits for itself");
        let reading = Reading::begin(never);
        drop(Move::begin(&1, never));
        drop(reading);
        let moving = Move::begin(&1, never);
        drop(Reading::begin(never));
        drop(moving);
    }
}
