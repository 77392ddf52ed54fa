//! One call of `begin` or `next`, which carries out the engine's steps until there is an answer.

use std::ops::ControlFlow;
use std::time::Duration;

use pyo3::exceptions::PyBaseException;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::state::State;
use super::worker::PyDeath;
use crate::codec::prepare::Ready;
use crate::engine::delivery::Event;
use crate::engine::stalls::overdue::Killed;
use crate::engine::stalls::report::{Phase, Stall};
use crate::engine::{Handle, Incoming, Step};
use crate::error::Error;
use crate::interop::exit_guard::call;
use crate::interop::text::short_text;
use crate::metrics::SlowTask;
use crate::python::code;
use crate::python::gate::closed;
use crate::scheduler::Death;
use crate::sys;

/// The Python functions that an engine calls; `_core.pyi` has their types.
pub(super) struct Callbacks {
    pub(super) loads: Py<PyAny>,
    pub(super) dump_index: Py<PyAny>,
    pub(super) is_interrupt: Py<PyAny>,
    pub(super) warn_stall: Py<PyAny>,
}

/// A call that has exclusive access to the engine. It stores its answer, a code and a value, in the list `answer`.
pub(super) struct Call<'a, 'py> {
    pub(super) py: Python<'py>,
    pub(super) handle: &'a Handle,
    pub(super) callbacks: &'a Callbacks,
    pub(super) state: &'a mut State,
    pub(super) answer: &'a Bound<'py, PyList>,
    /// The sampler's iterator, or a function that returns the next index batch.
    pub(super) next_index: &'a Bound<'py, PyAny>,
    /// The iterator over the predicted index batches of the next epoch (`Predictor` in `_core.pyi`); `None` if epochs
    /// do not start early.
    pub(super) predictor: Option<&'a Bound<'py, PyAny>>,
}

