//! The begin of an epoch, and `next`.

use std::time::Duration;

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::PyEngine;
use super::read::give;
use super::state::State;
use super::submit::hold_back;
use crate::codec::prepare::Ready;
use crate::engine::stall::{Phase, Stall};
use crate::engine::{Engine, Incoming, Step};
use crate::interop::exit_guard::call;
use crate::interop::text::short_text;
use crate::metrics::{Count, SlowTask};
use crate::python::code;
use crate::python::gate::closed;
use crate::wire::ResultKind;

impl PyEngine {
    /// See `begin`.
    pub(super) fn begin_epoch(
        &self,
        py: Python<'_>,
        answer: &Bound<'_, PyList>,
        next_index: &Bound<'_, PyAny>,
        is_first: bool,
    ) -> PyResult<()> {
        let mut turn = self.enter(py)?;
        let state = turn.state();
        state.held_back.clear();
        state.owed = 0;
        state.unsent = None;
        state.unread = None;
        state.engine.epoch_begins();
        if self.handle.closing() {
            return Err(closed(py, &self.handle));
        }
        if !is_first {
            // Seen while the last epoch was under way, which has been given up before its batches were all handed out.
            if let Some(worker) = state.engine.death() {
                return give(answer, code::DEAD, worker);
            }
            state.engine.reset()?;
            while state.engine.resuming() {
                match state.engine.step()? {
                    Step::Dead { worker, .. } => return give(answer, code::DEAD, worker),
                    Step::TimedOut => return give(answer, code::TIMED_OUT, py.None()),
                    Step::Closed => return Err(closed(py, &self.handle)),
                    Step::NoPinThread(cause) => return give(answer, code::NO_PIN_THREAD, cause),
                    Step::Wait(deadline) => self.wait(py, state, deadline)?,
                    Step::Open(incoming) => self.open(py, state, &incoming)?,
                    Step::Deliver { .. } | Step::Submit | Step::End => {}
                }
            }
        }
        for _ in 0..state.engine.max_tasks() {
            py.check_signals()?;
            self.refill(py, state, next_index)?;
        }
        give(answer, code::END, py.None())
    }

    /// See `next`.
    #[inline]
    pub(super) fn next_answer(
        &self,
        py: Python<'_>,
        answer: &Bound<'_, PyList>,
        next_index: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let mut turn = self.enter(py)?;
        let state = turn.state();
        state.engine.next_begins();
        let answered = self.find_answer(py, state, answer, next_index);
        state.engine.next_ends();
        answered
    }

    #[inline]
    fn find_answer(
        &self,
        py: Python<'_>,
        state: &mut State,
        answer: &Bound<'_, PyList>,
        next_index: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if let Some(error) = state.held_back.pop_front() {
            return Err(error);
        }
        // It may have ended while this thread waited for the turn.
        if self.handle.closing() {
            return Err(closed(py, &self.handle));
        }
        for _ in 0..state.owed {
            py.check_signals()?;
            let refilled = self.refill(py, state, next_index);
            if refilled.as_ref().is_err_and(|error| !error.is_instance_of::<PyException>(py)) {
                return refilled;
            }
            // Without memory for an index the next call tries again: the epoch must not end before it is sent.
            let unsent = state.unsent.is_some();
            if !unsent {
                state.owed -= 1;
            }
            if let Err(error) = refilled {
                hold_back(py, state, error)?;
            }
            if unsent {
                break;
            }
        }
        if let Some((code, object)) = state.unread.take() {
            return self.deliver(answer, code, object);
        }
        loop {
            match state.engine.step()? {
                Step::Deliver { tag, incoming, ready } => {
                    self.count(py, &tag, &incoming);
                    drop(tag);
                    return match ready {
                        None => self.read(py, state, answer, &incoming),
                        Some(Ready::Batch(batch)) => self.deliver(answer, code::BATCH, batch.take()),
                        Some(Ready::Raised(error)) => Err(error),
                        Some(Ready::Error(wrapper)) => self.deliver(answer, code::ERROR, wrapper.take()),
                    };
                }
                Step::Open(incoming) => self.open(py, state, &incoming)?,
                Step::Submit => {
                    let interrupt = py.check_signals();
                    let refilled =
                        if interrupt.is_ok() { self.refill(py, state, next_index) } else { Ok(()) };
                    state.engine.sampler_ends();
                    if interrupt.is_err() || refilled.is_err() {
                        // An interrupt may be behind an error, which the sampler would survive: it is asked once more later.
                        state.owed += 1;
                    }
                    interrupt?;
                    if let Err(error) = refilled {
                        hold_back(py, state, error)?;
                    }
                }
                Step::Dead { worker, .. } => return give(answer, code::DEAD, worker),
                Step::End => match state.held_back.pop_front() {
                    Some(error) => return Err(error),
                    None => {
                        state.engine.epoch_ends();
                        return give(answer, code::END, py.None());
                    }
                },
                Step::TimedOut => return give(answer, code::TIMED_OUT, py.None()),
                Step::Closed => return Err(closed(py, &self.handle)),
                Step::NoPinThread(cause) => return give(answer, code::NO_PIN_THREAD, cause),
                Step::Wait(deadline) => self.wait(py, state, deadline)?,
            }
        }
    }

    /// Counts a result that is handed out now.
    #[inline]
    fn count(&self, py: Python<'_>, index: &Py<PyAny>, incoming: &Incoming) {
        let meter = &self.handle.meter;
        let entry = &incoming.entry;
        if incoming.is_batch() {
            meter.add(Count::Bytes, entry.load.bytes);
            if entry.load.copies > 0 {
                meter.add(Count::Copies, u64::from(entry.load.copies));
                meter.add(Count::CopiedBytes, entry.load.copied_bytes);
            }
            if entry.kind != ResultKind::Plain {
                meter.add(Count::Pickled, 1);
            }
        }
        if meter.is_slow(&entry.timings) {
            let index = short_text(index.bind(py));
            meter.note_slow(SlowTask { worker: incoming.worker, timings: entry.timings, index });
        }
    }

    /// Waits without the GIL, then looks for signals, then for what has come.
    fn wait(&self, py: Python<'_>, state: &mut State, deadline: Option<Duration>) -> PyResult<()> {
        let engine = &mut state.engine;
        py.detach(|| engine.wait(deadline))?;
        py.check_signals()?;
        state.engine.after_wait()?;
        while let Some(stall) = state.engine.stalled() {
            self.tell(py, &state.engine, &stall)?;
        }
        Ok(())
    }

    /// Names a worker that is stuck in the log.
    fn tell(&self, py: Python<'_>, engine: &Engine<Py<PyAny>, Ready>, stall: &Stall) -> PyResult<()> {
        let stack = py.detach(|| self.handle.stack_of(stall));
        let oldest = engine.oldest_task_of(stall.worker);
        let index = oldest.filter(|(task, _)| Some(*task) == stall.task).map(|(_, index)| index);
        let (stack, why_not) = (stack.as_ref().ok(), stack.as_ref().err());
        let Stall { worker, pid, phase, state, time, .. } = *stall;
        let arguments =
            (worker, pid, phase == Phase::Start, time.as_secs_f64(), state.name(), index, stack, why_not);
        call(self.callbacks.warn_stall.bind(py), arguments.into_pyobject(py)?)?;
        Ok(())
    }
}
