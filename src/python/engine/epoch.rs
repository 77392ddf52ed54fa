//! The begin of an epoch, and `next`.

use std::ops::ControlFlow;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyList;

use super::PyEngine;
use super::death::PyDeath;
use super::read::give;
use super::state::State;
use crate::codec::prepare::Ready;
use crate::engine::delivery::Event;
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
        state.engine.delivery().on_event(Event::EpochBegan);
        state.engine.epoch_begins();
        if self.handle.closing() {
            return Err(closed(py, &self.handle));
        }
        if !is_first {
            // Seen while the last epoch was under way, which has been given up before its batches were all handed out.
            if let Some(death) = state.engine.death() {
                return give(answer, code::DEAD, PyDeath::new(py, &state.engine.report(death)));
            }
            state.engine.reset()?;
            while state.engine.resuming() {
                match state.engine.step()? {
                    Step::Deliver { .. } | Step::Submit | Step::End => {}
                    step => {
                        if self.carry_out(py, state, answer, step)?.is_break() {
                            return Ok(());
                        }
                    }
                }
            }
        }
        for _ in 0..state.engine.max_tasks() {
            py.check_signals()?;
            self.draw(py, state, next_index)?;
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
        state.engine.delivery().on_event(Event::NextBegan);
        loop {
            match state.engine.step()? {
                Step::Submit => self.refill(py, state, next_index)?,
                step => {
                    if self.carry_out(py, state, answer, step)?.is_break() {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Does what the engine wants done, or puts what it answers into `answer` and breaks.
    #[inline]
    fn carry_out(
        &self,
        py: Python<'_>,
        state: &mut State,
        answer: &Bound<'_, PyList>,
        step: Step<Py<PyAny>, Ready, PyErr>,
    ) -> PyResult<ControlFlow<()>> {
        match step {
            Step::Deliver { tag, incoming, ready } => {
                self.count(py, &tag, &incoming);
                drop(tag);
                match ready {
                    None => self.read(py, state, answer, &incoming)?,
                    Some(ready) => self.read_ready(py, state, answer, ready)?,
                }
            }
            Step::Unread(ready) => self.read_ready(py, state, answer, ready)?,
            Step::Raise(error) => return Err(error),
            Step::Dead(death) => give(answer, code::DEAD, PyDeath::new(py, &state.engine.report(death)))?,
            Step::End => {
                state.engine.epoch_ends();
                give(answer, code::END, py.None())?;
            }
            Step::TimedOut => give(answer, code::TIMED_OUT, py.None())?,
            Step::Closed => return Err(closed(py, &self.handle)),
            Step::NoPinThread(cause) => give(answer, code::NO_PIN_THREAD, cause)?,
            Step::Open { incoming, ready } => {
                self.open(py, state, &incoming, ready)?;
                return Ok(ControlFlow::Continue(()));
            }
            Step::Wait(deadline) => {
                self.wait(py, state, deadline)?;
                return Ok(ControlFlow::Continue(()));
            }
            Step::Submit => unreachable!("only `next` asks the sampler, and sees to it itself"),
        }
        Ok(ControlFlow::Break(()))
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
    fn tell(&self, py: Python<'_>, engine: &Engine<Py<PyAny>, Ready, PyErr>, stall: &Stall) -> PyResult<()> {
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
