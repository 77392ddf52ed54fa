//! Block ownership: the state bits, and the stack on which blocks return to their owner.
//!
//! A block is free when no bit is set. The bits of holders are [`CONSUMER`], [`WORKER`], [`FORKED`] and
//! [`WORKER_FORKED`]. [`RETURNING`] is not a holder: the block is on the return stack, or is about to be pushed onto
//! it, and is not free until the region's owner takes it.
//!
//! The last holder to clear its bit frees the block. If that holder is the region's owner, it puts the block into its
//! private free list. Any other holder sets RETURNING in the same step and then pushes the block onto the stack. So a
//! block is on the stack at most once, and a new owner that scans the table never takes a block that another thread is
//! about to push.

use super::layout::BlockEntry;
use crate::error::{Error, Result};
use crate::sync::{AtomicU32, Ordering, fence};

/// Held by the consumer: the block's message is in a completion ring or in the reorder buffer, or the block is leased
/// to the user's tensors.
pub const CONSUMER: u32 = 1;
/// Held by the process that allocated it.
pub const WORKER: u32 = 2;
/// May be read by forked children of the main process.
pub const FORKED: u32 = 4;
/// May be read by forked children of the worker.
pub const WORKER_FORKED: u32 = 8;
/// Not a holder: the block is on its way back to the owner.
pub const RETURNING: u32 = 16;
/// Not a holder: delivered tensors use the block, so a fork must mark it.
pub const DELIVERED: u32 = 32;

/// The bits of all holders.
const HOLDERS: u32 = CONSUMER | WORKER | FORKED | WORKER_FORKED;

/// The result of clearing holder bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Another holder remains.
    Held,
    /// No holder remains; the caller must free the block.
    Last,
}

/// Clears `bits` for a holder that returns blocks through the return stack. If no holder remains, the block becomes
/// RETURNING and the caller must push it with [`give_back`]. Any process may call this, unlike [`release_owned`].
#[inline]
pub fn release(state: &AtomicU32, bits: u32) -> Left {
    let mut seen = state.load(Ordering::Relaxed);
    loop {
        if seen & bits == 0 {
            // The bits are not set, so a broken worker must have overwritten the word. Leave the block alone.
            return Left::Held;
        }
        let remaining = seen & !bits & HOLDERS;
        let delivered = if bits & CONSUMER != 0 { 0 } else { seen & DELIVERED };
        let next = if remaining == 0 { RETURNING } else { remaining | delivered };
        // SYNC: block-released. Release: this holder's accesses happen before the block is reused. Acquire: so do those
        // of the holders that released it earlier.
        match state.compare_exchange_weak(seen, next, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return if remaining == 0 { Left::Last } else { Left::Held },
            Err(now) => seen = now,
        }
    }
}

/// Clears `bits` in the process that owns the region. If no holder remains, the block is free at once, and the caller
/// may reuse it.
#[inline]
pub fn release_owned(state: &AtomicU32, bits: u32) -> Left {
    // SYNC: block-released.
    let before = state.fetch_and(!bits, Ordering::AcqRel);
    if before & bits != 0 && before & !bits & (HOLDERS | RETURNING) == 0 { Left::Last } else { Left::Held }
}

/// Sets `bits` if all bits of `holder` are set. Returns true if it has set them.
#[inline]
pub fn mark_if(state: &AtomicU32, holder: u32, bits: u32) -> bool {
    let mut seen = state.load(Ordering::Relaxed);
    while seen & holder == holder {
        match state.compare_exchange_weak(seen, seen | bits, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(now) => seen = now,
        }
    }
    false
}

/// A flag that is set while no worker is attached, because the arena is in the pool or retired. While it is set, a
/// released block loses its pages at once. The thread that parks the arena sets the flag and then scans all blocks; a
/// release changes the block's state and then checks the flag. So at least one of the two sees the other's change.
#[derive(Debug, Default)]
pub struct Parking(AtomicU32);

