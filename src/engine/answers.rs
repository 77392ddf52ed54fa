//! What is known of the answers of this epoch, for positions to resume from. Any thread may ask at any time.

use std::sync::{MutexGuard, PoisonError};

use super::Handle;
use super::position::Positions;

/// The answers of the current epoch.
#[derive(Debug)]
pub struct Answers {
    /// Which tasks have been delivered.
    pub positions: Positions,
}

impl Answers {
    /// The begin of an iterator.
    pub(super) fn new(workers: u32) -> Self {
        Self { positions: Positions::new(workers as usize) }
    }

    /// Forgets the last epoch.
    pub(super) fn begin_epoch(&mut self) {
        self.positions.begin_epoch();
    }
}

impl Handle {
    /// The answers. Locked only briefly: no Python code runs meanwhile, and nothing waits. The bindings hold the GIL then, so
    /// that Python never forks with the lock held; a child checks [`Handle::is_ours`] first.
    pub fn answers(&self) -> MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
