//! Replacement of a dead worker's process. Only tests use it so far.

use super::Engine;
use crate::error::{Error, Result};
use crate::id::WorkerId;
use crate::shm::block::CONSUMER;
use crate::wire::TaskEntry;

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Empties a dead worker's slot for the next process, see [`Engine::started`]. Its published results count, its leases stay
    /// valid, and the blocks of tasks that it had not taken are released. The scheduler still reports the death.
    ///
    /// Errors: [`Error::Usage`] before the death has reached the scheduler, or if the slot is vacant already.
    pub fn reset_worker(&mut self, worker: u32) -> Result<()> {
        // A death is reported after the process has left the poll set and its ring has been drained.
        if !self.scheduler.is_dead(WorkerId(worker)) {
            return Err(Error::usage(format!("worker {worker} is not known to be dead")));
        }
        self.handle.vacate(worker)?;
        let (arena, region) = (self.arena().clone(), self.allocator.region());
        let withdrawn = |entry| {
            if let Ok(TaskEntry { block: Some(block), .. }) = TaskEntry::from_words(&entry) {
                arena.release(region, block, CONSUMER);
            }
        };
        let result = arena.reset_worker(worker, withdrawn);
        self.sticky(result)?;
        self.stalls.forget(worker);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::time::Duration;

    use super::*;
    use crate::scheduler::Settings;
    use crate::shm::arena::Arena;

    fn kill(child: &mut Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn an_event_of_an_earlier_process_says_nothing_about_the_present_one() {
        let arena = Arena::create_sized(1 << 30, 1, 4).unwrap();
        let mut engine = Engine::<u64>::over(arena, Settings::torch(1, 4, true)).unwrap();
        let start = || Command::new("sleep").arg("1000").spawn().unwrap();
        let mut first = start();
        engine.started(0, first.id() as i32).unwrap();
        kill(&mut first);
        engine.wait(None).unwrap();
        let stale = engine.ready.clone();
        assert_eq!(stale.len(), 1);
        engine.after_wait().unwrap();
        engine.reset_worker(0).unwrap();
        let mut second = start();
        engine.started(0, second.id() as i32).unwrap();
        engine.ready = stale;
        engine.take_notice().unwrap();
        assert!(engine.unwatched.is_empty() && engine.handle.alive() == 1);
        // Its own end is still seen.
        kill(&mut second);
        engine.poll.wait(Some(Duration::from_secs(20)), &mut engine.ready).unwrap();
        assert_eq!(engine.ready.len(), 1);
        engine.take_notice().unwrap();
        engine.poll.wait(Some(Duration::ZERO), &mut engine.ready).unwrap();
        assert!(engine.ready.is_empty());
    }
}
