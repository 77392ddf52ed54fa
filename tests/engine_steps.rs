//! The engine's steps if nothing can be delivered yet, if a worker's process ends, and at the ends of epochs; and what
//! workers receive.

use std::os::fd::AsRawFd;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustloader::engine::completions::Message;
use rustloader::engine::{Engine, Step};
use rustloader::metrics::Count;
use rustloader::scheduler::Settings;
use rustloader::shm::arena::Arena;
use rustloader::sys::pidfd::ExitStatus;
use rustloader::sys::poll::PollSet;
use rustloader::wire::{ResultKind, TaskKind, Timings, read_epoch};
use rustloader::worker::port::{Port, Received};

const LIMIT: Duration = Duration::from_secs(20);

const SETTINGS: Settings = Settings::torch(2, 2, true);

/// An engine over ports in this process. A worker dies when its process, which only sleeps, is killed.
struct Rig {
    arena: Arc<Arena>,
    engine: Engine<u64, ()>,
    ports: Vec<Port>,
    processes: Vec<Child>,
}

impl Rig {
    fn new(settings: Settings) -> Self {
        let workers = settings.workers as u32;
        let arena = Arena::create_sized(1 << 30, workers, 16).unwrap();
        let mut engine = Engine::over(arena.clone(), settings).unwrap();
        let doorbell = || engine.handle().doorbell.as_fd().try_clone_to_owned().unwrap();
        let open = |worker| Port::open(arena.clone(), worker, doorbell()).unwrap();
        let ports = (0..workers).map(open).collect();
        let start = |_| Command::new("sleep").arg("1000").spawn().unwrap();
        let processes: Vec<Child> = (0..workers).map(start).collect();
        for (worker, process) in (0..).zip(&processes) {
            engine.started(worker, process.id() as i32).unwrap();
        }
        for tag in 0..engine.max_tasks() as u64 {
            engine.submit(tag, TaskKind::Plain, &[0; 8]).unwrap().unwrap();
        }
        Self { arena, engine, ports, processes }
    }

    /// Answers a worker's next task.
    fn answer(&self, worker: usize) {
        let received = self.ports[worker].receive().unwrap();
        let Received::Task(entry) = received else { panic!("{received:?}") };
        self.ports[worker].send(entry.task, ResultKind::Plain, &[], b"data", Timings::default()).unwrap();
    }

    fn kill(&mut self, worker: usize) {
        self.processes[worker].kill().unwrap();
        self.processes[worker].wait().unwrap();
    }

    fn step(&mut self) -> Step<u64> {
        self.engine.step().unwrap()
    }

