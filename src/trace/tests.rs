use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::config::TRACE_SLOTS;
use crate::shm::arena::Arena;
use crate::shm::caretaker::{self, Duty};
use crate::shm::layout::{MainState, NOT_BEGUN, WorkerState};
use crate::sys::memfd;

type Record = [u64; 5];

fn file() -> (OwnedFd, File) {
    let fd = memfd::create("trace", 0).unwrap();
    let file = File::from(fd.try_clone().unwrap());
    (fd, file)
}

/// Returns the records in the first `len` bytes.
fn records(file: &mut File, len: u64) -> Vec<Record> {
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.take(len).read_to_end(&mut bytes).unwrap();
    let (words, tail) = bytes.as_chunks::<8>();
    assert!(tail.is_empty() && words.len().is_multiple_of(5));
    words.chunks(5).map(|words| std::array::from_fn(|at| u64::from_le_bytes(words[at]))).collect()
}

fn first(source: u64, who: u32, kind: Kind) -> u64 {
    source << 32 | u64::from(who) << 8 | u64::from(kind as u32)
}

fn event(kind: Kind, begin: u64, number: u64) -> Event {
    Event { kind, who: 1, begin, length: 5, number, extra: 0 }
}

#[test]
fn the_states_of_a_worker_have_their_numbers() {
    use WorkerState as State;
    let states = [State::Starting, State::Idle, State::Fetch, State::Collate, State::Pack];
    assert!(states.iter().all(|state| Kind::of_state(*state, false).unwrap() as u32 == *state as u32));
    assert_eq!(Kind::Publish as u32, State::Publish as u32);
    assert_eq!([State::Publish, State::Left].map(|state| Kind::of_state(state, false)), [None, None]);
    let names = Kind::names();
    assert_eq!((names[Kind::Fetch as usize], names.last()), ("fetch", Some(&"copy")));
}

#[test]
fn an_entry_is_read_as_it_was_written_and_any_words_are_none_or_an_event() {
    let event = event(Kind::Sample, 7, 8);
    assert_eq!(Event::of_entry(&event.to_entry(), 1), Some(event));
    assert_eq!(Event::of_entry(&[u64::MAX; 8], 1), None);
    assert_eq!(Event::of_entry(&[1 << 32; 8], 1), None);
}

#[test]
fn workers_record_only_while_a_trace_is_on() {
    let arena = Arena::create_sized(1 << 30, 2, 4).unwrap();
    let (source, recorder) = (Source::new(arena.clone()), Recorder::new(arena.clone(), 1));
    assert!(!recorder.is_on() && !source.is_on());
    source.mark(Kind::Died, 0, 1, 0);
    let (fd, mut read) = file();
    let sink = Arc::new(Sink::new(vec![fd], 0));
    source.begin(sink.clone(), 3, 1, (100, 2)).unwrap();
    assert!(recorder.is_on() && !recorder.has_samples() && source.is_on());
    recorder.spent(WorkerState::Fetch, (1000, 20), 101, false);
    recorder.spent(WorkerState::Collate, (1020, 1), 101, true);
    recorder.published((1021, 2), 101);
    recorder.spent(WorkerState::Publish, (1021, 3), 101, false);
    recorder.spent(WorkerState::Left, (1024, 1), 101, false);
    source.slice(Kind::Step, MAIN, Duration::from_nanos(5), Duration::from_nanos(9), 0);
    source.end();
    assert!(!recorder.is_on() && !source.is_on());
    source.slice(Kind::Step, MAIN, Duration::ZERO, Duration::ZERO, 0);
    let (lost, files) = sink.end();
    assert_eq!((lost, files.len()), (0, 1));
    let recorded = records(&mut read, files[0].1);
    assert_eq!((recorded[0][0], &recorded[0][3..]), (first(3, MAIN, Kind::Epoch), &[100, 2][..]));
    let expected = [
        [first(3, MAIN, Kind::Step), 5, 4, 0, 0],
        [first(3, 1, Kind::Fetch), 1000, 20, 101, 0],
        [first(3, 1, Kind::Replay), 1020, 1, 101, 0],
        [first(3, 1, Kind::Publish), 1021, 2, 101, 0],
    ];
    assert_eq!(recorded[1..], expected);
}

