//! Deaths of workers: reports to the scheduler, and details for the errors that Python raises.

use super::core::Engine;
use super::types::DeathReport;
use crate::error::Result;
use crate::id::WorkerId;
use crate::scheduler::{Death, Event};

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Reports a worker's death to the scheduler.
    pub(super) fn died(&mut self, worker: u32) -> Result<()> {
        self.handle.trace.died(worker);
        let held = self.outbox.lost_with(worker);
        self.liveness.keep_record(worker);
        self.event(Event::WorkerDied { worker: WorkerId(worker), held })?;
        if self.outbox.queue().is_some() {
            // The worker may have been woken for a task and have died before taking it. That task still waits in the
            // queue, while the other workers may be asleep.
            self.handle.wake(worker)?;
        }
        self.perform_actions()
    }

    /// Returns the details of a death, for the caller's error.
    pub fn report(&self, death: Death) -> DeathReport<'_, T> {
        let worker = death.worker.0;
        let record = self.liveness.record_of(worker);
        let tasks = || self.scheduler.tasks_of(death.worker);
        let at = tasks().find(|(task, _)| task.0 == record.task);
        let task = at.or_else(|| tasks().next());
        let first_task = self.scheduler.first_task().0;
        DeathReport {
            worker,
            pid: record.pid,
            status: record.status,
            index: task.map(|(_, index)| index),
            task: task.and_then(|(task, _)| task.0.checked_sub(first_task)),
            answers: self.liveness.answers_of(worker),
            has_begun: at.is_some() && record.has_begun,
            place: at.and(record.place),
            generation: record.generation,
            stalled: record.stalled,
            first_task,
        }
    }
}
