//! Compares the delivery with a small reference: the draws that calls of `next` owe, the results that they keep, and
//! their answers. The reference writes the calls out as plain loops, over the same random sampler, scheduler and
//! interrupts.

mod common;

use std::collections::VecDeque;

use proptest::prelude::*;
use rustloader::engine::Step;
use rustloader::engine::completions::{Arrival, Incoming};
use rustloader::engine::delivery::{Delivery, Event};
use rustloader::error::Error;
use rustloader::id::{TaskId, WorkerId};
use rustloader::scheduler::{Death, Decision};
use rustloader::wire::{ResultEntry, ResultKind};

/// The outcome of a draw from the sampler.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Draw {
    Sent,
    Fails,
    /// The index cannot be submitted for lack of memory.
    Unsent,
    Interrupted,
}

/// The scheduler's next decision. `Batch` asks for a draw first, and delivers at the next decision. With a window,
/// `Batch` and `Exhausted` each make room for one more task, and the scheduler asks for draws while there is room.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scripted {
    Batch,
    Exhausted,
    Wait,
    TimedOut,
    Vacant,
    /// A task of a replaced worker is sent again, in the same call.
    Resend,
    Dead,
    End,
}

/// What happens before a call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Before {
    Nothing,
    Closed,
    Broken,
    PinThreadEnded,
    Tied,
    NewEpoch,
}

/// The outcome of a user's call. Errors are numbered, to show that none is raised twice or out of order.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Answer {
    Batch(u64),
    SamplerError(u64),
    Interrupted,
    /// A batch was delivered, but its decoding was interrupted.
    CutOff,
    Opened,
    Waits,
    TimedOut,
    Vacant,
    Dead,
    End,
    Closed,
    Broken,
    NoPinThread,
}

#[derive(Clone, Debug)]
struct Script {
    /// Whether the scheduler fills a window.
    fills: bool,
    before: Vec<Before>,
    draws: Vec<Draw>,
    scripted: Vec<Scripted>,
    /// Which decodings a signal handler interrupts.
    cut_off: Vec<bool>,
}

/// Sampler, scheduler and signals, which are the same for both sides.
struct World<'a> {
    script: &'a Script,
    draws: usize,
    scripted: usize,
    decodings: usize,
    /// A batch that is delivered as soon as an index has been drawn.
    staged: Option<u64>,
    /// Tasks that a window has room for.
    room: usize,
    batches: u64,
    errors: u64,
    /// How many indices the sampler has yielded, and the indices that were sent.
    yielded: u64,
    sent: Vec<u64>,
}

impl<'a> World<'a> {
    fn new(script: &'a Script) -> Self {
        let (draws, scripted, decodings, room, batches, errors, yielded) = (0, 0, 0, 0, 0, 0, 0);
        Self { script, draws, scripted, decodings, staged: None, room, batches, errors, yielded, sent: Vec::new() }
    }

    fn draw(&mut self) -> Draw {
        self.draws += 1;
        self.script.draws.get(self.draws - 1).copied().unwrap_or(Draw::Sent)
    }

    fn scripted(&mut self) -> Scripted {
        self.scripted += 1;
        self.script.scripted.get(self.scripted - 1).copied().unwrap_or(Scripted::End)
    }

    fn is_cut_off(&mut self) -> bool {
        self.decodings += 1;
        self.script.cut_off.get(self.decodings - 1).copied().unwrap_or(false)
    }

    /// Returns the unsent index, or the sampler's next.
    fn index(&mut self, unsent: Option<u64>) -> u64 {
        unsent.unwrap_or_else(|| {
            self.yielded += 1;
            self.yielded - 1
        })
    }

    /// Records that an index is sent.
    fn send(&mut self, index: u64) {
        self.sent.push(index);
        self.room = self.room.saturating_sub(1);
    }

    fn error(&mut self) -> u64 {
        self.errors += 1;
        self.errors - 1
    }