impl<'py> Call<'_, 'py> {
    pub(super) fn begin(&mut self, is_first: bool, message: &[u8], first_worker: u32) -> PyResult<()> {
        let continues = self.state.begun.take().is_some_and(|begun| begun == message);
        if !continues {
            self.state.engine.delivery().on_event(Event::EpochBegan);
            self.state.engine.epoch_begins();
        }
        if self.handle.closing() {
            return Err(closed(self.py, self.handle));
        }
        let early = self.state.early.take().filter(|_| !is_first);
        let was_early = early.is_some();
        let drawn =
            early.map(|early| self.draw_predicted(early, message, first_worker)).transpose()?.unwrap_or_default();
        let (taken_up, mut draws) = (drawn.taken_up(), drawn.draws);
        if !is_first && !taken_up {
            // The previous epoch may have been abandoned before all its batches were delivered, and a worker may have
            // died in it unnoticed.
            if let Some(death) = self.state.engine.death() {
                return self.give_death(code::DEAD, death);
            }
            if !continues {
                self.state.engine.reset(message)?;
            }
            while self.state.engine.resuming() {
                match self.state.engine.step()? {
                    // The last worker has resumed, and the new epoch has no task yet.
                    Step::Submit | Step::End => {}
                    Step::Deliver { .. } => {
                        return Err(Error::usage("a batch arrived before the workers had resumed").into());
                    }
                    Step::Vacant(death) => {
                        self.state.begun = Some(message.to_vec());
                        return self.give_death(code::VACANT, death);
                    }
                    step => {
                        if self.carry_out(step)?.is_break() {
                            return Ok(());
                        }
                    }
                }
            }
        }
        if !taken_up {
            self.state.engine.begin_with(first_worker)?;
            self.send_drawn(drawn)?;
        }
        while self.state.engine.primes(draws) {
            self.py.check_signals()?;
            self.draw()?;
            draws += 1;
        }
        self.give(code::END, was_early.then_some(taken_up))
    }

    #[inline]
    pub(super) fn next(&mut self) -> PyResult<()> {
        self.state.engine.next_begins();
        let answered = self.find_answer();
        self.state.engine.next_ends();
        answered
    }

    #[inline]
    fn find_answer(&mut self) -> PyResult<()> {
        self.state.engine.delivery().on_event(Event::NextBegan);
        loop {
            let step = self.state.engine.step()?;
            if self.carry_out(step)?.is_break() {
                return Ok(());
            }
        }
    }

    /// Waits until each worker has sent its first snapshot of this epoch or has died, or until the iterator has ended
    /// or failed. Returns false if the deadline passes first.
    pub(super) fn wait_started(&mut self, deadline: Option<Duration>) -> PyResult<bool> {
        loop {
            while let Some((incoming, ready)) = self.state.engine.process_outside_next()? {
                self.open(&incoming, ready)?;
            }
            if !self.state.engine.is_starting() {
                return Ok(true);
            }
            if deadline.is_some_and(|deadline| sys::clock::monotonic() >= deadline) {
                return Ok(false);
            }
            self.wait(deadline)?;
        }
    }

    /// Carries out a step. Returns `Break` once there is an answer.
    #[inline]
    fn carry_out(&mut self, step: Step<Py<PyAny>, Ready, Py<PyBaseException>>) -> PyResult<ControlFlow<()>> {
        let answered = match step {
            Step::Submit => return self.refill().map(ControlFlow::Continue),
            Step::Resend => return self.resend().map(ControlFlow::Continue),
            Step::Open { incoming, ready } => return self.open(&incoming, ready).map(ControlFlow::Continue),
            Step::Wait(deadline) => return self.wait(deadline).map(ControlFlow::Continue),
            Step::Deliver { tag, incoming, ready } => {
                self.count(&tag, &incoming);
                drop(tag);
                match ready {
                    None => self.read(&incoming),
                    Some(ready) => self.read_ready(ready),
                }
            }
            Step::Unread(ready) => self.read_ready(ready),
            Step::Raise(error) => Err(PyErr::from_value(error.into_bound(self.py).into_any())),
            Step::Vacant(death) => self.give_death(code::VACANT, death),
            Step::Dead(death) => self.give_death(code::DEAD, death),
            Step::End => {
                self.state.engine.epoch_ends();
                self.give(code::END, self.py.None())
            }
            Step::TimedOut => self.give(code::TIMED_OUT, self.py.None()),
            Step::Closed => Err(closed(self.py, self.handle)),
            Step::NoPinThread(cause) => self.give(code::NO_PIN_THREAD, cause),
        };
        answered.map(ControlFlow::Break)
    }

    fn give_death(&self, code: u8, death: Death) -> PyResult<()> {
        self.give(code, PyDeath::new(self.py, &self.state.engine.report(death)))
    }

    /// Counts a result that is about to be delivered.
    #[inline]
    fn count(&self, index: &Py<PyAny>, incoming: &Incoming) {
        let (meter, timings) = (&self.handle.meter, incoming.entry.timings);
        let blocked_us = self.state.engine.blocked_us();
        incoming.count(meter);
        if meter.note_work(&timings, blocked_us) {
            let index = short_text(index.bind(self.py));
            meter.note_slow(SlowTask { worker: incoming.worker, timings, blocked_us, index });
        }
    }

    /// Waits for events: briefly with the GIL held, then without it. Afterwards handles signals, processes the events
    /// that have arrived and warns about stuck workers.
    fn wait(&mut self, deadline: Option<Duration>) -> PyResult<()> {
        let engine = &mut self.state.engine;
        if !engine.arrives_soon() {
            self.py.detach(|| engine.sleep(deadline))?;
        }
        self.py.check_signals()?;
        engine.after_wait()?;
        while let Some(stall) = self.state.engine.stalled() {
            self.warn(&stall)?;
        }
        Ok(())
    }

    /// Logs a warning about a stuck worker. If the worker has exceeded `stall_timeout`, kills it first.
    fn warn(&mut self, stall: &Stall) -> PyResult<()> {
        let stack = self.py.detach(|| self.handle.stack_of(stall));
        let engine = &mut self.state.engine;
        // Kill the worker before logging, because a log handler may raise.
        let exceeds = match stall.exceeds.map(|limit| (limit.as_secs_f64(), engine.kill(stall))) {
            None => None,
            Some((_, Killed::Continued)) => return Ok(()),
            Some((limit, killed)) => Some((limit, killed == Killed::Yes)),
        };
        let index = stall.task.and_then(|task| engine.tag_at(stall.worker, task));
        let (stack, why_not) = (stack.as_ref().ok(), stack.as_ref().err());
        let Stall { worker, pid, phase, state, time, .. } = *stall;
        let (starting, seconds, state) = (phase == Phase::Start, time.as_secs_f64(), state.name());
        let arguments = (worker, pid, starting, seconds, state, index, stack, why_not, exceeds);
        call(self.callbacks.warn_stall.bind(self.py), arguments.into_pyobject(self.py)?)?;
        Ok(())
    }

    /// Stores a code and its value in `answer`.
    #[inline]
    pub(super) fn give(&self, code: u8, value: impl IntoPyObject<'py>) -> PyResult<()> {
        self.answer.set_item(1, value)?;
        self.answer.set_item(0, code)
    }
}
