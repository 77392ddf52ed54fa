//! What one `next()` owes, keeps back or answers.
//!
//! A state machine without Python, thread or clock. It stands between the scheduler, which decides what comes next, and the
//! bindings, which ask the sampler, unpickle, and convert. `T` is an index batch, `B` a result in the bindings' hands, `E` an
//! error of the sampler.
//!
//! # Precedence
//! [`Delivery::answer`] is the only place that ranks answers. The first row that applies is the answer:
//!
//! | # | State | Answer | Left by |
//! |---|---|---|---|
//! | 1 | an earlier call kept back an error of the sampler ([`Event::DrawFailed`]); asked once, as the call begins | [`Step::Raise`] | the answer |
//! | 2 | the iterator is closed | [`Step::Closed`] | nothing |
//! | 3 | earlier calls owe draws; each is tried once per call, and none after one that found no memory | [`Step::Submit`] | [`Event::IndexDrawn`], [`Event::DrawFailed`] with no index unsent |
//! | 4 | a signal handler cut off the decoding of a delivered result ([`Event::DecodeInterrupted`]) | [`Step::Unread`] | the answer |
//! | 5 | a worker wrote nonsense ([`Event::Broken`]) | the error | nothing |
//! | 6 | a result is tied to its worker | [`Step::Open`] | [`Delivery::untie`] |
//! | 7 | the scheduler answers `Submit`, `Deliver`, `Raise`, `Dead`, `TimedOut`, `Shutdown` | the same | see `scheduler/README.md` |
//! | 8 | the scheduler answers `End`, and this call kept back an error | [`Step::Raise`] | the answer |
//! | 9 | the scheduler answers `End` | [`Step::End`] | a new epoch |
//! | 10 | the scheduler answers `Wait`, and the pin thread has ended | [`Step::NoPinThread`] | nothing |
//! | 11 | the scheduler answers `Wait` | [`Step::Wait`] | an event |
//!
//! An error of the sampler never takes the place of a batch: the call that draws the index still delivers its batch, and the
//! error waits for the next call (1), or for the end of the epoch (8). After such an error, or an interrupt, the draw is owed: a
//! handler may have raised it, and then the sampler still has its index.
//!
//! # What stays elsewhere, and why
//! - The scheduler keeps the staged batch, the draws owed to exhausted workers, and the death that it raises for ever: they are
//!   torch's algorithm (when the sampler is advanced, what is lost), tested against torch's fields in `tests/scheduler_model.rs`.
//! - The iterator in Python keeps two attributes. `_last` is what all later calls raise after an end or a death: threads that
//!   wait for exclusive access and forked children read it, and neither can take this state. `_rescued` is an answer that a
//!   signal handler cut off between two bytecodes, after the engine had returned. Both outrank this table, `_last` first.

use std::collections::VecDeque;

use super::completions::{Arrival, Incoming};
use super::types::Step;
use crate::error::{Error, Result};
use crate::scheduler::Decision;

/// Something that happened to the call that is under way.
#[derive(Debug)]
pub enum Event<T, B, E> {
    /// An epoch begins: what is left of the last one goes.
    EpochBegan,
    /// A `next` begins.
    NextBegan,
    /// A [`Step::Submit`] is done: the index is sent, or the sampler is at its end.
    IndexDrawn,
    /// A signal handler raised before the sampler was asked, or the sampler raised what is no `Exception`.
    DrawInterrupted,
    /// An index batch found no memory, or a signal handler cut off its pickling. What the draw ends in follows.
    IndexUnsent(T),
    /// The sampler, or the sending of its index, failed.
    DrawFailed(E),
    /// A signal handler cut off the decoding of a result that was delivered.
    DecodeInterrupted(B),
    /// The pin thread has ended, and why.
    PinThreadEnded(String),
    /// A worker wrote nonsense: the iterator cannot go on.
    Broken(Error),
}

/// How far the call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    /// It has answered nothing yet.
    Began,
    /// It makes up for draws of earlier calls; so many are left to be tried.
    Draws(u32),
    /// The scheduler answers.
    Answers,
    /// The scheduler has nothing yet, and the clock of the timeout runs.
    Waits,
}

/// Whether the iterator can go on.
#[derive(Debug)]
enum Health {
    Sound,
    NoPinThread(String),
    Broken(Error),
}

/// A result that has to be opened before any other is taken.
#[derive(Debug)]
pub struct Tied<B> {
    /// The result.
    pub incoming: Incoming,
    /// What an interrupted attempt to open it has left.
    pub ready: Option<B>,
}

