//! Passes results (from the rings or the pin thread) and workers' deaths to the scheduler.

use crossbeam_channel::TryRecvError;

use super::completions::{self, Arrival, Incoming};
use super::core::Engine;
use super::{delivery, pin};
use crate::error::{Error, Result};
use crate::id::{TaskId, WorkerId};
use crate::scheduler::Event;
use crate::wire::ResultKind;

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Passes results to the scheduler and performs its actions. Stops at a tied result, which must be opened before
    /// the scheduler lets its worker exit.
    #[inline]
    pub(super) fn take_in(&mut self) -> Result<()> {
        while !self.delivery.is_tied()
            && let Some(completions) = self.inbox.rings()
            && let Some((_, incoming)) = completions.next(&self.handle.arena)?
        {
            if incoming.entry.kind == ResultKind::Tied {
                self.delivery.tie(incoming);
            } else {
                self.completed(incoming, None)?;
            }
        }
        self.take_events()?;
        self.perform_actions()
    }

    /// Completes a [`Step::Open`](super::Step::Open): passes the tied result, with the opened batch `ready`, to the
    /// scheduler.
    pub fn opened(&mut self, ready: B) -> Result<()> {
        let tied = self.delivery.untie(None).ok_or_else(|| Error::usage("no result is tied"))?;
        self.times.tick();
        let result = self.completed(tied.incoming, Some(ready)).and_then(|()| self.perform_actions());
        self.sticky(result)
    }

    #[inline]
    fn take_events(&mut self) -> Result<()> {
        while let Some(link) = self.inbox.link() {
            match link.events.try_recv() {
                Ok(event) => self.on_pin_event(event)?,
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    self.delivery.on_event(delivery::Event::PinThreadEnded(String::new()));
                    break;
                }
            }
        }
        Ok(())
    }

    fn on_pin_event(&mut self, event: pin::PinEvent<B>) -> Result<()> {
        match event {
            pin::PinEvent::Result(incoming, ready) => self.completed(incoming, ready),
            pin::PinEvent::Drained(worker) => self.died(worker),
            pin::PinEvent::Broken(error) => Err(error),
            pin::PinEvent::Gone(cause) => {
                self.delivery.on_event(delivery::Event::PinThreadEnded(cause));
                Ok(())
            }
        }
    }

    #[inline]
    fn completed(&mut self, incoming: Incoming, ready: Option<B>) -> Result<()> {
        let (task, kind) = (TaskId(incoming.entry.task), incoming.entry.kind);
        if kind.is_snapshot() {
            self.handle.keep(incoming);
            return Ok(());
        }
        let (worker, bytes) = (WorkerId(incoming.worker), incoming.entry.load.bytes);
        // A task that was bound to the worker after a death is no longer in the queue.
        if self.outbox.queue().is_some() && !self.scheduler.is_oldest_of(worker, task) {
            self.outbox.answered(incoming.worker, &incoming.entry)?;
        }
        if self.liveness.restarts() && incoming.answers() && task >= self.scheduler.first_task() {
            self.liveness.count_answer(incoming.worker);
        }
        let result = Arrival { incoming, ready };
        self.event(match kind {
            ResultKind::Plain | ResultKind::Pickle | ResultKind::Tied => {
                Event::Completed { worker, task, result, bytes }
            }
            ResultKind::Error => Event::Failed { worker, task, result, bytes },
            ResultKind::Exhausted => Event::Exhausted { worker, task },
            ResultKind::Resumed => {
                self.handle.answers().resumed(incoming.worker);
                Event::Resumed(worker)
            }
            ResultKind::Snapshot | ResultKind::FailedSnapshot => unreachable!("snapshots are kept above"),
        })
    }

    /// Passes the remaining results of a worker whose process has ended to the scheduler, and then reports the death.
    /// If workers may be replaced, discards an unopened tied result and all results after it, because the next process
    /// produces them again.
    pub(super) fn ended(&mut self, worker: u32) -> Result<()> {
        if let Some(link) = self.inbox.link() {
            if link.drain.try_send(worker).is_ok() {
                return self.handle.doorbell.ring();
            }
            // The pin thread has ended. The results that it sent come first.
            self.take_events()?;
            return self.died(worker);
        }
        let mut is_lost = false;
        if let Some(tied) = self.delivery.untie(Some(worker)) {
            is_lost = self.liveness.restarts();
            match tied {
                tied if !is_lost => self.completed(tied.incoming, tied.ready)?,
                Arrival { incoming, ready: None } => completions::discard(&self.handle.arena, &incoming),
                // The interrupted attempt to open the result has already released its message.
                Arrival { ready: Some(_), .. } => {}
            }
        }
        while let Some(completions) = self.inbox.rings()
            && let Some(incoming) = completions.pop(worker)?
        {
            is_lost |= self.liveness.restarts() && incoming.entry.kind == ResultKind::Tied;
            if is_lost {
                completions::discard(&self.handle.arena, &incoming);
            } else {
                self.completed(incoming, None)?;
            }
        }
        self.died(worker)
    }
}
