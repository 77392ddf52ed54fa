//! The state of calls to `next()`: owed draws, deferred errors and interrupted work.
//!
//! It is a state machine between the scheduler and the bindings, without Python, threads or a clock. The bindings call
//! the sampler, and unpickle and convert batches. `T` is the type of an index batch, `B` that of a result that the
//! bindings hold, and `E` that of the sampler's errors.
//!
//! # Precedence
//! [`Delivery::answer`] alone decides which answer comes first. It returns the answer of the first row that applies:
//!
//! | # | State | Answer | Ended by |
//! |---|---|---|---|
//! | 1 | an earlier call deferred an error of the sampler ([`Event::DrawFailed`]); checked once, as the call begins | [`Step::Raise`] | the answer |
//! | 2 | the iterator is closed | [`Step::Closed`] | nothing |
//! | 3 | earlier calls owe draws (never with a window); each is tried once per call, until an index batch cannot be sent | [`Step::Submit`] | [`Event::IndexDrawn`], [`Event::DrawFailed`] without an unsent index batch |
//! | 4 | a signal handler interrupted the decoding of a delivered result ([`Event::DecodeInterrupted`]) | [`Step::Unread`] | the answer |
//! | 5 | shared memory is damaged ([`Event::Broken`]) | the error | nothing |
//! | 6 | a result is tied to its worker | [`Step::Open`] | [`Delivery::untie`] |
//! | 7 | the scheduler answers `Vacant`, `Resend`, `Submit`, `Deliver`, `Raise`, `Dead`, `TimedOut`, `Shutdown` | the same step, but [`Step::Deliver`] for `Raise`, and [`Step::Closed`] for `Shutdown` | see `scheduler/README.md` |
//! | 8 | the scheduler answers `End`, and this call deferred an error | [`Step::Raise`] | the answer |
//! | 9 | the scheduler answers `End` | [`Step::End`] | a new epoch |
//! | 10 | the scheduler answers `Wait`, and the pin thread has ended | [`Step::NoPinThread`] | nothing |
//! | 11 | the scheduler answers `Wait` | [`Step::Wait`] | an event |
//!
//! An error of the sampler never replaces a batch: the call whose draw fails still delivers its batch, and the error is
//! deferred to the next call (1) or to the end of the epoch (8). After an error or an interrupt the draw is owed,
//! because a signal handler may have raised the exception before the sampler yielded an index batch.
//!
//! With a window, no draw is owed, because the scheduler answers `Submit` while there is room. The scheduler must not
//! do so while an error is deferred, or a sampler that always fails would keep the call from ending.
//! [`Delivery::answer`] passes this condition to the scheduler.
//!
//! # State kept elsewhere
//! - The scheduler keeps the staged batch, the refills for exhausted workers, and the death that it raises. They are
//!   part of torch's algorithm, and `tests/scheduler_model.rs` compares them with torch's fields.
//! - Python's `Session` keeps `last`, the error that every call raises after an end or a death: waiting threads and
//!   forked children cannot access the state in this module. It also keeps `rescued`, an answer that the engine
//!   returned but that an exception from a signal handler cut off. Both take precedence over this table, `last` before
//!   `rescued`.
//!
//! `tests/delivery_model.rs` compares this table and the code with a reference model.

use std::collections::VecDeque;

use super::completions::{Arrival, Incoming};
use super::types::Step;
use crate::error::{Error, Result};
use crate::scheduler::Decision;

/// An event of the current call.
#[derive(Debug)]
pub enum Event<T, B, E> {
    /// An epoch begins. This event resets the state of the previous epoch.
    EpochBegan,
    /// A call to `next` begins.
    NextBegan,
    /// A [`Step::Submit`] is done: the index batch has been sent, or the sampler is exhausted.
    IndexDrawn,
    /// A signal handler raised an exception before the draw, or the sampler raised a `BaseException` that is not an
    /// `Exception`.
    DrawInterrupted,
    /// An index batch could not be sent, because there was no memory for it or its pickling was interrupted. Another
    /// event of the same draw follows.
    IndexUnsent(T),
    /// The sampler failed, or the submission of its index batch failed.
    DrawFailed(E),
    /// A signal handler interrupted the decoding of a delivered result.
    DecodeInterrupted(B),
    /// The pin thread has ended, for this reason.
    PinThreadEnded(String),
    /// Shared memory is damaged. The iterator cannot continue.
    Broken(Error),
}