#[test]
fn a_sample_lasts_until_the_next_and_one_that_fails_is_left_out() {
    let arena = Arena::create_sized(1 << 30, 1, 4).unwrap();
    let (source, recorder) = (Source::new(arena.clone()), Recorder::new(arena.clone(), 0));
    let (fd, mut read) = file();
    let sink = Arc::new(Sink::new(vec![fd], 0));
    source.begin(sink.clone(), 0, 2, (0, 1)).unwrap();
    assert!(recorder.has_samples());
    for (index, now) in [(Some(7), 10), (Some(8), 12), (None, 15), (Some(9), 20)] {
        recorder.sample(index, now, 4);
    }
    recorder.spent(WorkerState::Fetch, (9, 20), 4, false);
    recorder.sample(None, 30, 4);
    source.end();
    let recorded = records(&mut read, sink.end().1[0].1);
    let sample = first(0, 0, Kind::Sample);
    assert_eq!(recorded[1..3], [[sample, 10, 2, 4, 7], [sample, 12, 3, 4, 8]]);
    assert_eq!(recorded[3][0], first(0, 0, Kind::Fetch));
    assert_eq!(recorded.len(), 4);
}

#[test]
fn events_that_a_full_ring_loses_are_counted_and_the_next_trace_begins_empty() {
    let arena = Arena::create_sized(1 << 30, 1, 4).unwrap();
    let (source, recorder) = (Source::new(arena.clone()), Recorder::new(arena.clone(), 0));
    for round in 0..3 {
        let (fd, mut read) = file();
        let sink = Arc::new(Sink::new(vec![fd], 0));
        source.begin(sink.clone(), 0, 1, (0, 1)).unwrap();
        let events = u64::from(TRACE_SLOTS) + round;
        (0..events).for_each(|at| recorder.spent(WorkerState::Idle, (at, 1), round, false));
        source.end();
        // A worker may be about to record an event when a trace ends.
        recorder.spent(WorkerState::Idle, (0, 1), 99, false);
        let (lost, files) = sink.end();
        let recorded = records(&mut read, files[0].1);
        assert_eq!((lost, recorded.len() as u32), (round, 1 + TRACE_SLOTS));
        assert!(recorded[1..].iter().all(|words| words[3] == round));
    }
}

#[test]
fn the_death_of_a_worker_ends_its_state() {
    let arena = Arena::create_sized(1 << 30, 1, 4).unwrap();
    let source = Source::new(arena.clone());
    let (fd, mut read) = file();
    let sink = Arc::new(Sink::new(vec![fd], 0));
    source.begin(sink.clone(), 0, 1, (0, 1)).unwrap();
    let page = &arena.control(0).status;
    page.state.store(WorkerState::Collate as u32, crate::sync::Ordering::Relaxed);
    page.since_ns.store(77, crate::sync::Ordering::Relaxed);
    page.task.store(5, crate::sync::Ordering::Relaxed);
    source.died(0);
    source.end();
    let recorded = records(&mut read, sink.end().1[0].1);
    assert_eq!((recorded[1][0], recorded[1][1], recorded[1][3]), (first(0, 0, Kind::Collate), 77, 5));
    assert_eq!((recorded[2][0], recorded[2][3]), (first(0, 0, Kind::Died), 5));
}

#[test]
fn two_files_take_turns_and_each_knows_the_epoch() {
    let ((one, mut read_one), (two, mut read_two)) = (file(), file());
    let sink = Sink::new(vec![one, two], 100);
    sink.put(0, event(Kind::Epoch, 1, 0));
    (0..100).for_each(|at| sink.put(0, event(Kind::Next, 10 * at, at)));
    let (lost, files) = sink.end();
    assert_eq!(lost, 0);
    let mut kept = Vec::new();
    for (number, len) in files {
        let recorded = records(if number == 0 { &mut read_one } else { &mut read_two }, len);
        assert_eq!(recorded[0][0], first(0, 1, Kind::Epoch));
        kept.extend(recorded[1..].iter().map(|words| words[1]));
    }
    // The files hold at least the events of the last 100 ns, in order, and hardly more than those of two turns.
    assert!(kept.is_sorted_by(|a, b| a + 10 == *b) && kept.last() == Some(&990));
    assert!((11..=24).contains(&kept.len()), "{kept:?}");
    sink.put(0, event(Kind::Next, 1, 1));
    assert_eq!(sink.end().1.iter().map(|(_, len)| len / 40).sum::<u64>() as usize, kept.len() + 2);
}