impl Parking {
    /// Sets the flag. Call it after the last worker has left and before scanning the blocks with [`recover`] or
    /// [`is_unseen`].
    pub fn begin(&self) {
        self.0.store(1, Ordering::Relaxed);
        // SYNC: parked-or-released (pairs with the fence in `give_back`).
        fence(Ordering::SeqCst);
    }

    /// Clears the flag. Call it before new workers attach.
    pub fn end(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Pushes a block for which [`release`] returned [`Left::Last`] onto the return stack. If the arena is parked, first
/// calls `punch`, which releases the block's pages.
#[inline]
pub fn give_back(parking: &Parking, head: &AtomicU32, block: &BlockEntry, id: u32, punch: impl FnOnce()) {
    // SYNC: parked-or-released (pairs with the fence in `Parking::begin`).
    fence(Ordering::SeqCst);
    if parking.0.load(Ordering::Relaxed) != 0 {
        punch();
    }
    // The push comes last, because a new owner may use the block afterwards.
    push_returned(head, block, id);
}

/// The result of [`recover`]: whether a block is still held after the workers have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remains {
    /// A holder remains.
    Held,
    /// No holder remains. The thread that released the block may not have pushed it yet.
    Idle,
    /// A child of the worker may still read the block.
    WorkersChild,
}

/// Clears an ended worker's hold on a block, and the consumer's hold if the block was never delivered. Changes nothing
/// if a child of the worker may still read the block. The arena must be parked.
pub fn recover(state: &AtomicU32) -> Remains {
    // SYNC: block-held, block-released (pair with the owner's store and with each holder's Release).
    let seen = state.load(Ordering::Acquire);
    if seen & WORKER_FORKED != 0 {
        return Remains::WorkersChild;
    }
    let holds = WORKER | if seen & DELIVERED == 0 { CONSUMER } else { 0 };
    let remaining = state.fetch_and(!holds, Ordering::AcqRel) & !holds;
    if remaining & !RETURNING == 0 { Remains::Idle } else { Remains::Held }
}

/// Returns true if neither the user nor any forked child can read a block, so that its pages may be released. The arena
/// must be retired.
pub fn is_unseen(state: &AtomicU32) -> bool {
    // SYNC: block-released.
    state.load(Ordering::Acquire) & (DELIVERED | FORKED | WORKER_FORKED) == 0
}

/// Pushes a RETURNING block onto the return stack. The stack is a Treiber stack. It has no ABA problem, because the
/// owner takes all blocks with one swap.
#[inline]
pub fn push_returned(head: &AtomicU32, block: &BlockEntry, id: u32) {
    let mut first = head.load(Ordering::Relaxed);
    loop {
        block.next.store(first, Ordering::Relaxed);
        // SYNC: block-returned (pairs with the Acquire swap in `take_returned`).
        match head.compare_exchange_weak(first, id + 1, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => first = now,
        }
    }
}

/// Empties the return stack. Each block on it becomes free, and its ID is passed to `freed`. Only the region's owner
/// may call this. Returns [`Error::Corrupt`] if a link points outside the table, or if there are more links than
/// blocks.
pub fn take_returned<'a>(
    head: &AtomicU32,
    blocks: u32,
    block: impl Fn(u32) -> &'a BlockEntry,
    mut freed: impl FnMut(u32),
) -> Result<()> {
    if head.load(Ordering::Relaxed) == 0 {
        return Ok(());
    }
    // SYNC: block-returned (pairs with the Release in `push_returned`).
    let mut link = head.swap(0, Ordering::Acquire);
    let mut left = blocks;
    while link != 0 {
        let id = link - 1;
        if id >= blocks || left == 0 {
            return Err(Error::corrupt(format!("a return stack has an invalid link to block {id} of {blocks} blocks")));
        }
        left -= 1;
        let entry = block(id);
        link = entry.next.load(Ordering::Relaxed);
        if entry.state.compare_exchange(RETURNING, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            freed(id);
        }
    }
    Ok(())
}
