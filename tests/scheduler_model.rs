//! Compares the scheduler with a small reference: a transcription of torch's `_MultiProcessingDataLoaderIter`, extended
//! by deaths. Deaths may be final, or the worker is replaced, which torch's algorithm does not notice. Orders of
//! completion, errors, exhaustion, deaths, replacements, resets and timeouts are random.
//!
//! Settings that torch does not have are combined freely: a shared queue, and windows of batches and bytes. They have
//! no reference; instead, invariants are checked: no task is lost or delivered twice, the order, all bounds and the
//! dispatch policy hold, and a window asks for draws exactly while there is room.

mod common;

use proptest::prelude::*;
use rustloader::id::{TaskId, WorkerId};
use rustloader::scheduler::{
    Action, Death, Decision, DeliveryOrder, Dispatch, Event, Placement, Scheduler, Settings, Window,
};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// The outcome of a user's `next`.
#[derive(Clone, Debug, PartialEq)]
enum Outcome {
    Batch { task: u64, worker: usize, failed: bool },
    Dead { worker: usize, lost: Option<u64> },
    End,
}

/// An event that reaches the main process during an epoch.
#[derive(Clone, Debug, PartialEq)]
enum Arrival {
    Result { task: u64, failed: bool },
    Exhausted { worker: usize },
    Death { worker: usize },
}

/// The reference, with torch's fields and loops.
struct Torch {
    prefetch: usize,
    in_order: bool,
    send: u64,
    rcvd: u64,
    info: BTreeMap<u64, (usize, Option<bool>)>,
    status: Vec<bool>,
    num_tasks: Vec<usize>,
    outstanding: usize,
    cycle: usize,
    indices: usize,
    dead: Vec<usize>,
    sent: Vec<(u64, usize)>,
}

impl Torch {
    fn new(config: &Config, first: u64, cycle: usize) -> Self {
        let mut torch = Torch {
            prefetch: config.prefetch,
            in_order: config.in_order,
            send: first,
            rcvd: first,
            info: BTreeMap::new(),
            status: vec![true; config.workers],
            num_tasks: vec![0; config.workers],
            outstanding: 0,
            cycle,
            indices: config.indices,
            dead: Vec::new(),
            sent: Vec::new(),
        };
        (0..config.prefetch * config.workers).for_each(|_| torch.try_put_index());
        torch
    }

    fn try_put_index(&mut self) {
        let (workers, max_tasks) = (self.status.len(), self.prefetch * self.status.len());
        assert!(self.outstanding < max_tasks, "torch asserts this, too");
        if !self.dead.is_empty() || self.indices == 0 {
            return;
        }
        self.indices -= 1;
        let active = self.status.iter().filter(|status| **status).count();
        for _ in 0..workers {
            let worker = self.cycle;
            self.cycle = (self.cycle + 1) % workers;
            if self.status[worker] && (self.in_order || self.num_tasks[worker] < max_tasks / active) {
                self.sent.push((self.send, worker));
                self.info.insert(self.send, (worker, None));
                self.num_tasks[worker] += 1;
                self.outstanding += 1;
                self.send += 1;
                return;
            }
        }
    }

    fn process(&mut self, task: u64, failed: bool) -> Outcome {
        let (worker, _) = self.info.remove(&task).expect("a task is delivered once");
        self.num_tasks[worker] -= 1;
        self.try_put_index();
        Outcome::Batch { task, worker, failed }
    }

    fn next(&mut self, mut get: impl FnMut() -> Arrival) -> Outcome {
        loop {
            while self.rcvd < self.send {
                match self.info.get(&self.rcvd) {
                    Some((worker, data)) if data.is_some() || self.status[*worker] => break,
                    Some((worker, _)) if self.dead.contains(worker) => break,
                    _ => self.info.remove(&self.rcvd),
                };
                self.rcvd += 1;
            }
            let head = self.info.get(&self.rcvd).copied();
            if let Some((_, Some(failed))) = head {
                self.rcvd += 1;
                return self.process(self.rcvd - 1, failed);
            }
            // Deaths are an addition to torch's rules: raised immediately without order; in order, if the head is lost
            // or nothing is left.
            let lost =
                |(_, (worker, data)): &(&u64, &(usize, Option<bool>))| data.is_none() && self.dead.contains(worker);
            if !self.dead.is_empty() && (!self.in_order || head.is_none_or(|(w, _)| self.dead.contains(&w))) {
                let first = self.info.iter().find(lost);
                let worker = first.map_or(self.dead[0], |(_, (worker, _))| *worker);
                return Outcome::Dead { worker, lost: first.map(|(task, _)| *task) };
            }
            if head.is_none() {
                return Outcome::End;
            }
            match get() {
                Arrival::Result { task, failed } => {
                    self.outstanding -= 1;
                    if !self.in_order {
                        return self.process(task, failed);
                    }
                    self.info.get_mut(&task).expect("it was sent").1 = Some(failed);
                }
                Arrival::Exhausted { worker } => {
                    self.outstanding -= 1;
                    self.status[worker] = false;
                    // torch skips these one by one later. Here a death must not count them as lost.
                    self.info.retain(|_, (holder, data)| *holder != worker || data.is_some());
                    self.try_put_index();
                }
                Arrival::Death { worker } => {
                    self.status[worker] = false;
                    self.dead.push(worker);
                }
            }
        }
    }
}

