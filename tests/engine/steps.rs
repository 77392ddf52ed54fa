//! The engine's steps if nothing can be delivered yet, if a worker's process ends, and at the ends of epochs; and what
//! workers receive.

use std::time::{Duration, Instant};

use rustloader::engine::Step;
use rustloader::metrics::Count;
use rustloader::scheduler::Settings;
use rustloader::sys::pidfd::ExitStatus;
use rustloader::wire::{ResultKind, TaskKind, read_epoch};
use rustloader::worker::port::Received;

use super::rig::{LIMIT, Rig, held, until};

const SETTINGS: Settings = Settings::torch(2, 2, true);

/// Returns a rig whose sampler yields nothing after the first tasks.
fn rig(settings: Settings) -> Rig {
    let mut rig = Rig::new(settings);
    rig.submits = false;
    rig
}

fn persistent() -> Rig {
    rig(Settings { persistent: true, ..SETTINGS })
}

fn answer(rig: &Rig, worker: usize) {
    rig.answer(worker, ResultKind::Plain);
}

#[test]
fn each_next_has_the_whole_timeout() {
    let mut rig = rig(Settings { timeout: Some(LIMIT), ..SETTINGS });
    let Step::Wait(Some(first)) = rig.engine.step().unwrap() else { panic!("it does not wait") };
    // While `next` waits, its deadline stays the same.
    assert!(matches!(rig.engine.step().unwrap(), Step::Wait(Some(same)) if same == first));
    answer(&rig, 0);
    assert_eq!(rig.batch(), 0);
    assert!(matches!(rig.engine.step().unwrap(), Step::Wait(Some(second)) if second >= first));
}

