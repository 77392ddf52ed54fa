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
    /// The shared queue, if there is one. The ring then carries only control messages.
    pub(super) queue: Option<Claimer<ArenaQueue>>,
    /// A control message that [`Ends::next`] has taken together with a claimed task, and returns after that task.
    pub(super) held: Option<Entry>,
    /// A task claimed from the queue that must wait until all messages that begin an epoch early have been returned.
    pub(super) claimed: Option<Entry>,
    pub(super) results: Producer<ArenaRing>,
    /// Buffer for the head of a message.
    pub(super) head: Vec<u8>,
}

impl Ends {
    /// Takes the next entry: first from the worker's own ring, which carries the control messages, then from the queue.
    /// A message that begins an epoch early comes before the tasks of that epoch, even if it was sent while the worker
    /// was claiming one of them.
    #[inline]
    pub(super) fn next(&mut self) -> Result<Option<Entry>> {
        if let Some(claimed) = self.claimed.take() {
            return self.after_messages(claimed);
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
                Err(Error::corrupt(format!("position {position} of the shared queue holds task {}", entry[0])))
            }
            Some((_, claimed)) => self.after_messages(claimed),
            None => Ok(None),
        }
    }

    /// Returns a claimed task or, before it, a message that begins an epoch early and was sent in the meantime. There
    /// may be several such messages if other workers continued while this worker was claiming the task.
    #[inline]
    fn after_messages(&mut self, claimed: Entry) -> Result<Option<Entry>> {
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

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::shm::arena::Arena;
    use crate::wire::TaskEntry;

    #[test]
    fn a_claimed_task_waits_for_all_messages_that_begin_an_epoch_early() {
        let arena = Arena::create_sized(64 << 20, 1, 8).unwrap();
        let mut ends = Ends {
            tasks: Consumer::new(arena.task_ring(0)),
            queue: None,
            held: None,
            claimed: None,
            results: Producer::new(arena.result_ring(0)),
            head: Vec::new(),
        };
        let entry = |kind| TaskEntry::inline(0, kind, &[]).unwrap().to_words();
        let mut ring = Producer::new(arena.task_ring(0));
        let messages = [TaskKind::Early, TaskKind::Early, TaskKind::Rewind].map(entry);
        messages.iter().for_each(|message| ring.push(message).unwrap());
        // The messages arrive while the worker claims this task, after it has found its ring empty.
        let claimed = entry(TaskKind::Plain);
        assert_eq!(ends.after_messages(claimed).unwrap(), Some(messages[0]));
        for expected in [messages[1], claimed, messages[2]] {
            assert_eq!(ends.next().unwrap(), Some(expected));
        }
        assert_eq!(ends.next().unwrap(), None);
    }
}