#[derive(Clone, Debug)]
struct Config {
    workers: usize,
    prefetch: usize,
    in_order: bool,
    persistent: bool,
    timeout: bool,
    /// How many indices the sampler yields in an epoch.
    indices: usize,
    /// How many batches each worker's dataset has in an epoch; usize::MAX for a map-style dataset.
    lengths: Vec<usize>,
    /// Whether results may be reported before `next` waits for them. Then other orders than the reference's are right,
    /// and only the invariants are checked.
    eager: bool,
    deaths: bool,
    /// Whether workers that die may be replaced.
    restarts: bool,
    /// Whether epochs may begin before the last one has ended.
    overlaps: bool,
    /// Settings beyond torch's, for which only the invariants are checked.
    free: Option<Free>,
    choices: Vec<u8>,
}

#[derive(Clone, Debug)]
struct Free {
    dispatch: Dispatch,
    delivery: DeliveryOrder,
    window: Option<Window>,
}

/// Returns the size of a task's result in bytes.
fn size_of(task: u64) -> u64 {
    if task % 11 == 7 { 90 } else { task * 7 % 13 }
}

impl Config {
    fn settings(&self) -> Settings {
        let mut settings = Settings::torch(self.workers, self.prefetch, self.in_order);
        if let Some(free) = &self.free {
            settings.window = free.window;
            settings.dispatch = free.dispatch;
            settings.delivery = free.delivery;
        }
        let timeout = self.timeout.then_some(TIMEOUT);
        Settings { persistent: self.persistent, timeout, restarts: self.restarts, ..settings }
    }

    /// Whether the reference applies. It knows neither early epochs nor the deaths of workers that have only their
    /// tasks.
    fn has_reference(&self) -> bool {
        !self.eager && self.free.is_none() && !(self.overlaps && self.deaths)
    }

    /// Whether no worker runs out of batches.
    fn is_map_style(&self) -> bool {
        self.lengths.iter().all(|length| *length == usize::MAX)
    }
}

#[derive(Debug)]
enum Message {
    Task(u64),
    Resume,
}

/// A worker process: its task ring and its dataset.
#[derive(Debug, Default)]
struct Process {
    ring: VecDeque<Message>,
    left: usize,
    exhausted: bool,
    gone: bool,
    /// The task that it has claimed from the shared queue.
    held: Option<u64>,
    /// The tasks of this epoch that are bound to the worker and unanswered, oldest first.
    bound: Vec<u64>,
    /// Those of them that the current process has not been sent.
    unsent: VecDeque<u64>,
    /// Whether the process has died and may be replaced.
    vacant: bool,
    /// When it may be replaced; None if now.
    due: Option<Duration>,
    /// Whether it has not begun this epoch.
    stale: bool,
}

impl Process {
    /// Begins an epoch, with a dataset of `length` batches.
    fn begin(&mut self, length: usize) {
        (self.left, self.exhausted, self.stale) = (length, false, false);
    }

    /// Ends the process. The task that it has claimed but not answered stays bound to its worker.
    fn die(&mut self, epoch: u64) -> Option<u64> {
        let held = self.held.take();
        self.gone = true;
        self.ring.clear();
        self.unsent.clear();
        self.bound.extend(held.filter(|task| *task >= epoch));
        self.bound.sort_unstable();
        held
    }
}

/// The next epoch, which has begun before the end of the current one.
#[derive(Debug, Default)]
struct Early {
    first: u64,
    /// How many indices its sampler still yields.
    indices: usize,
    /// Whether its sampler has reported its end.
    ended: bool,
    arrivals: VecDeque<Arrival>,
    ready: Vec<u64>,
    sent: Vec<(u64, usize)>,
}

struct World<'a> {
    config: &'a Config,
    settings: Settings,
    choices: std::slice::Iter<'a, u8>,
    scheduler: Scheduler<u64, u64>,
    processes: Vec<Process>,
    /// The shared queue: tasks that no worker has claimed.
    queue: VecDeque<u64>,
    /// Results that wait for delivery, in the order of their arrival.
    ready: Vec<u64>,
    /// The result whose delivery waits for submissions.
    staged: Option<u64>,
    /// Bytes of the largest result so far.
    largest: u64,
    /// Whether the sampler has reported its end.
    sampler_ended: bool,
    /// Whether the sampler has raised in this call.
    sampler_failed: bool,
    /// Workers whose death is final, with the oldest task bound to each.
    dead: Vec<(usize, Option<u64>)>,
    now: Duration,
    /// When the clock of the timeout was last started, if it runs.
    clock: Option<Duration>,
    indices: usize,
    epoch: u64,
    /// The worker with which the epoch's cycle begins.
    first: usize,
    arrivals: VecDeque<Arrival>,
    sent: Vec<(u64, usize)>,
    early: Option<Early>,
    is_shut_down: bool,
    /// For each task, the number of times its tag was returned.
    ended: Vec<u32>,
}

