//! A port's ends of the rings.

use crate::error::{Error, Result};
use crate::shm::arena::{ArenaQueue, ArenaRing};
use crate::shm::queue::Claimer;
use crate::shm::ring::{Consumer, Entry, Producer};
use crate::wire::TaskKind;

/// The ends that a port reads from and writes to.
#[derive(Debug)]
pub(super) struct Ends {
    pub(super) tasks: Consumer<ArenaRing>,
    /// The queue of the workers, if they share one. The ring then carries only control messages.
    pub(super) queue: Option<Claimer<ArenaQueue>>,
    /// A message that waits for the answer to a task that was taken before it.
    pub(super) held: Option<Entry>,
    /// A task of the queue that waits behind messages that begin an epoch early.
    pub(super) claimed: Option<Entry>,
    pub(super) results: Producer<ArenaRing>,
    /// Buffer for the head of a message.
    pub(super) head: Vec<u8>,
}

impl Ends {
    /// Takes the next entry: of the own ring, so that control messages come first, else of the queue. The message that
    /// begins an epoch early precedes its tasks, also one that was sent while this took a task.
    #[inline]
    pub(super) fn next(&mut self) -> Result<Option<Entry>> {
        if let Some(claimed) = self.claimed.take() {
            return self.behind_messages(claimed);
        }
        if let Some(held) = self.held.take() {
            return Ok(Some(held));
        }
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
            Some((_, claimed)) => self.behind_messages(claimed),
            None => Ok(None),
        }
    }

    /// Returns a task of the queue, or a message that begins an epoch early and was sent meanwhile: one of several if
    /// other workers have continued while this one took the task.
    #[inline]
    fn behind_messages(&mut self, claimed: Entry) -> Result<Option<Entry>> {
        match self.tasks.pop()? {
            None => Ok(Some(claimed)),
            Some(message) if message[1] == TaskKind::Early as u64 => {
                self.claimed = Some(claimed);
                Ok(Some(message))
            }
            Some(message) => {
                self.held = Some(message);
                Ok(Some(claimed))
            }
        }
    }
}
