//! What files contain, and what is lost. `test_trace.py` has the events of whole programs.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::config::TRACE_SLOTS;
use crate::shm::arena::Arena;
use crate::shm::layout::WorkerState;
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
fn events_that_the_thread_does_not_write_are_written_with_a_later_one() {
    let (fd, mut read) = file();
    let sink = Sink::new(vec![fd], 0);
    sink.put(0, event(Kind::Step, 1, 0));
    sink.put(0, event(Kind::Step, 10, 0));
    assert!(records(&mut read, u64::MAX).is_empty());
    sink.put(0, event(Kind::Step, 1_000_000_000, 0));
    assert_eq!(records(&mut read, u64::MAX).len(), 3);
}