const TIMEOUT: Duration = Duration::from_millis(100);

impl World<'_> {
    fn choice(&mut self) -> u8 {
        self.choices.next().copied().unwrap_or(255)
    }

    fn event(&mut self, event: Event<u64>) {
        self.scheduler.on_event(self.now, event).expect("the workers follow the protocol");
        self.perform();
    }

    fn perform(&mut self) {
        while let Some(action) = self.scheduler.poll() {
            match action {
                Action::Retire(worker) => {
                    self.processes[worker.index()].gone = true;
                    // The exit of a retired worker is not a death.
                    self.scheduler.on_event(self.now, Event::WorkerDied { worker, held: Vec::new() }).unwrap();
                }
                Action::Resume(worker) => {
                    let process = &mut self.processes[worker.index()];
                    assert!(!process.vacant, "there is no process to read it");
                    process.ring.push_back(Message::Resume);
                }
                Action::Withdraw(task) => {
                    assert!(task.0 < self.scheduler.first_task().0, "the task is of the current epoch");
                    if let Some(index) = self.queue.iter().position(|waits| *waits == task.0) {
                        self.queue.remove(index);
                        self.scheduler.on_event(self.now, Event::Withdrawn(task)).unwrap();
                    }
                }
                Action::Discard { task, tag, result } => {
                    // A result that arrives after the shutdown has no tag.
                    assert!(tag == Some(task.0) || self.is_shut_down && tag.is_none() && result.is_some());
                    self.ended[task.0 as usize] += u32::from(tag.is_some());
                    assert!(result.is_none_or(|result| result == task.0 * 3));
                }
            }
        }
    }

    /// Lets a worker claim a task from the shared queue, which main does not observe. Messages in its ring come first.
    fn a_worker_claims(&mut self) {
        let index = self.choice() as usize;
        if let Some(process) = self.processes.get_mut(index)
            && !process.gone
            && process.held.is_none()
            && process.ring.is_empty()
        {
            process.held = self.queue.pop_front();
        }
    }

    /// Records a worker's result for a task, and returns its event.
    fn result(&mut self, worker: WorkerId, task: u64) -> Event<u64> {
        let failed = task % 5 == 3;
        let (arrivals, ready) = match &mut self.early {
            Some(early) if task >= early.first => (&mut early.arrivals, &mut early.ready),
            _ => (&mut self.arrivals, &mut self.ready),
        };
        arrivals.push_back(Arrival::Result { task, failed });
        if task >= self.epoch {
            ready.push(task);
            self.largest = self.largest.max(size_of(task));
        }
        let (task, result, bytes) = (TaskId(task), task * 3, size_of(task));
        match failed {
            true => Event::Failed { worker, task, result, bytes },
            false => Event::Completed { worker, task, result, bytes },
        }
    }

    /// Makes some worker do something that main observes. Returns false if none can.
    fn a_worker_acts(&mut self) -> bool {
        let (count, start) = (self.config.workers, self.choice() as usize);
        for index in (0..count).map(|index| (start + index) % count) {
            let process = &mut self.processes[index];
            if process.gone {
                continue;
            }
            let worker = WorkerId(index as u32);
            if process.held.is_none() && process.ring.is_empty() {
                process.held = self.queue.pop_front();
            }
            if let Some(task) = process.held.take() {
                process.bound.retain(|bound| *bound != task);
                let event = self.result(worker, task);
                self.report(event);
                return true;
            }
            while let Some(message) = process.ring.pop_front() {
                let event = match message {
                    Message::Task(_) if process.exhausted => continue,
                    Message::Resume => {
                        process.begin(self.config.lengths[index]);
                        Event::Resumed(worker)
                    }
                    Message::Task(task) if process.left == 0 => {
                        process.exhausted = true;
                        process.bound.clear();
                        process.unsent.clear();
                        self.arrivals.push_back(Arrival::Exhausted { worker: index });
                        Event::Exhausted { worker, task: TaskId(task) }
                    }
                    Message::Task(task) => {
                        process.left -= 1;
                        process.bound.retain(|bound| *bound != task);
                        self.result(worker, task)
                    }
                };
                self.report(event);
                return true;
            }
        }
        false
    }

    /// Reports a worker's message. Each restarts the clock, except the results of an early epoch.
    fn report(&mut self, event: Event<u64>) {
        let is_early = match &event {
            Event::Completed { task, .. } | Event::Failed { task, .. } => task.0 >= self.end(),
            _ => false,
        };
        if !is_early {
            self.clock = self.clock.map(|_| self.now);
        }
        self.event(event);
    }

    fn kill(&mut self) {
        let index = self.choice() as usize % self.config.workers;
        if self.processes[index].gone {
            return;
        }
        let held = self.processes[index].die(self.epoch);
        self.processes[index].vacant = self.config.restarts;
        self.processes[index].due = None;
        if !self.config.restarts {
            self.note_death(index);
        }
        let held = held.map(TaskId).into_iter().collect();
        self.event(Event::WorkerDied { worker: WorkerId(index as u32), held });
    }

    /// Records a final death.
    fn note_death(&mut self, index: usize) {
        self.dead.push((index, self.processes[index].bound.first().copied()));
        self.arrivals.push_back(Arrival::Death { worker: index });
    }

    /// Responds to a vacancy as Python does: replaces the worker now or later, or gives it up.
    fn settle_vacancy(&mut self, death: Death) {
        let Death { worker, lost } = death;
        let process = &self.processes[worker.index()];
        assert!(process.vacant && process.due.is_none(), "{death:?}");
        assert_eq!(lost.map(|task| task.0), process.bound.first().copied());
        match self.choice() {
            0..=15 => {
                self.processes[worker.index()].vacant = false;
                self.note_death(worker.index());
                self.event(Event::GivenUp(worker));
            }
            16..=80 => {
                let until = self.now + Duration::from_millis(50);
                self.processes[worker.index()].due = Some(until);
                self.event(Event::Postponed { worker, until });
            }
            // The start fails, or is interrupted. The scheduler reports the vacancy again.
            81..=90 => {}
            _ => {
                let process = &mut self.processes[worker.index()];
                (process.gone, process.vacant) = (false, false);
                process.unsent = process.bound.iter().copied().collect();
                if process.stale {
                    process.begin(self.config.lengths[worker.index()]);
                }
                self.event(Event::WorkerReplaced(worker));
            }
        }
    }

    /// Resends one task, unless a signal comes first, or its worker dies.
    fn resend(&mut self) {
        let (worker, task, tag) = self.scheduler.unsent().expect("a task is to be resent");
        assert_eq!(task.0, *tag);
        let process = &self.processes[worker.index()];
        assert_eq!(process.unsent.front(), Some(tag));
        assert!(!process.gone && !process.vacant);
        match self.choice() {
            0..=9 if self.config.deaths => self.kill(),
            10..=19 => {}
            20..=39 => self.a_worker_claims(),
            _ => {
                let process = &mut self.processes[worker.index()];
                process.ring.push_back(Message::Task(task.0));
                process.unsent.pop_front();
                self.scheduler.resent();
            }
        }
    }

    /// Whether a vacancy is due whose tasks the epoch needs.
    fn is_vacancy_due(&self) -> bool {
        let needed = |process: &&Process| process.vacant && process.due.is_none() && !process.bound.is_empty();
        self.scheduler.death().is_none() && self.processes.iter().any(|process| needed(&process))
    }

    fn pass_time(&mut self, time: Duration) {
        self.now += time;
        for process in &mut self.processes {
            process.due = process.due.filter(|due| *due > self.now);
        }
        self.event(Event::Time);
    }

    /// Returns the number of tasks that are outstanding or ready. A staged task is neither.
    fn held(&self) -> usize {
        self.scheduler.undelivered().len() - usize::from(self.scheduler.is_staged())
    }

    /// Whether a worker may take a task: it is active, and below its share.
    fn has_taker(&self) -> bool {
        let workers = || (0..self.config.workers as u32).map(WorkerId);
        let active = workers().filter(|worker| self.scheduler.is_active(*worker)).count();
        workers().any(|worker| {
            let below = self.scheduler.load_of(worker) < self.scheduler.max_tasks() / active.max(1);
            self.scheduler.is_active(worker) && (self.settings.dispatch != Dispatch::FairShare || below)
        })
    }

    /// Returns the first number after the tasks of the current epoch.
    fn end(&self) -> u64 {
        self.early.as_ref().map_or(self.ended.len() as u64, |early| early.first)
    }

    /// Returns the worker of the oldest task that is lost, and the task; if none is lost, the first worker that died.
    fn first_lost(&self) -> Option<(usize, Option<u64>)> {
        let lost = self.dead.iter().filter(|(_, lost)| lost.is_some()).min_by_key(|(_, lost)| *lost);
        lost.or(self.dead.first()).copied()
    }

    /// Whether the current epoch can end: no worker has died, or tasks are lost, but only early ones.
    fn may_end(&self) -> bool {
        self.first_lost().is_none_or(|(_, lost)| lost.is_some_and(|task| task >= self.end()))
    }

    /// Whether the early epoch can become the current one.
    fn may_take_up(&self) -> bool {
        let delivered = |task| self.ended[task as usize] == 1;
        self.early.is_some() && (self.epoch..self.end()).all(delivered) && self.may_end()
    }

    /// Whether a task of the next epoch may be submitted.
    fn may_be_early(&self) -> bool {
        let is_due = match &self.early {
            Some(early) => !early.ended && early.sent.len() < self.scheduler.max_tasks(),
            None => self.sampler_ended && self.config.persistent && !self.config.restarts,
        };
        is_due && self.has_room()
    }

    /// Whether one more task may be outstanding. Tasks of the early epoch count, too.
    fn has_room(&self) -> bool {
        let early = self.early.as_ref();
        let outstanding = self.scheduler.outstanding() + early.map_or(0, |early| early.sent.len() - early.ready.len());
        let all = || self.ready.iter().chain(early.into_iter().flat_map(|early| &early.ready));
        let (held, most) = (outstanding + all().count(), self.scheduler.max_tasks());
        let window = self.settings.window.unwrap_or(Window { batches: most, bytes: None });
        let ready: u64 = all().map(|task| size_of(*task)).sum();
        let expected = ready + (outstanding as u64 + 1) * self.largest;
        let fits = held == 0 || window.bytes.is_none_or(|limit| expected <= limit);
        outstanding < most && held < window.batches && fits && self.scheduler.death().is_none()
    }

    /// Draws an index. With a window, some draws fail. Without one, failed draws do not concern the scheduler.
    fn draw(&mut self) {
        if self.settings.fills() && self.choice() < 10 {
            self.sampler_failed = true;
        } else {
            self.submit();
        }
    }

    fn submit(&mut self) {
        if self.early.is_some() {
            return self.submit_early();
        }
        if self.indices == 0 {
            self.sampler_ended = true;
            self.event(Event::SamplerEnded);
            return self.submit_early();
        }
        self.indices -= 1;
        self.send();
    }

    /// Submits a task of the next epoch, if that may begin early.
    fn submit_early(&mut self) {
        self.check_early();
        if !self.scheduler.may_be_early() || !self.config.overlaps {
            return;
        }
        if self.early.is_none() {
            if self.choice() < 100 {
                return;
            }
            let first = self.ended.len() as u64;
            assert_eq!(self.scheduler.begin_early().unwrap(), TaskId(first));
            self.early = Some(Early { first, indices: self.config.indices, ..Early::default() });
        }
        let fails = self.choice() < 5;
        let early = self.early.as_mut().unwrap();
        if early.indices == 0 || fails {
            early.ended = true;
            return self.event(Event::SamplerEnded);
        }
        early.indices -= 1;
        self.send();
    }

    /// Submits a task.
    fn send(&mut self) {
        let takes = self.has_room() && (self.early.is_some() || self.has_taker());
        let tag = self.ended.len() as u64;
        match self.scheduler.submit(tag) {
            Ok((task, placement)) => {
                assert!(takes, "there is no room for it");
                assert_eq!(task.0, tag, "task numbers continue across epochs");
                self.ended.push(0);
                let worker = match placement {
                    Placement::Queue => {
                        assert_eq!(self.settings.dispatch, Dispatch::SharedQueue);
                        self.early.iter_mut().for_each(|early| early.sent.push((task.0, 0)));
                        return self.queue.push_back(task.0);
                    }
                    Placement::Worker(worker) => worker,
                    Placement::Later => {
                        let all = self.scheduler.undelivered();
                        all.iter().find(|(number, _)| *number == task).and_then(|(_, worker)| *worker).unwrap()
                    }
                };
                let goes_around = self.settings.dispatch == Dispatch::RoundRobin && self.config.is_map_style();
                let goes_around = goes_around || self.early.is_some();
                let (first, sent) = match &mut self.early {
                    Some(early) => (0, &mut early.sent),
                    None => (self.first, &mut self.sent),
                };
                if goes_around {
                    assert_eq!(worker.index(), (first + sent.len()) % self.config.workers);
                }
                sent.push((task.0, worker.index()));
                let process = &mut self.processes[worker.index()];
                process.bound.push(task.0);
                let waits = process.vacant || !process.unsent.is_empty();
                assert_eq!(placement == Placement::Later, waits);
                match waits {
                    true if process.vacant => {}
                    true => process.unsent.push_back(task.0),
                    false => process.ring.push_back(Message::Task(task.0)),
                }
            }
            Err(back) => {
                assert!(!takes && !self.settings.fills(), "there is room for it");
                assert_eq!(back, tag);
            }
        }
    }

    /// Removes and returns the next result to deliver from those that are ready.
    fn take_ready(&mut self) -> u64 {
        let first = match self.settings.delivery {
            DeliveryOrder::InOrder => self.ready.iter().enumerate().min_by_key(|(_, task)| **task),
            DeliveryOrder::AsCompleted => self.ready.iter().enumerate().next(),
        };
        let (index, _) = first.expect("a result is ready");
        self.ready.remove(index)
    }

    /// Checks a decision of `next` against the window and the vacancies.
    fn check(&mut self, step: &Decision<u64, u64>) {
        if self.scheduler.is_staged() && self.staged.is_none() {
            self.staged = Some(self.take_ready());
        }
        if let Decision::Deliver { task, .. } | Decision::Raise { task, .. } = step {
            let next = self.staged.take().unwrap_or_else(|| self.take_ready());
            assert_eq!(task.0, next);
        }
        if self.scheduler.death().is_none() && !self.scheduler.resuming() {
            assert_eq!(self.held(), self.scheduler.outstanding() + self.ready.len());
            assert_eq!(self.scheduler.is_blocked(), !self.ready.is_empty());
            self.check_tasks();
        }
        let asks = *step == Decision::Submit;
        let replaces = matches!(step, Decision::Vacant(_) | Decision::Resend);
        assert!(matches!(step, Decision::Vacant(_)) || !self.is_vacancy_due(), "{step:?}");
        let is_unsent = self.processes.iter().any(|process| !process.unsent.is_empty());
        assert!(replaces || !is_unsent || self.scheduler.death().is_some(), "{step:?}");
        let is_open = match self.early {
            Some(_) => self.may_be_early(),
            None => self.has_room() && !self.sampler_ended && self.has_taker(),
        };
        match self.settings.fills() {
            true if replaces || *step == Decision::TimedOut || self.scheduler.resuming() => assert!(!asks),
            true => assert_eq!(asks, is_open && !self.sampler_failed, "{step:?}"),
            false => assert!(!asks || self.has_room(), "there is no room for a task"),
        }
    }

    /// Checks whether the next epoch may begin early, or become the current one.
    fn check_early(&mut self) {
        let (may_begin, may_take_up) = (self.may_be_early(), self.may_take_up());
        // The index batches of exhausted workers come first.
        assert!(!self.config.is_map_style() || self.scheduler.may_be_early() == may_begin);
        assert_eq!(self.scheduler.may_take_up(), may_take_up);
        assert!(may_begin && self.early.is_none() || self.scheduler.begin_early().is_err());
        assert!(may_take_up || self.scheduler.take_up().is_err());
        assert_eq!(self.scheduler.dispatched(), self.end() - self.epoch);
    }

    /// Checks which tasks each worker has to answer.
    fn check_tasks(&self) {
        for (worker, process) in (0..).map(WorkerId).zip(&self.processes) {
            let tasks = self.scheduler.tasks_of(worker).map(|(task, tag)| (task.0, *tag));
            assert!(tasks.eq(process.bound.iter().map(|task| (*task, *task))), "{worker:?}");
            assert_eq!(self.scheduler.oldest_task_of(worker), self.scheduler.tasks_of(worker).next());
            let is_counted =
                |task| Some(task) != self.staged && (!self.settings.fills() || !self.ready.contains(&task));
            let load = self.scheduler.undelivered().into_iter();
            let load = load.filter(|(task, holder)| *holder == Some(worker) && is_counted(task.0)).count();
            if self.settings.dispatch != Dispatch::SharedQueue && self.scheduler.is_active(worker) {
                assert_eq!(self.scheduler.load_of(worker), load);
            }
        }
    }

    /// Runs one step of waiting: a worker acts or dies, or time passes. Returns whether `next` must time out now.
    fn waited(&mut self, deadline: Option<Duration>) -> bool {
        let timeout = self.clock.filter(|_| self.config.timeout).map(|start| start + TIMEOUT);
        let dues = || self.processes.iter().filter(|process| process.vacant);
        assert!(deadline == timeout || dues().any(|process| process.due == deadline && deadline.is_some()));
        assert!(timeout.is_none_or(|timeout| deadline <= Some(timeout)));
        let needed = |process: &&Process| !process.bound.is_empty() && self.scheduler.death().is_none();
        let first = dues().filter(needed).filter_map(|process| process.due).min();
        assert!(first.is_none_or(|due| deadline.is_some_and(|deadline| deadline <= due)));
        match self.choice() {
            0..=9 if self.config.deaths => self.kill(),
            10..=40 => {
                self.pass_time(Duration::from_millis(30));
                let is_due = self.processes.iter().any(|process| process.vacant && process.due.is_none());
                return !is_due && timeout.is_some_and(|timeout| self.now >= timeout);
            }
            _ => {
                if !self.a_worker_acts() {
                    // No worker can act, so the wait must have a reason.
                    let due = next_due(&self.processes).expect("nothing ends this wait");
                    self.pass_time(due.saturating_sub(self.now));
                }
            }
        }
        false
    }

    /// Runs a user's call, which is repeated after a timeout.
    fn next(&mut self) -> Outcome {
        let mut must_time_out = false;
        self.clock = None;
        self.sampler_failed = false;
        loop {
            self.check_early();
            let step = self.scheduler.next(!self.sampler_failed);
            self.perform();
            self.check(&step);
            assert!(!must_time_out || step == Decision::TimedOut, "{step:?}");
            must_time_out = false;
            return match step {
                Decision::Submit => {
                    // The timeout applies to results only.
                    self.clock = None;
                    self.draw();
                    continue;
                }
                // The sampler's error is raised first, and the next call continues.
                Decision::End if std::mem::take(&mut self.sampler_failed) => continue,
                Decision::Wait(_) => {
                    self.a_worker_claims();
                    if self.clock.is_none() {
                        self.clock = Some(self.now);
                        self.event(Event::WaitBegan);
                    }
                    if self.choice() < 10 {
                        // A signal handler raises, and the user calls `next` again.
                        self.clock = None;
                        self.event(Event::WaitEnded);
                        continue;
                    }
                    must_time_out = self.waited(self.scheduler.deadline());
                    continue;
                }
                Decision::TimedOut => {
                    self.clock = None;
                    continue;
                }
                Decision::Vacant(death) => {
                    self.clock = None;
                    self.settle_vacancy(death);
                    continue;
                }
                Decision::Resend => {
                    self.clock = None;
                    self.resend();
                    continue;
                }
                Decision::Deliver { task, worker, tag, result } | Decision::Raise { task, worker, tag, result } => {
                    assert_eq!((tag, result), (task.0, task.0 * 3));
                    assert!(task.0 >= self.epoch, "a stale batch");
                    self.ended[task.0 as usize] += 1;
                    Outcome::Batch { task: task.0, worker: worker.index(), failed: task.0 % 5 == 3 }
                }
                Decision::Dead(Death { worker, lost }) => {
                    Outcome::Dead { worker: worker.index(), lost: lost.map(|task| task.0) }
                }
                Decision::End => Outcome::End,
                Decision::Shutdown => unreachable!(),
            };
        }
    }

    /// Returns the oldest result that has arrived and was not returned here yet.
    fn next_result(&mut self) -> Option<u64> {
        std::iter::from_fn(|| self.arrivals.pop_front()).find_map(|arrival| match arrival {
            Arrival::Result { task, .. } => Some(task),
            _ => None,
        })
    }

    fn begin_epoch(&mut self) {
        self.epoch = self.ended.len() as u64;
        self.indices = self.config.indices;
        self.sampler_ended = false;
        self.sent.clear();
        self.arrivals.clear();
        self.first = 0;
        if self.choice() < 100 {
            self.first = self.choice() as usize % self.config.workers;
            self.scheduler.begin_with(WorkerId(self.first as u32)).unwrap();
        }
        self.prime(0);
    }

    /// Submits tasks at the start of an epoch, of which `asked` index batches have been drawn.
    fn prime(&mut self, mut asked: usize) {
        while self.scheduler.primes(asked) {
            self.submit();
            asked += 1;
        }
        let fills = self.settings.fills() && !self.sampler_ended;
        let is_full = asked == self.scheduler.max_tasks();
        assert!(is_full || self.settings.fills());
        assert!(is_full || !fills || !self.has_room());
    }

    /// Makes the early epoch the current one.
    fn take_up(&mut self) {
        self.scheduler.take_up().unwrap();
        let early = self.early.take().unwrap();
        assert_eq!(self.scheduler.first_task(), TaskId(early.first));
        (self.epoch, self.indices, self.sampler_ended, self.first) = (early.first, early.indices, false, 0);
        (self.arrivals, self.ready, self.sent) = (early.arrivals, early.ready, early.sent);
        self.prime(self.scheduler.dispatched() as usize);
    }

    /// Runs the handshake of a persistent loader, which may be abandoned and repeated. Returns false if a death ends
    /// it.
    fn reset(&mut self) -> bool {
        self.epoch = self.ended.len() as u64;
        (self.ready, self.staged, self.early) = (Vec::new(), None, None);
        for process in &mut self.processes {
            (process.stale, process.bound) = (true, Vec::new());
            process.unsent.clear();
        }
        self.event(Event::EpochReset);
        self.clock = None;
        while self.scheduler.resuming() {
            self.a_worker_claims();
            assert_eq!(self.scheduler.submit(0), Err(0));
            if self.choice() < 10 && self.scheduler.death().is_none() {
                self.processes.iter_mut().for_each(|process| process.stale = true);
                self.event(Event::EpochReset);
                self.clock = None;
            }
            match self.scheduler.next(true) {
                Decision::Wait(deadline) => _ = self.waited(deadline),
                Decision::Vacant(death) => {
                    self.clock = None;
                    self.settle_vacancy(death);
                }
                Decision::Dead(Death { lost: None, .. }) => return false,
                other => panic!("{other:?} while resuming"),
            }
        }
        assert!(self.ended.iter().all(|count| *count == 1), "a task of an abandoned epoch is left");
        self.begin_epoch();
        true
    }
}