/// The stage of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Began,
    /// Owed draws are repeated. The value is the number of draws still to be tried.
    Draws(u32),
    /// The scheduler decides the answer.
    Answers,
    /// The scheduler has answered `Wait`, and the timeout is running.
    Waits,
}

#[derive(Debug)]
enum Health {
    Sound,
    NoPinThread(String),
    Broken(Error),
}

/// The state of the calls to `next` on one iterator.
#[derive(Debug)]
pub struct Delivery<T, B, E> {
    /// True if the scheduler fills a window. It then repeats failed draws itself.
    fills: bool,
    stage: Stage,
    health: Health,
    /// Deferred errors of the sampler.
    errors: VecDeque<E>,
    /// Number of failed draws to repeat; 0 with a window.
    owed_draws: u32,
    /// An index batch that must be sent before the sampler is asked again.
    unsent: Option<T>,
    /// A delivered result whose decoding was interrupted.
    unread: Option<B>,
    /// A tied result, which must be opened before any other result is taken. Its `ready` is the state of an interrupted
    /// attempt to open it.
    tied: Option<Arrival<B>>,
}

impl<T, B, E> Delivery<T, B, E> {
    /// Returns the state before the first call. `fills` is true if the scheduler fills a window.
    pub fn new(fills: bool) -> Self {
        Self {
            fills,
            stage: Stage::Answers,
            health: Health::Sound,
            errors: VecDeque::new(),
            owed_draws: 0,
            unsent: None,
            unread: None,
            tied: None,
        }
    }

    /// Processes an event.
    #[inline]
    pub fn on_event(&mut self, event: Event<T, B, E>) {
        match event {
            Event::EpochBegan => {
                self.stage = Stage::Answers;
                self.errors.clear();
                self.owed_draws = 0;
                self.unsent = None;
                self.unread = None;
            }
            Event::NextBegan => self.stage = Stage::Began,
            Event::IndexDrawn => {
                if let Stage::Draws(_) = self.stage {
                    self.owed_draws -= 1;
                }
            }
            Event::DrawInterrupted => self.owe_draw(),
            Event::IndexUnsent(index) => self.unsent = Some(index),
            Event::DrawFailed(error) => {
                self.errors.push_back(error);
                match self.stage {
                    // The draw stays owed, so that the epoch does not end before the index batch is sent. The next call
                    // tries again.
                    Stage::Draws(_) if self.unsent.is_some() => self.stage = Stage::Answers,
                    Stage::Draws(_) => self.owed_draws -= 1,
                    _ => self.owe_draw(),
                }
            }
            Event::DecodeInterrupted(result) => self.unread = Some(result),
            Event::PinThreadEnded(cause) => {
                if matches!(self.health, Health::Sound) {
                    self.health = Health::NoPinThread(cause);
                }
            }
            Event::Broken(error) => self.health = Health::Broken(error),
        }
    }

