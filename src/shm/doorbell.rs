//! Waking the other side only when it sleeps, and the bitmap that names the rings that hold results.
//!
//! A sleeper announces itself, looks once more, and only then waits:
//!
//! ```text
//! sleeper                                  ringer
//! asleep = 1                               publish (a ring's tail, a bit of the bitmap)
//! fence                                    fence
//! ticket = bell                            asleep == 1 ? bell += 1, wake : nothing
//! anything there? yes: asleep = 0, go on
//! wait until bell != ticket
//! asleep = 0
//! ```
//! Of the two fences one comes first: either the ringer sees `asleep`, or the sleeper sees what was published. Only
//! the sleeper clears its flag: a ringer that is stopped between its two steps hides nobody else's ring, and a
//! ring too many is harmless.

use super::layout::Sleeper;
use crate::sync::{AtomicU64, Ordering, fence};

/// A promise to look once more before waiting on the bell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(pub u32);

impl Sleeper {
    /// Announces that the caller, who owns this side, is about to sleep. It must look for work once more and
    /// then either wait until the bell differs from the ticket or call [`Sleeper::awake`].
    #[inline]
    pub fn announce(&self) -> Ticket {
        self.asleep.store(1, Ordering::Relaxed);
        // SYNC: asleep-or-published (pairs with the fence in `Sleeper::must_ring`).
        fence(Ordering::SeqCst);
        // SYNC: bell-rung (pairs with the Release in `Sleeper::must_ring`).
        Ticket(self.bell.load(Ordering::Acquire))
    }

    /// Takes the announcement back; only the owner of this side may.
    #[inline]
    pub fn awake(&self) {
        self.asleep.store(0, Ordering::Relaxed);
    }

    /// True when the owner of this side is asleep and has to be woken by the means of the caller (futex, eventfd).
    /// To be called after publishing.
    #[inline]
    pub fn must_ring(&self) -> bool {
        // SYNC: asleep-or-published (pairs with the fence in `Sleeper::announce`).
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // SYNC: bell-rung (pairs with the Acquire in `Sleeper::announce`).
        self.bell.fetch_add(1, Ordering::Release);
        true
    }

    /// Rings whether or not the owner sleeps.
    pub fn ring_always(&self) {
        // SYNC: bell-rung (pairs with the Acquire in `Sleeper::announce`).
        self.bell.fetch_add(1, Ordering::Release);
    }
}

/// Marks ring `index` in the bitmap as holding results. To be called after publishing, before ringing.
#[inline]
pub fn mark(bitmap: &[AtomicU64], index: u32) {
    // SYNC: ring-marked (pairs with the Acquire swap in `take`).
    bitmap[(index / 64) as usize].fetch_or(1 << (index % 64), Ordering::Release);
}

/// Takes the marks of one word of the bitmap, which must be done before the marked rings are drained.
#[inline]
pub fn take(word: &AtomicU64) -> u64 {
    if word.load(Ordering::Relaxed) == 0 {
        return 0;
    }
    // SYNC: ring-marked (pairs with the Release in `mark`).
    word.swap(0, Ordering::Acquire)
}