/// Returns when the next postponed vacancy is due.
fn next_due(processes: &[Process]) -> Option<Duration> {
    processes.iter().filter(|process| process.vacant).filter_map(|process| process.due).min()
}

fn run(config: &Config) {
    let settings = config.settings();
    let lengths = &config.lengths;
    let mut world = World {
        config,
        choices: config.choices.iter(),
        scheduler: Scheduler::new(settings.clone()).unwrap(),
        settings,
        queue: VecDeque::new(),
        ready: Vec::new(),
        staged: None,
        largest: 0,
        sampler_ended: false,
        sampler_failed: false,
        dead: Vec::new(),
        processes: lengths.iter().map(|&left| Process { left, ..Process::default() }).collect(),
        now: Duration::ZERO,
        clock: None,
        indices: 0,
        epoch: 0,
        first: 0,
        arrivals: VecDeque::new(),
        sent: Vec::new(),
        early: None,
        is_shut_down: false,
        ended: Vec::new(),
    };
    world.begin_epoch();
    let mut torch = Torch::new(config, 0, world.first);
    let (mut last, mut epochs, mut batches) = (None, 0, 0);
    loop {
        if config.eager {
            for _ in 0..world.choice() % 4 {
                world.a_worker_claims();
                world.a_worker_acts();
            }
            if config.restarts && world.choice() < 20 {
                world.kill();
            }
        }
        let before = world.arrivals.len();
        let outcome = world.next();
        if config.has_reference() {
            let arrivals = &mut world.arrivals;
            let has_waited = arrivals.len() > before;
            assert_eq!(outcome, torch.next(|| arrivals.pop_front().expect("torch would wait longer")));
            assert!(arrivals.is_empty() || !has_waited, "torch would have waited less");
            assert_eq!(world.sent, torch.sent);
        }
        let alive = match outcome {
            Outcome::Batch { task, .. } => {
                batches += 1;
                match world.settings.delivery {
                    DeliveryOrder::InOrder => assert!(last < Some(task)),
                    DeliveryOrder::AsCompleted if config.has_reference() => {}
                    DeliveryOrder::AsCompleted => assert_eq!(world.next_result(), Some(task)),
                }
                last = Some(task);
                if !config.persistent || world.choice() >= 10 || world.scheduler.death().is_some() {
                    continue;
                }
                true
            }
            Outcome::End => {
                assert_eq!((world.next(), world.scheduler.outstanding()), (Outcome::End, 0));
                assert!(world.may_end());
                assert!(!config.is_map_style() || (batches, world.indices) == (config.indices, 0));
                true
            }
            Outcome::Dead { worker, lost } => {
                assert!(!world.may_end());
                assert_eq!(Some((worker, lost)), world.first_lost());
                if world.settings.dispatch == Dispatch::SharedQueue {
                    let is_next = |task: &u64| last.max(world.epoch.checked_sub(1)) == task.checked_sub(1);
                    assert!(world.settings.delivery == DeliveryOrder::AsCompleted || !world.ready.iter().any(is_next));
                }
                if world.choice() < 128 {
                    world.a_worker_acts();
                }
                assert_eq!(world.next(), outcome);
                assert_eq!(world.scheduler.submit(0), Err(0));
                false
            }
        };
        (epochs, batches) = (epochs + 1, 0);
        if !config.persistent || epochs == 4 || !alive {
            break;
        }
        if world.may_take_up() && (!world.dead.is_empty() || world.choice() >= 50) {
            world.take_up();
        } else if !world.reset() {
            break;
        }
        torch = Torch::new(config, world.epoch, world.first);
    }
    if world.choice() < 128 {
        world.a_worker_acts();
    }
    world.is_shut_down = true;
    world.event(Event::Shutdown);
    assert_eq!((world.scheduler.next(true), world.scheduler.outstanding()), (Decision::Shutdown, 0));
    assert_eq!(world.scheduler.submit(0), Err(0));
    while world.a_worker_acts() {}
    assert!(world.ended.iter().all(|count| *count == 1), "each task ends once: {:?}", world.ended);
}

