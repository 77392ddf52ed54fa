//! SIGTERM to the whole process group: preemption of a training run whose main process wants to react to it.
//!
//! Without this each worker dies of it, and the main process learns of their deaths from `next` before its own handler
//! has led to anything. So where the main process has a handler, a worker that gets a SIGTERM notes that on its status
//! page and goes on, and looks [`SIGTERM_CHECK`] later who else has got one:
//!
//! | who has | what it was | the worker |
//! |---|---|---|
//! | all workers | a signal to the group | works on, for [`SIGTERM_SERVE`] at the most |
//! | some of them | maybe a group whose others have not run yet | looks again, for a while |
//! | no other one, half that while | meant for this worker | dies of it, and the main process names it |
//! | there is no other one | cannot be told | works on until [`SIGTERM_ALONE`] has passed |
//!
//! A second SIGTERM ends it at once, and so does one that it sends itself; the main process's own, which belongs to a
//! shutdown, lets it leave. [`decide`] runs in the signal's handler: it loads and stores atomics, and nothing else.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::port::Port;
use crate::config::{SIGTERM_ALONE, SIGTERM_CHECK, SIGTERM_SERVE};
use crate::error::{Error, Result};
use crate::shm::arena::Arena;
use crate::shm::layout::{StatusPage, Terminated, WorkerState};
use crate::sys::sigterm::{self, Answer, Cause};

/// What [`decide`] looks at. It is never dropped: the handler stays.
struct Place {
    arena: Arc<Arena>,
    worker: u32,
    /// This process, and the main process.
    pids: (i32, i32),
    /// As many looks are taken where no other worker has got the signal; twice as many where some have.
    looks: u32,
}

static PLACE: OnceLock<Place> = OnceLock::new();
/// Looks so far.
static LOOKED: AtomicU32 = AtomicU32::new(0);
/// [`LOOKED`] once the last look was taken: the next time is the last.
const DECIDED: u32 = u32::MAX;

/// Has this worker survive a SIGTERM to the whole group. `main` is the main process's number; where no other worker has
/// got the signal within `alone`, it was meant for this worker: on a busy machine a process may wait for its turn that long.
///
/// # Errors
/// The system refuses it; SIGTERM then does what it did before.
pub fn survive_group_signal(port: &Port, main: i32, alone: Duration) -> Result<()> {
    let pids = (std::process::id() as i32, main);
    let place = Place { arena: port.arena().clone(), worker: port.worker(), pids, looks: looks_in(alone) };
    PLACE.set(place).map_err(|_| Error::usage("a second handler for SIGTERM"))?;
    sigterm::install(decide)
}

fn decide(cause: Cause) -> Answer {
    let Some(place) = PLACE.get() else { return Answer::Die };
    let page = |worker| &place.arena.control(worker).status;
    match cause {
        Cause::Sent { by } if by == place.pids.1 => Answer::Leave,
        Cause::Sent { by } if by == place.pids.0 => Answer::Die,
        // Two signals that are pending at a time are one, and this one may be the main process's as well.
        Cause::Sent { .. } if place.arena.header().stop.0.load(Ordering::Relaxed) != 0 => Answer::Leave,
        Cause::Sent { .. } => {
            match page(place.worker).terminated.swap(Terminated::Alone as u32, Ordering::Relaxed) {
                0 => Answer::AskAgain(SIGTERM_CHECK),
                _ => Answer::Die,
            }
        }
        Cause::Time => {
            let workers = 0..place.arena.geometry().workers;
            let others =
                workers.filter(|worker| *worker != place.worker).map(page).filter(|page| works(page));
            let (mut count, mut flagged) = (0, 0);
            for page in others {
                count += 1;
                flagged += page.terminated.load(Ordering::Relaxed).min(1);
            }
            let (answer, looked) = next(LOOKED.load(Ordering::Relaxed), place.looks, count, flagged);
            LOOKED.store(looked, Ordering::Relaxed);
            if answer == Answer::AskAgain(SIGTERM_SERVE) {
                page(place.worker).terminated.store(Terminated::Group as u32, Ordering::Relaxed);
            }
            answer
        }
    }
}

/// Whether a worker has started and not left.
fn works(page: &StatusPage) -> bool {
    let left = page.state.load(Ordering::Relaxed) == WorkerState::Left as u32;
    page.pid.load(Ordering::Relaxed) != 0 && !left
}

/// Looks that fit into a time, at least one.
fn looks_in(time: Duration) -> u32 {
    let looks = time.as_millis() / SIGTERM_CHECK.as_millis();
    u32::try_from(looks).unwrap_or(u32::MAX).clamp(1, DECIDED / 2 - 1)
}

/// What a look at `others` workers, of whom `flagged` have got the signal, leads to after `looked` of `looks` looks; and how
/// many there have been then.
fn next(looked: u32, looks: u32, others: u32, flagged: u32) -> (Answer, u32) {
    let most = if flagged > 0 { 2 * looks } else { looks };
    match looked {
        DECIDED => (Answer::Die, DECIDED),
        _ if others == 0 => (Answer::AskAgain(SIGTERM_ALONE - SIGTERM_CHECK), DECIDED),
        _ if flagged == others => (Answer::AskAgain(SIGTERM_SERVE), DECIDED),
        _ if looked + 1 < most => (Answer::AskAgain(SIGTERM_CHECK), looked + 1),
        _ => (Answer::Die, DECIDED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_to_all_is_survived_for_a_while() {
        assert_eq!(next(0, 5, 3, 3), (Answer::AskAgain(SIGTERM_SERVE), DECIDED));
        assert_eq!(next(DECIDED, 5, 3, 3).0, Answer::Die);
    }

    #[test]
    fn a_signal_to_one_of_several_ends_it() {
        assert_eq!(next(0, 5, 3, 0), (Answer::AskAgain(SIGTERM_CHECK), 1));
        assert_eq!(next(3, 5, 3, 0).0, Answer::AskAgain(SIGTERM_CHECK));
        assert_eq!(next(4, 5, 3, 0).0, Answer::Die);
    }

    #[test]
    fn a_time_is_some_looks_whatever_it_is() {
        let looks = |seconds| looks_in(Duration::from_secs_f64(seconds));
        assert_eq!((looks(0.5), looks(0.0), looks(60.0)), (5, 1, 600));
        let most = looks(1e12);
        assert_eq!(next(2 * most - 1, most, 3, 1).0, Answer::Die);
    }

    #[test]
    fn others_may_get_it_a_little_later_but_not_much() {
        let mut looked = 0;
        for _ in 1..10 {
            let (answer, now) = next(looked, 5, 3, 2);
            assert_eq!((answer, now), (Answer::AskAgain(SIGTERM_CHECK), looked + 1));
            looked = now;
        }
        assert_eq!(next(looked, 5, 3, 3).0, Answer::AskAgain(SIGTERM_SERVE));
        assert_eq!(next(looked, 5, 3, 2).0, Answer::Die);
    }

    #[test]
    fn a_worker_without_others_waits_once() {
        let (answer, looked) = next(0, 5, 0, 0);
        assert_eq!(answer, Answer::AskAgain(SIGTERM_ALONE - SIGTERM_CHECK));
        assert_eq!(next(looked, 5, 0, 0).0, Answer::Die);
    }
}