    fn batch(&mut self) -> u64 {
        self.batches += 1;
        self.batches - 1
    }
}

/// The reference: calls as plain loops, with plain variables between them.
#[derive(Default)]
struct Reference {
    errors: VecDeque<u64>,
    owed: usize,
    unsent: Option<u64>,
    unread: Option<u64>,
    tied: bool,
    closed: bool,
    broken: bool,
    pin_thread_ended: bool,
}

impl Reference {
    fn before(&mut self, world: &mut World<'_>, before: Before) {
        match before {
            Before::Nothing => {}
            Before::Closed => self.closed = true,
            Before::Broken => self.broken = true,
            Before::PinThreadEnded => self.pin_thread_ended = true,
            Before::Tied => self.tied = true,
            Before::NewEpoch => {
                self.errors.clear();
                (self.owed, self.unsent, self.unread) = (0, None, None);
                (world.staged, world.room) = (None, 0);
            }
        }
    }

    /// Makes a draw. If it is interrupted, the call ends.
    fn draw(&mut self, world: &mut World<'_>) -> Draw {
        let draw = world.draw();
        match draw {
            Draw::Sent => {
                let index = world.index(self.unsent.take());
                world.send(index);
            }
            Draw::Unsent => self.unsent = Some(world.index(self.unsent.take())),
            Draw::Fails | Draw::Interrupted => {}
        }
        if matches!(draw, Draw::Fails | Draw::Unsent) {
            self.errors.push_back(world.error());
        }
        draw
    }

    fn decode(&mut self, world: &mut World<'_>, batch: u64) -> Answer {
        if world.is_cut_off() {
            self.unread = Some(batch);
            return Answer::CutOff;
        }
        Answer::Batch(batch)
    }

    fn next(&mut self, world: &mut World<'_>) -> Answer {
        if let Some(error) = self.errors.pop_front() {
            return Answer::SamplerError(error);
        }
        if self.closed {
            return Answer::Closed;
        }
        for _ in 0..self.owed {
            match self.draw(world) {
                Draw::Interrupted => return Answer::Interrupted,
                Draw::Unsent => break,
                // Even a failed draw is no longer owed, unless an index waits for memory.
                Draw::Fails if self.unsent.is_some() => break,
                Draw::Sent | Draw::Fails => self.owed -= 1,
            }
        }
        if let Some(batch) = self.unread.take() {
            return self.decode(world, batch);
        }
        if self.broken {
            return Answer::Broken;
        }
        if std::mem::take(&mut self.tied) {
            return Answer::Opened;
        }
        loop {
            // Fills the window, up to the first error.
            while world.script.fills && world.room > 0 && self.errors.is_empty() {
                if self.draw(world) == Draw::Interrupted {
                    return Answer::Interrupted;
                }
            }
            if let Some(batch) = world.staged.take() {
                return self.decode(world, batch);
            }
            match world.scripted() {
                scripted @ (Scripted::Batch | Scripted::Exhausted) => {
                    if scripted == Scripted::Batch {
                        world.staged = Some(world.batch());
                    }
                    if world.script.fills {
                        world.room += 1;
                        continue;
                    }
                    match self.draw(world) {
                        Draw::Sent => {}
                        draw => {
                            self.owed += 1;
                            if draw == Draw::Interrupted {
                                return Answer::Interrupted;
                            }
                        }
                    }
                }
                Scripted::Wait if self.pin_thread_ended => return Answer::NoPinThread,
                Scripted::Wait => return Answer::Waits,
                Scripted::TimedOut => return Answer::TimedOut,
                Scripted::Vacant => return Answer::Vacant,
                Scripted::Resend => {}
                Scripted::Dead => return Answer::Dead,
                Scripted::End => {
                    return self.errors.pop_front().map_or(Answer::End, Answer::SamplerError);
                }
            }
        }
    }
}

