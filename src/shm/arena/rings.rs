//! Rings and the shared queue in an arena's memory.

use std::ptr::NonNull;
use std::sync::Arc;

use super::Arena;
use crate::shm::layout::{QueueControl, QueueSlot, RingControl, RingSlot};
use crate::shm::queue::QueueMemory;
use crate::shm::ring::RingMemory;

/// Counters and slots in the memory of an arena, which `_arena` keeps mapped.
#[derive(Debug)]
pub struct Mapped<C, S> {
    _arena: Arc<Arena>,
    control: NonNull<C>,
    slots: NonNull<[S]>,
}

/// A ring in an arena.
pub type ArenaRing = Mapped<RingControl, RingSlot>;
/// The shared queue of an arena.
pub type ArenaQueue = Mapped<QueueControl, QueueSlot>;

// SAFETY: the pointers stand for shared references into memory that `_arena` keeps mapped. References to `Sync` types
// are `Send`, and so is `Arc<Arena>`.
unsafe impl<C: Sync, S: Sync> Send for Mapped<C, S> {}

impl<C, S> Mapped<C, S> {
    pub(super) fn new(arena: Arc<Arena>, control: &C, slots: &[S]) -> Self {
        Self { control: NonNull::from(control), slots: NonNull::from(slots), _arena: arena }
    }

    #[inline]
    fn mapped_control(&self) -> &C {
        // SAFETY: points into the mapping that `_arena` keeps.
        unsafe { self.control.as_ref() }
    }

    #[inline]
    fn mapped_slots(&self) -> &[S] {
        // SAFETY: points into the mapping that `_arena` keeps.
        unsafe { self.slots.as_ref() }
    }
}

impl RingMemory for ArenaRing {
    #[inline]
    fn control(&self) -> &RingControl {
        self.mapped_control()
    }

    #[inline]
    fn slots(&self) -> &[RingSlot] {
        self.mapped_slots()
    }
}

impl QueueMemory for ArenaQueue {
    #[inline]
    fn control(&self) -> &QueueControl {
        self.mapped_control()
    }

    #[inline]
    fn slots(&self) -> &[QueueSlot] {
        self.mapped_slots()
    }
}