#[test]
fn a_death_is_seen_although_other_results_never_run_out() {
    let mut rig = Rig::new(Settings::torch(2, 2, false));
    assert!(matches!(rig.engine.step().unwrap(), Step::Wait(_)));
    rig.kill(1);
    let start = Instant::now();
    answer(&rig, 0);
    loop {
        assert!(start.elapsed() < LIMIT, "the death is not noticed");
        match rig.engine.step().unwrap() {
            Step::Submit => {
                rig.submit();
                answer(&rig, 0);
            }
            Step::Deliver { incoming, .. } => _ = rig.payload_of(&incoming),
            Step::Dead(death) => return assert_eq!(death.worker.0, 1),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_a_worker_had_published_comes_before_its_death() {
    let mut rig = rig(Settings::torch(1, 3, true));
    answer(&rig, 0);
    answer(&rig, 0);
    // The process is not reaped, so the kernel still has its status.
    rig.processes[0].kill().unwrap();
    until(|| rig.engine.handle().process(0).unwrap().has_exited());
    // The first step checks for deaths before it reads any result.
    assert_eq!((rig.batch(), rig.batch()), (0, 1));
    let Step::Dead(death) = rig.step() else { panic!("the death is not reported") };
    assert_eq!((death.worker.0, death.lost.map(|task| task.0)), (0, Some(2)));
    let report = rig.engine.report(death);
    assert_eq!((report.worker, report.pid, report.index), (0, rig.processes[0].id() as i32, Some(&2)));
    assert_eq!(report.status, Some(ExitStatus::Signal(9)));
}

/// Runs one wait of `next`, and `meanwhile` during the wait.
fn wait(rig: &mut Rig, meanwhile: impl FnOnce(&Rig)) {
    assert!(matches!(rig.engine.step().unwrap(), Step::Wait(_)));
    rig.engine.wait(Some(Duration::ZERO)).unwrap();
    std::thread::sleep(Duration::from_millis(2));
    meanwhile(rig);
    rig.engine.after_wait().unwrap();
}

#[test]
fn a_next_knows_how_long_its_batch_blocked_later_ones() {
    let mut rig = rig(SETTINGS);
    let counted = |rig: &Rig| rig.engine.handle().meter.get(Count::Blocked) / 1000;
    rig.engine.epoch_begins();
    // In the first `next` of an epoch, which waits for the start of a worker, nothing counts as blocked.
    rig.engine.next_begins();
    answer(&rig, 1);
    wait(&mut rig, |rig| answer(rig, 0));
    assert_eq!((rig.batch(), rig.engine.blocked_us()), (0, 0));
    rig.engine.next_ends();
    rig.engine.next_begins();
    assert_eq!((rig.batch(), rig.engine.blocked_us()), (1, 0));
    rig.engine.next_ends();
    // While nothing is ready, nothing is blocked; then batch 2 blocks batch 3 for two waits.
    rig.engine.next_begins();
    wait(&mut rig, |rig| answer(rig, 1));
    assert_eq!(rig.engine.blocked_us(), 0);
    wait(&mut rig, |_| ());
    let once = rig.engine.blocked_us();
    wait(&mut rig, |rig| answer(rig, 0));
    assert_eq!(rig.batch(), 2);
    let blocked = rig.engine.blocked_us();
    assert!(once >= 2000 && blocked >= once + 2000, "{once}, {blocked}");
    assert_eq!(blocked, counted(&rig));
    rig.engine.next_ends();
    // The time is not counted for the next batch.
    rig.engine.next_begins();
    assert_eq!((rig.batch(), rig.engine.blocked_us()), (3, 0));
    rig.engine.next_ends();
    assert_eq!(counted(&rig), blocked);
    let waits = rig.engine.handle().meter.totals().waits;
    assert_eq!(waits.iter().sum::<u64>(), 3, "one for each `next` except the first: {waits:?}");
}

#[test]
fn a_new_epoch_gives_back_the_blocks_of_the_old_ones_batches() {
    let mut rig = persistent();
    answer(&rig, 1);
    // This result waits for the batch before it.
    assert!(matches!(rig.engine.step().unwrap(), Step::Wait(_)));
    assert_eq!(held(&rig.arena), 1);
    rig.engine.reset(b"").unwrap();
    assert_eq!(held(&rig.arena), 0);
    // This result comes after the reset.
    answer(&rig, 0);
    assert_eq!(held(&rig.arena), 1);
    assert!(matches!(rig.engine.step().unwrap(), Step::Wait(_)) && rig.engine.resuming());
    assert_eq!(held(&rig.arena), 0);
}

#[test]
fn a_new_epoch_brings_each_worker_its_message_and_the_number_of_its_first_task() {
    for message in [&b""[..], &[7; 24], &[8; 25], &[9; 1000]] {
        let mut rig = persistent();
        let sent = rig.engine.max_tasks() as u64;
        rig.engine.reset(message).unwrap();
        // No worker has answered yet, so the messages that were sent serve the third epoch, too.
        rig.engine.reset(b"other").unwrap();
        for (worker, port) in rig.ports.iter().enumerate() {
            (0..SETTINGS.prefetch_factor).for_each(|_| answer(&rig, worker));
            let entry = rig.take(worker);
            let in_block = port.payload.lock().unwrap();
            let payload = if entry.block.is_some() { &in_block[..] } else { &entry.inline[..entry.len as usize] };
            assert_eq!((entry.kind, entry.block.is_some()), (TaskKind::Resume, message.len() > 24));
            assert_eq!(read_epoch(payload).unwrap(), (sent, message));
            drop(in_block);
            assert!(port.take_up().unwrap().is_none());
        }
    }
}

#[test]
fn a_result_rings_the_doorbell_if_the_main_process_sleeps() {
    let rig = rig(SETTINGS);
    answer(&rig, 0);
    assert!(!rig.has_rung());
    rig.arena.header().doorbell.0.announce();
    answer(&rig, 1);
    assert!(rig.has_rung());
}

#[test]
fn close_tells_workers_to_leave_before_their_next_task() {
    let rig = rig(SETTINGS);
    answer(&rig, 0);
    rig.engine.handle().close();
    for port in &rig.ports {
        assert!(port.stopping() && matches!(port.receive().unwrap(), Received::Stop));
    }
}