fn config() -> impl Strategy<Value = Config> {
    let dispatch = prop_oneof![Just(Dispatch::RoundRobin), Just(Dispatch::FairShare), Just(Dispatch::SharedQueue)];
    let window = (1_usize..40, proptest::option::of(0_u64..400));
    let window = proptest::option::weighted(0.8, window.prop_map(|(batches, bytes)| Window { batches, bytes }));
    let delivery = prop_oneof![Just(DeliveryOrder::InOrder), Just(DeliveryOrder::AsCompleted)];
    let free = (dispatch, delivery, window);
    let free = free.prop_map(|(dispatch, delivery, window)| Free { dispatch, delivery, window });
    let shape = (1_usize..7, 1_usize..4, any::<[bool; 8]>(), 0_usize..40, proptest::option::of(free));
    shape.prop_flat_map(|(workers, prefetch, flags, indices, free)| {
        let [in_order, persistent, timeout, iterable, eager, deaths, restarts, overlaps] = flags;
        let is_shared = free.as_ref().is_some_and(|free| free.dispatch == Dispatch::SharedQueue);
        let iterable = iterable && !is_shared;
        let longest = if iterable { 12_usize } else { 0 };
        let overlaps = overlaps && !iterable && !restarts;
        let persistent = persistent || overlaps;
        let lengths = proptest::collection::vec(0_usize..=longest, workers);
        (lengths, proptest::collection::vec(any::<u8>(), 0..400)).prop_map(move |(lengths, choices)| Config {
            free: free.clone(),
            workers,
            prefetch,
            in_order,
            persistent,
            timeout,
            indices: if iterable { 1_000 } else { indices },
            lengths: if iterable { lengths } else { vec![usize::MAX; workers] },
            eager,
            deaths,
            restarts,
            overlaps,
            choices,
        })
    })
}

proptest! {
    #![proptest_config(common::model_config(20_000))]

    #[test]
    fn the_scheduler_matches_torch_and_keeps_its_invariants(config in config()) {
        run(&config);
    }
}