fn incoming() -> Incoming {
    let words = [0, ResultKind::Plain as u64, 0, 0, 0, 0, 0, 0];
    Incoming { worker: 0, entry: ResultEntry::from_words(&words).unwrap() }
}

/// The scheduler of both sides, as decisions of the real one. A batch is its own ready result.
fn decide(world: &mut World<'_>, may_ask: bool) -> Decision<u64, Arrival<u64>> {
    if world.script.fills && world.room > 0 && may_ask {
        return Decision::Submit;
    }
    if let Some(batch) = world.staged.take() {
        let result = Arrival { incoming: incoming(), ready: Some(batch) };
        let (task, worker) = (TaskId(batch), WorkerId(0));
        // Some results are errors of workers, which are delivered in the same way.
        return match batch % 3 {
            0 => Decision::Raise { task, worker, tag: 0, result },
            _ => Decision::Deliver { task, worker, tag: 0, result },
        };
    }
    match world.scripted() {
        scripted @ (Scripted::Batch | Scripted::Exhausted) => {
            if scripted == Scripted::Batch {
                world.staged = Some(world.batch());
            }
            if world.script.fills {
                world.room += 1;
                return decide(world, may_ask);
            }
            Decision::Submit
        }
        Scripted::Wait => Decision::Wait(None),
        Scripted::TimedOut => Decision::TimedOut,
        Scripted::Vacant => Decision::Vacant(Death { worker: WorkerId(1), lost: None }),
        Scripted::Resend => Decision::Resend,
        Scripted::Dead => Decision::Dead(Death { worker: WorkerId(1), lost: None }),
        Scripted::End => Decision::End,
    }
}

/// The real delivery, driven as the bindings do.
struct Driver {
    delivery: Delivery<u64, u64, u64>,
    closed: bool,
}

impl Driver {
    fn before(&mut self, world: &mut World<'_>, before: Before) {
        match before {
            Before::Nothing => {}
            Before::Closed => self.closed = true,
            Before::Broken => self.delivery.on_event(Event::Broken(Error::corrupt("it is broken"))),
            Before::PinThreadEnded => self.delivery.on_event(Event::PinThreadEnded("why".to_owned())),
            Before::Tied => self.delivery.tie(incoming()),
            Before::NewEpoch => {
                self.delivery.on_event(Event::EpochBegan);
                (world.staged, world.room) = (None, 0);
            }
        }
    }

    fn decode(&mut self, world: &mut World<'_>, batch: u64) -> Answer {
        if world.is_cut_off() {
            self.delivery.on_event(Event::DecodeInterrupted(batch));
            return Answer::CutOff;
        }
        Answer::Batch(batch)
    }

    fn draw(&mut self, world: &mut World<'_>) -> bool {
        let draw = world.draw();
        let event = match draw {
            Draw::Sent => {
                let index = world.index(self.delivery.take_unsent());
                world.send(index);
                Event::IndexDrawn
            }
            Draw::Fails => Event::DrawFailed(world.error()),
            Draw::Unsent => {
                let index = world.index(self.delivery.take_unsent());
                self.delivery.on_event(Event::IndexUnsent(index));
                Event::DrawFailed(world.error())
            }
            Draw::Interrupted => Event::DrawInterrupted,
        };
        self.delivery.on_event(event);
        draw != Draw::Interrupted
    }