/// The state of the calls of one iterator.
#[derive(Debug)]
pub struct Delivery<T, B, E> {
    call: Call,
    health: Health,
    /// Errors of the sampler that no call has raised yet.
    errors: VecDeque<E>,
    /// Draws that failed and are to be repeated.
    owed_draws: u32,
    /// An index batch that could not be sent. It is sent before the sampler is asked again.
    unsent: Option<T>,
    /// A delivered result whose decoding was cut off.
    unread: Option<B>,
    tied: Option<Tied<B>>,
}

impl<T, B, E> Default for Delivery<T, B, E> {
    fn default() -> Self {
        Self {
            call: Call::Answers,
            health: Health::Sound,
            errors: VecDeque::new(),
            owed_draws: 0,
            unsent: None,
            unread: None,
            tied: None,
        }
    }
}

impl<T, B, E> Delivery<T, B, E> {
    /// Takes note of something that happened.
    #[inline]
    pub fn on_event(&mut self, event: Event<T, B, E>) {
        match event {
            Event::EpochBegan => {
                self.call = Call::Answers;
                self.errors.clear();
                self.owed_draws = 0;
                self.unsent = None;
                self.unread = None;
            }
            Event::NextBegan => self.call = Call::Began,
            Event::IndexDrawn => {
                if let Call::Draws(_) = self.call {
                    self.owed_draws -= 1;
                }
            }
            Event::DrawInterrupted => self.owe_draw(),
            Event::IndexUnsent(index) => self.unsent = Some(index),
            Event::DrawFailed(error) => {
                self.errors.push_back(error);
                match self.call {
                    // The epoch must not end before it is sent; the next call tries again.
                    Call::Draws(_) if self.unsent.is_some() => self.call = Call::Answers,
                    Call::Draws(_) => self.owed_draws -= 1,
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

    /// What the call answers now; see the table above. `closed`: the iterator is shut down. `decide` asks the scheduler.
    #[inline]
    pub fn answer(
        &mut self,
        closed: bool,
        decide: impl FnOnce() -> Decision<T, Arrival<B>>,
    ) -> Result<Step<T, B, E>> {
        if self.call == Call::Began {
            if let Some(error) = self.errors.pop_front() {
                return Ok(Step::Raise(error));
            }
            self.call = Call::Draws(self.owed_draws);
        }
        if closed {
            return Ok(Step::Closed);
        }
        if let Call::Draws(left) = self.call {
            if left > 0 {
                self.call = Call::Draws(left - 1);
                return Ok(Step::Submit);
            }
            self.call = Call::Answers;
        }
        if let Some(result) = self.unread.take() {
            return Ok(Step::Unread(result));
        }
        if let Health::Broken(error) = &self.health {
            return Err(error.clone());
        }
        if let Some(Tied { incoming, ready }) = &mut self.tied {
            return Ok(Step::Open { incoming: *incoming, ready: ready.take() });
        }
        let decision = decide();
        if !matches!(decision, Decision::Wait(_)) {
            self.call = Call::Answers;
        }
        Ok(match decision {
            Decision::Submit => Step::Submit,
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

    /// Whether the call begins to wait with this [`Step::Wait`], and does not merely go on.
    pub fn begins_to_wait(&mut self) -> bool {
        std::mem::replace(&mut self.call, Call::Waits) != Call::Waits
    }

    /// The call ends. Whether it was waiting.
    #[inline]
    pub fn stops_waiting(&mut self) -> bool {
        std::mem::replace(&mut self.call, Call::Answers) == Call::Waits
    }

    /// The index batch to be sent before the sampler is asked again.
    #[inline]
    pub fn take_unsent(&mut self) -> Option<T> {
        self.unsent.take()
    }

    /// Whether the state of shared memory is unknown.
    pub fn is_broken(&self) -> bool {
        matches!(self.health, Health::Broken(_))
    }

    /// A result that has to be opened before any other is taken, while its worker lives.
    pub fn tie(&mut self, incoming: Incoming) {
        self.tied = Some(Tied { incoming, ready: None });
    }

    /// The result that has to be opened first, of this worker or of any.
    pub fn untie(&mut self, worker: Option<u32>) -> Option<Tied<B>> {
        self.tied.take_if(|tied| worker.is_none_or(|worker| tied.incoming.worker == worker))
    }

    /// The opening of the tied result was cut off by a signal handler; `left` is what the next attempt needs.
    pub fn open_interrupted(&mut self, left: B) {
        if let Some(tied) = &mut self.tied {
            tied.ready = Some(left);
        }
    }

    /// Whether a result has to be opened first.
    #[inline]
    pub fn is_tied(&self) -> bool {
        self.tied.is_some()
    }

    fn owe_draw(&mut self) {
        if !matches!(self.call, Call::Draws(_)) {
            self.owed_draws += 1;
        }
    }
}
