//! A port's ends of the rings.

use crate::error::{Error, Result};
use crate::shm::arena::{ArenaQueue, ArenaRing};
use crate::shm::queue::Claimer;
use crate::shm::ring::{Consumer, Entry, Producer};

/// What a port reads from and writes to.
#[derive(Debug)]
pub(super) struct Ends {
    pub(super) tasks: Consumer<ArenaRing>,
    /// The queue of the workers, if they share one. The ring then carries only control messages.
    pub(super) queue: Option<Claimer<ArenaQueue>>,
    pub(super) results: Producer<ArenaRing>,
    /// Buffer for the head of a message.
    pub(super) head: Vec<u8>,
}

impl Ends {
    /// The next entry: of the own ring, so that control messages come first, else of the queue.
    #[inline]
    pub(super) fn next(&mut self) -> Result<Option<Entry>> {
        if let Some(entry) = self.tasks.pop()? {
            return Ok(Some(entry));
        }
        let claimed = match &mut self.queue {
            Some(queue) => queue.claim()?,
            None => None,
        };
        match claimed {
            Some((position, entry)) if entry[0] != position => {
                Err(Error::corrupt(format!("place {position} of a queue has task {}", entry[0])))
            }
            claimed => Ok(claimed.map(|(_, entry)| entry)),
        }
    }
}