    /// Returns the tag of the next batch. Submits nothing.
    fn batch(&mut self) -> u64 {
        loop {
            match self.step() {
                Step::Submit => {}
                Step::Deliver { tag, .. } => return tag,
                other => panic!("{other:?}"),
            }
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        (0..self.processes.len()).for_each(|worker| self.kill(worker));
    }
}

#[test]
fn each_next_has_the_whole_timeout() {
    let mut rig = Rig::new(Settings { timeout: Some(LIMIT), ..SETTINGS });
    let Step::Wait(Some(first)) = rig.step() else { panic!("it does not wait") };
    // While `next` waits, its deadline stays the same.
    assert!(matches!(rig.step(), Step::Wait(Some(same)) if same == first));
    rig.answer(0);
    assert_eq!(rig.batch(), 0);
    assert!(matches!(rig.step(), Step::Wait(Some(second)) if second >= first));
}

#[test]
fn a_death_is_seen_although_other_results_never_run_out() {
    let mut rig = Rig::new(Settings::torch(2, 2, false));
    assert!(matches!(rig.step(), Step::Wait(_)));
    rig.kill(1);
    let start = Instant::now();
    let mut tag = rig.engine.max_tasks() as u64;
    rig.answer(0);
    loop {
        assert!(start.elapsed() < LIMIT, "the death is not noticed");
        match rig.step() {
            Step::Submit => {
                rig.engine.submit(tag, TaskKind::Plain, &[0; 8]).unwrap();
                tag += 1;
                rig.answer(0);
            }
            Step::Deliver { incoming, .. } => drop(Message::open(&rig.arena, &incoming, Vec::new()).unwrap()),
            Step::Dead(death) => return assert_eq!(death.worker.0, 1),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_a_worker_had_published_comes_before_its_death() {
    let mut rig = Rig::new(Settings::torch(1, 3, true));
    rig.answer(0);
    rig.answer(0);
    rig.kill(0);
    // The first step checks for deaths before it reads any result.
    assert_eq!((rig.batch(), rig.batch()), (0, 1));
    let Step::Dead(death) = rig.step() else { panic!("the death is not reported") };
    assert_eq!((death.worker.0, death.lost.map(|task| task.0)), (0, Some(2)));
    let report = rig.engine.report(death);
    assert_eq!((report.worker, report.pid), (0, rig.processes[0].id() as i32));
    assert_eq!(report.index, Some(&2));
}

#[test]
fn the_report_of_a_death_says_how_the_worker_ended_and_what_it_was_at() {
    let mut rig = Rig::new(SETTINGS);
    // The process is not reaped, so the kernel still has its status.
    rig.processes[1].kill().unwrap();
    rig.answer(0);
    assert_eq!(rig.batch(), 0);
    rig.answer(0);
    let death = loop {
        match rig.step() {
            Step::Wait(deadline) => {
                rig.engine.wait(deadline).unwrap();
                rig.engine.after_wait().unwrap();
            }
            Step::Dead(death) => break death,
            Step::Submit => {}
            other => panic!("{other:?}"),
        }
    };
    let report = rig.engine.report(death);
    assert_eq!((report.worker, report.status), (1, Some(ExitStatus::Signal(9))));
    assert_eq!(report.index, Some(&1));
}

/// Runs one wait of `next`, and `meanwhile` during the wait.
fn wait(rig: &mut Rig, meanwhile: impl FnOnce(&Rig)) {
    assert!(matches!(rig.step(), Step::Wait(_)));
    rig.engine.wait(Some(Duration::ZERO)).unwrap();
    std::thread::sleep(Duration::from_millis(2));
    meanwhile(rig);
    rig.engine.after_wait().unwrap();
}

#[test]
fn a_next_knows_how_long_its_batch_blocked_later_ones() {
    let mut rig = Rig::new(SETTINGS);
    let counted = |rig: &Rig| rig.engine.handle().meter.get(Count::Blocked) / 1000;
    rig.engine.epoch_begins();
    // In the first `next` of an epoch, which waits for the start of a worker, nothing counts as blocked.
    rig.engine.next_begins();
    rig.answer(1);
    wait(&mut rig, |rig| rig.answer(0));
    assert_eq!((rig.batch(), rig.engine.blocked_us()), (0, 0));
    rig.engine.next_ends();
    rig.engine.next_begins();
    assert_eq!((rig.batch(), rig.engine.blocked_us()), (1, 0));
    rig.engine.next_ends();
    // While nothing is ready, nothing is blocked; then batch 2 blocks batch 3 for two waits.
    rig.engine.next_begins();
    wait(&mut rig, |rig| rig.answer(1));
    assert_eq!(rig.engine.blocked_us(), 0);
    wait(&mut rig, |_| ());
    let once = rig.engine.blocked_us();
    wait(&mut rig, |rig| rig.answer(0));
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
    let mut rig = Rig::new(Settings { persistent: true, ..SETTINGS });
    let before = rig.arena.usage().held;
    rig.answer(1);
    // This result waits for the batch before it.
    assert!(matches!(rig.step(), Step::Wait(_)));
    assert!(rig.arena.usage().held > before);
    rig.engine.reset(b"").unwrap();
    assert_eq!(rig.arena.usage().held, before);
    // This result comes after the reset.
    rig.answer(0);
    assert!(rig.arena.usage().held > before);
    assert!(matches!(rig.step(), Step::Wait(_)) && rig.engine.resuming());
    assert_eq!(rig.arena.usage().held, before);
}

#[test]
fn a_new_epoch_brings_each_worker_its_message_and_the_number_of_its_first_task() {
    for message in [&b""[..], &[7; 24], &[8; 25], &[9; 1000]] {
        let mut rig = Rig::new(Settings { persistent: true, ..SETTINGS });
        let sent = rig.engine.max_tasks() as u64;
        rig.engine.reset(message).unwrap();
        // No worker has answered yet, so the messages that were sent serve the third epoch, too.
        rig.engine.reset(b"other").unwrap();
        for (worker, port) in rig.ports.iter().enumerate() {
            (0..SETTINGS.prefetch_factor).for_each(|_| rig.answer(worker));
            let Received::Task(entry) = port.receive().unwrap() else { panic!("no message") };
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
    let rig = Rig::new(SETTINGS);
    let mut poll = PollSet::new();
    poll.add(rig.engine.handle().doorbell.as_fd().as_raw_fd(), 0).unwrap();
    let mut has_rung = || {
        let mut ready = Vec::new();
        poll.wait(Some(Duration::ZERO), &mut ready).unwrap();
        !ready.is_empty()
    };
    rig.answer(0);
    assert!(!has_rung());
    rig.arena.header().doorbell.0.announce();
    rig.answer(1);
    assert!(has_rung());
}

#[test]
fn close_tells_workers_to_leave_before_their_next_task() {
    let rig = Rig::new(SETTINGS);
    rig.answer(0);
    rig.engine.handle().close();
    for port in &rig.ports {
        assert!(port.stopping() && matches!(port.receive().unwrap(), Received::Stop));
    }
}