    /// Returns the next step according to the table above. `closed` is true if the iterator is shut down. `decide` asks
    /// the scheduler; its argument is true if the scheduler may answer `Submit` to fill a window.
    #[inline]
    pub fn answer(
        &mut self,
        closed: bool,
        decide: impl FnOnce(bool) -> Decision<T, Arrival<B>>,
    ) -> Result<Step<T, B, E>> {
        if self.stage == Stage::Began {
            if let Some(error) = self.errors.pop_front() {
                return Ok(Step::Raise(error));
            }
            self.stage = Stage::Draws(self.owed_draws);
        }
        if closed {
            return Ok(Step::Closed);
        }
        if let Stage::Draws(left) = self.stage {
            if left > 0 {
                self.stage = Stage::Draws(left - 1);
                return Ok(Step::Submit);
            }
            self.stage = Stage::Answers;
        }
        if let Some(result) = self.unread.take() {
            return Ok(Step::Unread(result));
        }
        if let Health::Broken(error) = &self.health {
            return Err(error.clone());
        }
        if let Some((incoming, ready)) = self.tied() {
            return Ok(Step::Open { incoming, ready });
        }
        let decision = decide(self.errors.is_empty());
        if !matches!(decision, Decision::Wait(_)) {
            self.stage = Stage::Answers;
        }
        Ok(match decision {
            Decision::Submit => Step::Submit,
            Decision::Vacant(death) => Step::Vacant(death),
            Decision::Resend => Step::Resend,
            Decision::Deliver { tag, result, .. } | Decision::Raise { tag, result, .. } => {
                Step::Deliver { tag, incoming: result.incoming, ready: result.ready }
            }
            Decision::Dead(death) => Step::Dead(death),
            Decision::TimedOut => Step::TimedOut,
            Decision::Shutdown => Step::Closed,
            Decision::End => self.errors.pop_front().map_or(Step::End, Step::Raise),
            Decision::Wait(deadline) => match &self.health {
                Health::NoPinThread(cause) => Step::NoPinThread(cause.clone()),
                _ => Step::Wait(deadline),
            },
        })
    }

    /// Marks the call as waiting. Returns true if it was not marked before.
    pub fn begins_to_wait(&mut self) -> bool {
        std::mem::replace(&mut self.stage, Stage::Waits) != Stage::Waits
    }

    /// Marks the call as no longer waiting. Returns true if it was marked before.
    #[inline]
    pub fn stops_waiting(&mut self) -> bool {
        std::mem::replace(&mut self.stage, Stage::Answers) == Stage::Waits
    }

    /// Returns the deferred errors of the sampler.
    pub fn errors(&self) -> &VecDeque<E> {
        &self.errors
    }

    /// Takes the index batch that must be sent before the sampler is asked again, if there is one.
    #[inline]
    pub fn take_unsent(&mut self) -> Option<T> {
        self.unsent.take()
    }

    /// Returns true while shared memory is intact and the pin thread, if any, has not ended.
    pub fn is_sound(&self) -> bool {
        matches!(self.health, Health::Sound)
    }

    /// Returns true if shared memory is damaged.
    pub fn is_broken(&self) -> bool {
        matches!(self.health, Health::Broken(_))
    }

    /// Stores a tied result, which must be opened before any other result is taken, and while its worker lives.
    pub fn tie(&mut self, incoming: Incoming) {
        self.tied = Some(Arrival { incoming, ready: None });
    }

    /// Returns the tied result, and takes the state of an interrupted attempt to open it.
    #[inline]
    pub fn tied(&mut self) -> Option<(Incoming, Option<B>)> {
        self.tied.as_mut().map(|tied| (tied.incoming, tied.ready.take()))
    }

    /// Returns the worker of the tied result.
    pub fn tied_worker(&self) -> Option<u32> {
        self.tied.as_ref().map(|tied| tied.incoming.worker)
    }

    /// Takes the tied result if it is from `worker`. If `worker` is `None`, takes it from any worker.
    pub fn untie(&mut self, worker: Option<u32>) -> Option<Arrival<B>> {
        self.tied.take_if(|tied| worker.is_none_or(|worker| tied.incoming.worker == worker))
    }

    /// Stores the state of an interrupted attempt to open the tied result.
    pub fn open_interrupted(&mut self, ready: B) {
        if let Some(tied) = &mut self.tied {
            tied.ready = Some(ready);
        }
    }

    /// Returns true if there is a tied result.
    #[inline]
    pub fn is_tied(&self) -> bool {
        self.tied.is_some()
    }

    fn owe_draw(&mut self) {
        if !self.fills && !matches!(self.stage, Stage::Draws(_)) {
            self.owed_draws += 1;
        }
    }
}
