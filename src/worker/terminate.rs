//! SIGTERM to the process group, as sent to preempt a training run.
//!
//! By default it would kill all workers, and `next` would raise before the main process's handler could react. So if
//! the main process has a handler for SIGTERM, a worker notes the signal on its status page, continues, and checks
//! every [`SIGTERM_CHECK`] which other workers have received the signal too:
//!
//! | received by | meaning | the worker |
//! |---|---|---|
//! | all workers | a signal to the group | continues for at most [`SIGTERM_SERVE`] |
//! | some of them | perhaps a signal to the group, still being delivered | checks again, for up to twice the limit |
//! | no other worker, up to the limit | a signal to this worker | is killed by it, and the main process names the worker |
//! | there is no other worker | unknown | continues for [`SIGTERM_ALONE`] |
//!
//! The limit is the argument `alone` of [`survive_group_signal`].
//!
//! A second SIGTERM ends the worker at once, and so does a SIGTERM that the worker sends to itself. A SIGTERM from the
//! main process is part of a shutdown, and makes the worker leave. [`decide`] runs in the signal handler: it only loads
//! and stores atomics.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::port::Port;
use crate::config::{SIGTERM_ALONE, SIGTERM_CHECK, SIGTERM_SERVE};
use crate::error::{Error, Result};
use crate::shm::arena::Arena;
use crate::shm::layout::{StatusPage, Terminated, WorkerState};
use crate::sys::sigterm::{self, Cause, Reaction};

/// The input of [`decide`]. It is never dropped, because the handler stays installed.
struct Input {
    arena: Arc<Arena>,
    worker: u32,
    /// The pids of this process and of the main process.
    pids: (i32, i32),
    /// Maximum number of checks if no other worker has received the signal; twice this number if some have.
    max_checks: u32,
}

static INPUT: OnceLock<Input> = OnceLock::new();
/// Number of checks so far, or [`DECIDED`].
static CHECKS_DONE: AtomicU32 = AtomicU32::new(0);
/// The value of [`CHECKS_DONE`] after the last check.
const DECIDED: u32 = u32::MAX;

/// Makes this worker survive a SIGTERM to the group. `main` is the main process's pid. If no other worker receives the
/// signal within `alone`, the signal counts as sent to this worker only; on a busy machine, delivery to all workers may
/// take that long. If this call fails, SIGTERM keeps its earlier effect.
pub fn survive_group_signal(port: &Port, main: i32, alone: Duration) -> Result<()> {
    let pids = (std::process::id() as i32, main);
    let input = Input { arena: port.arena().clone(), worker: port.worker(), pids, max_checks: checks_in(alone) };
    INPUT.set(input).map_err(|_| Error::usage("there is already a handler for SIGTERM"))?;
    sigterm::install(decide)
}

fn decide(cause: Cause) -> Reaction {
    let Some(input) = INPUT.get() else { return Reaction::Die };
    let page = |worker| &input.arena.control(worker).status;
    match cause {
        Cause::Sent { by } if by == input.pids.1 => Reaction::Leave,
        Cause::Sent { by } if by == input.pids.0 => Reaction::Die,
        // Pending signals merge, so the main process may have sent one too.
        Cause::Sent { .. } if input.arena.header().stop.0.load(Ordering::Relaxed) != 0 => Reaction::Leave,
        Cause::Sent { .. } => match page(input.worker).terminated.swap(Terminated::Alone as u32, Ordering::Relaxed) {
            0 => Reaction::AskAgain(SIGTERM_CHECK),
            _ => Reaction::Die,
        },
        Cause::Time => {
            let workers = 0..input.arena.geometry().workers;
            let others = workers.filter(|worker| *worker != input.worker).map(page).filter(|page| is_active(page));
            let (mut count, mut flagged) = (0, 0);
            for page in others {
                count += 1;
                flagged += page.terminated.load(Ordering::Relaxed).min(1);
            }
            let (reaction, checks_done) = next(CHECKS_DONE.load(Ordering::Relaxed), input.max_checks, count, flagged);
            CHECKS_DONE.store(checks_done, Ordering::Relaxed);
            if reaction == Reaction::AskAgain(SIGTERM_SERVE) {
                page(input.worker).terminated.store(Terminated::Group as u32, Ordering::Relaxed);
            }
            reaction
        }
    }
}

/// Returns true if a worker has started and has not left.
fn is_active(page: &StatusPage) -> bool {
    let left = page.state.load(Ordering::Relaxed) == WorkerState::Left as u32;
    page.pid.load(Ordering::Relaxed) != 0 && !left
}

/// Returns the number of checks that fit into a time, at least one.
fn checks_in(time: Duration) -> u32 {
    let max_checks = time.as_millis() / SIGTERM_CHECK.as_millis();
    u32::try_from(max_checks).unwrap_or(u32::MAX).clamp(1, DECIDED / 2 - 1)
}

/// Returns the reaction after `checks_done` checks, and the new value of `checks_done`. `flagged` of the `others` other
/// workers have received the signal.
fn next(checks_done: u32, max_checks: u32, others: u32, flagged: u32) -> (Reaction, u32) {
    let limit = if flagged > 0 { 2 * max_checks } else { max_checks };
    match checks_done {
        DECIDED => (Reaction::Die, DECIDED),
        _ if others == 0 => (Reaction::AskAgain(SIGTERM_ALONE - SIGTERM_CHECK), DECIDED),
        _ if flagged == others => (Reaction::AskAgain(SIGTERM_SERVE), DECIDED),
        _ if checks_done + 1 < limit => (Reaction::AskAgain(SIGTERM_CHECK), checks_done + 1),
        _ => (Reaction::Die, DECIDED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_to_all_is_survived_for_a_while() {
        assert_eq!(next(0, 5, 3, 3), (Reaction::AskAgain(SIGTERM_SERVE), DECIDED));
        assert_eq!(next(DECIDED, 5, 3, 3).0, Reaction::Die);
    }

    #[test]
    fn a_signal_to_one_of_several_ends_it() {
        assert_eq!(next(0, 5, 3, 0), (Reaction::AskAgain(SIGTERM_CHECK), 1));
        assert_eq!(next(3, 5, 3, 0).0, Reaction::AskAgain(SIGTERM_CHECK));
        assert_eq!(next(4, 5, 3, 0).0, Reaction::Die);
    }

    #[test]
    fn any_time_allows_at_least_one_check() {
        let max_checks = |seconds| checks_in(Duration::from_secs_f64(seconds));
        assert_eq!((max_checks(0.5), max_checks(0.0), max_checks(60.0)), (5, 1, 600));
        let limit = max_checks(1e12);
        assert_eq!(next(2 * limit - 1, limit, 3, 1).0, Reaction::Die);
    }

    #[test]
    fn other_workers_may_receive_the_signal_a_little_later() {
        let mut checks_done = 0;
        for _ in 1..10 {
            let (reaction, now) = next(checks_done, 5, 3, 2);
            assert_eq!((reaction, now), (Reaction::AskAgain(SIGTERM_CHECK), checks_done + 1));
            checks_done = now;
        }
        assert_eq!(next(checks_done, 5, 3, 3).0, Reaction::AskAgain(SIGTERM_SERVE));
        assert_eq!(next(checks_done, 5, 3, 2).0, Reaction::Die);
    }

    #[test]
    fn a_worker_without_others_waits_once() {
        let (reaction, checks_done) = next(0, 5, 0, 0);
        assert_eq!(reaction, Reaction::AskAgain(SIGTERM_ALONE - SIGTERM_CHECK));
        assert_eq!(next(checks_done, 5, 0, 0).0, Reaction::Die);
    }
}
