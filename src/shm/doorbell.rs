//! Wake-ups that are sent only if the other side sleeps, and the bitmap of rings that hold results.
//!
//! A sleeper announces itself, checks for work once more, and only then waits:
//!
//! ```text
//! sleeper                                  ringer
//! asleep += 1                              publish (a ring's tail, a bit of the bitmap)
//! fence                                    fence
//! ticket = bell                            asleep > 0 ? bell += 1, wake : nothing
//! work found? asleep -= 1, return
//! wait until bell != ticket
//! asleep -= 1
//! ```
//! One of the two fences comes first: either the ringer sees `asleep`, or the sleeper sees the published entry. A
//! ringer never changes `asleep`, so one that is stopped between publishing and ringing does not keep others from
//! ringing. A spurious ring is harmless, and so is an `asleep` that stays too high because a sleeper was killed.

use super::layout::Sleeper;
use crate::sync::{AtomicU64, Ordering, fence};

/// The value of the bell when [`Sleeper::announce`] was called. The sleeper waits until the bell has another value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(pub u32);

impl Sleeper {
    /// Announces that the caller, a thread of this side, is about to sleep. The caller must then check for work once
    /// more; if there is none, it waits until the bell differs from the ticket. In both cases it must call
    /// [`Sleeper::awake`] afterwards.
    #[inline]
    pub fn announce(&self) -> Ticket {
        self.asleep.fetch_add(1, Ordering::Relaxed);
        // SYNC: asleep-or-published (pairs with the fence in `Sleeper::must_ring`).
        fence(Ordering::SeqCst);
        // SYNC: bell-rung (pairs with the Release in `Sleeper::must_ring`).
        Ticket(self.bell.load(Ordering::Acquire))
    }

    /// Withdraws the caller's announcement.
    #[inline]
    pub fn awake(&self) {
        self.asleep.fetch_sub(1, Ordering::Relaxed);
    }

    /// Rings the bell and returns true if a thread of this side sleeps. The caller must then wake that thread, by futex
    /// or eventfd. Call it after publishing.
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

    /// Rings the bell even if no thread sleeps.
    pub fn ring_always(&self) {
        // SYNC: bell-rung (pairs with the Acquire in `Sleeper::announce`).
        self.bell.fetch_add(1, Ordering::Release);
    }
}

/// Marks the ring at `index` as holding results. Call it after publishing and before ringing.
#[inline]
pub fn mark(bitmap: &[AtomicU64], index: u32) {
    // SYNC: ring-marked (pairs with the Acquire swap in `take`).
    bitmap[(index / 64) as usize].fetch_or(1 << (index % 64), Ordering::Release);
}

/// Takes and clears the marks in one word of the bitmap. Call it before draining the marked rings.
#[inline]
pub fn take(word: &AtomicU64) -> u64 {
    if word.load(Ordering::Relaxed) == 0 {
        return 0;
    }
    // SYNC: ring-marked (pairs with the Release in `mark`).
    word.swap(0, Ordering::Acquire)
}