    fn call(&mut self, world: &mut World<'_>) -> Answer {
        self.delivery.on_event(Event::NextBegan);
        loop {
            let Ok(step) = self.delivery.answer(self.closed, |may_ask| decide(world, may_ask)) else {
                return Answer::Broken;
            };
            return match step {
                Step::Submit if self.draw(world) => continue,
                Step::Submit => Answer::Interrupted,
                Step::Deliver { ready: Some(batch), .. } | Step::Unread(batch) => self.decode(world, batch),
                Step::Deliver { .. } => unreachable!("all results are ready"),
                Step::Raise(error) => Answer::SamplerError(error),
                Step::Open { .. } => {
                    self.delivery.untie(None).unwrap();
                    Answer::Opened
                }
                Step::Resend => continue,
                Step::Vacant(_) => Answer::Vacant,
                Step::Dead(_) => Answer::Dead,
                Step::End => Answer::End,
                Step::TimedOut => Answer::TimedOut,
                Step::Closed => Answer::Closed,
                Step::NoPinThread(_) => Answer::NoPinThread,
                Step::Wait(_) => {
                    assert!(self.delivery.begins_to_wait(), "each call starts its own wait");
                    assert!(!self.delivery.begins_to_wait(), "it is already waiting");
                    Answer::Waits
                }
            };
        }
    }

    fn next(&mut self, world: &mut World<'_>) -> Answer {
        let answer = self.call(world);
        assert_eq!(self.delivery.stops_waiting(), answer == Answer::Waits);
        answer
    }
}

fn run(script: &Script) {
    let (mut world, mut mirror) = (World::new(script), World::new(script));
    let mut driver = Driver { delivery: Delivery::new(script.fills), closed: false };
    let mut reference = Reference::default();
    let mut batches = Vec::new();
    for &before in &script.before {
        driver.before(&mut world, before);
        reference.before(&mut mirror, before);
        let answer = driver.next(&mut world);
        assert_eq!(answer, reference.next(&mut mirror));
        assert_eq!((world.draws, world.scripted, &world.sent), (mirror.draws, mirror.scripted, &mirror.sent));
        if let Answer::Batch(batch) = answer {
            batches.push(batch);
        }
    }
    assert!(batches.is_sorted_by(|a, b| a < b), "each batch once: {batches:?}");
    assert!(world.sent.is_sorted_by(|a, b| a < b), "each index once: {:?}", world.sent);
    let undisturbed = |before: &Before| matches!(before, Before::Nothing | Before::Tied);
    if script.before.iter().all(undisturbed) {
        // No index and no batch is lost; one may be in progress.
        assert!(world.yielded - world.sent.len() as u64 <= 1);
        assert!(world.batches - batches.len() as u64 <= 1);
    }
}

fn script() -> impl Strategy<Value = Script> {
    let before = prop_oneof![
        20 => Just(Before::Nothing),
        2 => Just(Before::Tied),
        1 => Just(Before::NewEpoch),
        1 => Just(Before::PinThreadEnded),
        1 => Just(Before::Broken),
        1 => Just(Before::Closed),
    ];
    let calm = prop_oneof![9 => Just(Before::Nothing), 1 => Just(Before::Tied)];
    let draw = prop_oneof![
        4 => Just(Draw::Sent),
        2 => Just(Draw::Fails),
        1 => Just(Draw::Unsent),
        1 => Just(Draw::Interrupted),
    ];
    let scripted = prop_oneof![
        8 => Just(Scripted::Batch),
        1 => Just(Scripted::Exhausted),
        1 => Just(Scripted::Wait),
        1 => Just(Scripted::TimedOut),
        1 => Just(Scripted::Vacant),
        1 => Just(Scripted::Resend),
        1 => Just(Scripted::Dead),
        1 => Just(Scripted::End),
    ];
    let calls = prop_oneof![proptest::collection::vec(before, 1..40), proptest::collection::vec(calm, 1..40),];
    let draws = proptest::collection::vec(draw, 0..60);
    let cut_off = proptest::collection::vec(proptest::bool::weighted(0.2), 0..60);
    (any::<bool>(), calls, draws, proptest::collection::vec(scripted, 0..60), cut_off)
        .prop_map(|(fills, before, draws, scripted, cut_off)| Script { fills, before, draws, scripted, cut_off })
}

proptest! {
    #![proptest_config(common::model_config(10_000))]

    #[test]
    fn delivery_matches_the_reference(script in script()) {
        run(&script);
    }
}
