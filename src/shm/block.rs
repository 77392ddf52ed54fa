//! Who holds a block: the bits of its state, and the stack on which blocks come back.
//!
//! A block is free when no bit is set. Three bits name holders: [`CONSUMER`] (main holds it in a
//! batch, delivered or not), [`WORKER`] (a tensor in the worker lies in it) and [`FORKED`] (a child of the main process may
//! still look at it; [`WORKER_FORKED`] is the same for a child of the worker). [`RETURNING`] is no holder: the block is
//! on its way over the return stack and belongs to the stack until the region's owner has taken it.
//!
//! Who clears the last holder's bit gives the block back. The owner of the region does so by putting it into its
//! private list; everybody else sets RETURNING in the same step and pushes it onto the stack. So a
//! block is on the stack at most once, and a new owner that scans the table never takes a block for free that
//! somebody is about to push.

use super::layout::BlockEntry;
use crate::error::{Error, Result};
use crate::sync::{AtomicU32, Ordering, fence};

/// Held by the consumer: in a result ring, in the reorder buffer, or leased to the user's tensors.
pub const CONSUMER: u32 = 1;
/// Held by the process that allocated it.
pub const WORKER: u32 = 2;
/// Seen by children of the consumer's process.
pub const FORKED: u32 = 4;
/// Seen by children of the owner's process.
pub const WORKER_FORKED: u32 = 8;
/// On its way back to the owner.
pub const RETURNING: u32 = 16;
/// Not a holder either: the consumer has made a tensor of it, so that a fork must mark it.
pub const DELIVERED: u32 = 32;

/// Bits that keep a block from being free.
const HOLDERS: u32 = CONSUMER | WORKER | FORKED | WORKER_FORKED;

/// What remained after a holder let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Somebody else still holds the block.
    Held,
    /// It was the last; the block is the caller's to give back.
    Last,
}

/// Lets go of `bits` from outside the owning process. With the last holder gone the block becomes RETURNING, and
/// the caller pushes it onto the return stack.
#[inline]
pub fn release(state: &AtomicU32, bits: u32) -> Left {
    let mut seen = state.load(Ordering::Relaxed);
    loop {
        if seen & bits == 0 {
            // Nothing of the caller's is there: a broken worker has overwritten the word. Leave it alone.
            return Left::Held;
        }
        let rest = seen & !bits & HOLDERS;
        let delivered = if bits & CONSUMER != 0 { 0 } else { seen & DELIVERED };
        let next = if rest == 0 { RETURNING } else { rest | delivered };
        // SYNC: block-released (Release: what the holder read or wrote comes before; Acquire: and what the other
        // holders did comes before the block is given back).
        match state.compare_exchange_weak(seen, next, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return if rest == 0 { Left::Last } else { Left::Held },
            Err(now) => seen = now,
        }
    }
}

/// Lets go of `bits` inside the owning process; with the last holder gone the block is free at once.
#[inline]
pub fn release_owned(state: &AtomicU32, bits: u32) -> Left {
    // SYNC: block-released.
    let before = state.fetch_and(!bits, Ordering::AcqRel);
    if before & bits != 0 && before & !bits & (HOLDERS | RETURNING) == 0 { Left::Last } else { Left::Held }
}

/// Adds `bits` if the block is held by `holder` now; says whether it was.
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

/// Whether no worker is there, because the arena is in the pool or retired: a block that is released then loses its pages at
/// once. Who parks the arena looks at all blocks afterwards, and who releases one looks at this: one of the two sees the
/// other.
#[derive(Debug, Default)]
pub struct Parking(AtomicU32);

impl Parking {
    /// The last worker has gone. To be called before the blocks are looked at ([`recover`], [`is_unseen`]).
    pub fn begin(&self) {
        self.0.store(1, Ordering::Relaxed);
        // SYNC: parked-or-released (pairs with the fence in `give_back`).
        fence(Ordering::SeqCst);
    }

    /// New workers come.
    pub fn end(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Gives back a block whose last holder has let go by [`release`], after `punch` where the arena is parked.
#[inline]
pub fn give_back(parking: &Parking, head: &AtomicU32, block: &BlockEntry, id: u32, punch: impl FnOnce()) {
    // SYNC: parked-or-released (pairs with the fence in `Parking::begin`).
    fence(Ordering::SeqCst);
    if parking.0.load(Ordering::Relaxed) != 0 {
        punch();
    }
    // Only now: from here on a new owner may have it.
    push_returned(head, block, id);
}

/// What the workers' end has left of a block, see [`recover`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remains {
    /// Somebody holds it.
    Held,
    /// Nobody does, but one that lets go just now may be about to give it back.
    Idle,
    /// A child of the worker may look at it.
    WorkersChild,
}

/// Takes a block back from a worker that has gone, and from the consumer if it was never delivered. The arena is parked.
pub fn recover(state: &AtomicU32) -> Remains {
    // SYNC: block-held, block-released (pairs with the owner's store, and the Release of whoever let go).
    let seen = state.load(Ordering::Acquire);
    if seen & WORKER_FORKED != 0 {
        return Remains::WorkersChild;
    }
    let gone = WORKER | if seen & DELIVERED == 0 { CONSUMER } else { 0 };
    let rest = state.fetch_and(!gone, Ordering::AcqRel) & !gone;
    if rest & !RETURNING == 0 { Remains::Idle } else { Remains::Held }
}

/// Whether neither the user nor any child can look at a block, so that its pages may go. The arena is parked for good.
pub fn is_unseen(state: &AtomicU32) -> bool {
    // SYNC: block-released.
    state.load(Ordering::Acquire) & (DELIVERED | FORKED | WORKER_FORKED) == 0
}

/// Pushes a RETURNING block onto the return stack (Treiber's stack; since the owner takes it whole by a swap, the ABA
/// problem cannot arise).
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

/// Takes the whole return stack: each block on it becomes free and is handed to `freed`. Links are checked: a
/// link out of the table, or more links than blocks, is [`Error::Corrupt`].
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
            return Err(Error::corrupt(format!("block {id} of {blocks} on a return stack")));
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