#[test]
fn events_that_cannot_be_written_are_counted() {
    let sink = Sink::new(vec![OwnedFd::from(File::open("/proc/self/exe").unwrap())], 0);
    (0..3).for_each(|at| sink.put(0, event(Kind::Next, at, at)));
    sink.count_lost(4);
    assert_eq!(sink.end(), (7, vec![(0, 0)]));
}

#[test]
fn events_are_written_before_the_end_and_so_are_activities_that_last() {
    let arena = Arena::create_sized(1 << 30, 2, 4).unwrap();
    let (source, recorder) = (Arc::new(Source::new(arena.clone())), Recorder::new(arena.clone(), 1));
    let ((fd, mut read), (unfinished, mut read_unfinished)) = (file(), file());
    let spooler = Spooler::new(vec![fd], unfinished, 0);
    // This test writes instead of the thread.
    caretaker::stop(Duty::Trace);
    spooler.follow(&source, 3, 1, (0, 1)).unwrap();
    recorder.spent(WorkerState::Fetch, (10, 5), 7, false);
    let relaxed = crate::sync::Ordering::Relaxed;
    let main = &arena.header().main;
    main.state.store(MainState::Waiting as u32, relaxed);
    main.since_ns.store(20, relaxed);
    main.wait_since_ns.store(21, relaxed);
    // Worker 0 has not started yet.
    let page = &arena.control(1).status;
    page.since_ns.store(15, relaxed);
    page.task.store(7, relaxed);
    page.state.store(WorkerState::Collate as u32, relaxed);
    page.place.store(NOT_BEGUN, relaxed);
    spooler.begin(4, event(Kind::Fetch, 30, 2));
    assert!(spooler.write_out().is_some());
    assert_eq!(records(&mut read, u64::MAX)[1], [first(3, 1, Kind::Fetch), 10, 5, 7, 0]);
    let mut all = Vec::new();
    read_unfinished.rewind().unwrap();
    read_unfinished.read_to_end(&mut all).unwrap();
    let words: Vec<u64> = all.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let (now, listed) = (words[0], words[2..].chunks(5));
    assert_eq!(words[1], listed.len() as u64);
    let expected = [
        (first(4, 1, Kind::Fetch), 30, 2),
        (first(3, MAIN, Kind::Waiting), 21, 0),
        (first(3, MAIN, Kind::Next), 20, 0),
        (first(3, 1, Kind::Replay), 15, 7),
    ];
    assert!(listed.clone().all(|words| words[1] + words[2] == now));
    assert_eq!(listed.map(|words| (words[0], words[1], words[3])).collect::<Vec<_>>(), expected);
    spooler.put(4, event(Kind::Fetch, 30, 2));
    source.end();
    assert!(spooler.write_out().is_some());
    read_unfinished.rewind().unwrap();
    let mut head = [0; 16];
    read_unfinished.read_exact(&mut head).unwrap();
    assert_eq!(head[8..], [0; 8]);
    spooler.end();
    assert_eq!(spooler.write_out(), None);
}

#[test]
fn events_that_the_thread_does_not_write_are_written_with_a_later_one() {
    let (fd, mut read) = file();
    let sink = Sink::new(vec![fd], 0);
    sink.put(0, event(Kind::Step, 1, 0));
    sink.put(0, event(Kind::Step, 10, 0));
    assert!(records(&mut read, u64::MAX).is_empty());
    sink.put(0, event(Kind::Step, 1_000_000_000, 0));
    assert_eq!(records(&mut read, u64::MAX).len(), 3);
}
