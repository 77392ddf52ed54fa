use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::format::{INDEX, flag, word};
use super::*;
use crate::error::Error;

const LIMIT: u64 = 1 << 20;

fn bytes(cache: &Cache, row: u64) -> Option<Vec<u8>> {
    match cache.lookup(row) {
        Lookup::Whole(record) => Some(record.copy(0, usize::MAX)),
        _ => None,
    }
}

/// Returns an unnamed file of `len` bytes, which stands in for a file on a disk.
fn file(len: u64) -> File {
    let fd = crate::sys::memfd::create("rustloader-test", len).unwrap();
    File::from(fd)
}

fn copy_of(file: &File) -> OwnedFd {
    file.as_fd().try_clone_to_owned().unwrap()
}

#[test]
fn a_record_is_absent_and_then_whole() {
    let cache = Cache::create(10, LIMIT).unwrap();
    assert_eq!(cache.lookup(3), Lookup::Absent);
    assert_eq!(cache.put(3, &[b"hel", b"lo"]).unwrap(), Put::Stored);
    assert_eq!(bytes(&cache, 3).as_deref(), Some(&b"hello"[..]));
    assert_eq!(cache.put(3, &[b"other"]).unwrap(), Put::Known);
    assert_eq!(bytes(&cache, 3).as_deref(), Some(&b"hello"[..]));
    assert_eq!(cache.put(4, &[]).unwrap(), Put::Stored);
    assert_eq!(bytes(&cache, 4).as_deref(), Some(&b""[..]));
    let large = vec![7; 200_000];
    assert_eq!(cache.put(9, &[b"x", &large, &large]).unwrap(), Put::Stored);
    assert_eq!(bytes(&cache, 9).unwrap(), [b"x".as_slice(), &large, &large].concat());
    cache.count_hits(3);
    cache.count_misses(1);
    let usage = cache.usage();
    assert_eq!((usage.hits, usage.misses, usage.unused), (3, 1, 0));
    assert_eq!(usage.stored, 24 + 16 + (16 + 400_001 + 7));
    assert_eq!(usage.left, LIMIT - Cache::overhead(10) - usage.stored);
}

#[test]
fn a_row_whose_sample_cannot_be_kept_stays_marked() {
    let cache = Cache::create(2, LIMIT).unwrap();
    cache.never(1);
    assert_eq!(cache.lookup(1), Lookup::Never);
    assert_eq!(cache.put(1, &[b"x"]).unwrap(), Put::Known);
    cache.never(1);
    assert_eq!((cache.usage().refused, cache.usage().stored), (1, 0));
}

#[test]
fn a_full_cache_keeps_what_it_has() {
    let cache = Cache::create(100, Cache::overhead(100) + 1000).unwrap();
    let put = |row| cache.put(row, &[&[row as u8; 290]]).unwrap();
    assert_eq!([put(0), put(1), put(2)], [Put::Stored; 3]);
    assert_eq!(put(3), Put::Closed(true));
    assert_eq!(put(4), Put::Closed(false));
    assert_eq!(cache.closed(), Closed::Full);
    assert_eq!(bytes(&cache, 2).unwrap(), [2; 290]);
    assert_eq!(bytes(&cache, 3), None);
    assert_eq!(cache.usage().left, 1000 - 3 * 312);
}

#[test]
fn probes_and_events_come_once() {
    let cache = Cache::create(250, LIMIT).unwrap();
    assert_eq!((0..10).filter(|_| cache.take_probe()).count(), 3);
    assert!(cache.first_time(1) && !cache.first_time(1) && cache.first_time(2));
    assert!(cache.has_happened(2) && !cache.has_happened(4));
}

#[test]
fn another_process_opens_it_by_its_descriptor() {
    let cache = Cache::create(10, LIMIT).unwrap();
    let other = Cache::open(cache.fd().unwrap().try_clone_to_owned().unwrap(), 0).unwrap();
    other.put(5, &[b"five"]).unwrap();
    assert_eq!(bytes(&cache, 5).as_deref(), Some(&b"five"[..]));
    assert_eq!((other.rows(), other.limit()), (10, LIMIT));
}

#[test]
fn other_files_are_refused() {
    for file in [file(0), file(100), file(1 << 16), File::open("/proc/self/exe").unwrap()] {
        assert_eq!(Head::read(file.as_fd()).ok().flatten(), None);
        assert!(Cache::open(file.into(), 0).is_err());
    }
    assert!(matches!(Cache::create(1 << 40, LIMIT), Err(Error::Usage { .. })));
    assert!(matches!(Cache::format(file(LIMIT).as_fd(), 1, LIMIT, &[0; 4000]), Err(Error::Usage { .. })));
}

#[test]
fn a_file_is_used_again() {
    let file = file(LIMIT);
    Cache::format(file.as_fd(), 10, LIMIT, b"a dataset").unwrap();
    let cache = Cache::open_file(copy_of(&file), LIMIT, 1).unwrap();
    cache.put(1, &[b"one"]).unwrap();
    cache.count_misses(1);
    drop(cache);
    let head = Head::read(file.as_fd()).unwrap().unwrap();
    assert_eq!(
        head,
        Head { version: VERSION, rows: 10, limit: LIMIT, meta: b"a dataset".to_vec(), flags: flag::LASTING }
    );
    let cache = Cache::open_file(copy_of(&file), LIMIT, 1).unwrap();
    assert_eq!(bytes(&cache, 1).as_deref(), Some(&b"one"[..]));
    assert_eq!(cache.usage().stored, 24);
    // The processes of an opening share its counts.
    let other = Cache::open_file(copy_of(&file), LIMIT, 2).unwrap();
    let child = Cache::open(copy_of(&file), other.opening()).unwrap();
    child.count_hits(3);
    let counts = |usage: Usage| [usage.hits, usage.misses, usage.lifetime_hits, usage.lifetime_misses];
    assert_eq!([&cache, &other, &child].map(|it| counts(it.usage())), [[0, 1, 3, 1], [3, 0, 3, 1], [3, 0, 3, 1]]);
}

#[test]
fn a_batch_is_written_together_or_as_far_as_there_is_room() {
    let batch_of = |rows: &[u64]| {
        let mut batch = Batch::default();
        for row in rows {
            assert!(batch.push(*row, |bytes| {
                bytes.extend_from_slice(&[*row as u8; 290]);
                true
            }));
            assert!(!batch.push(*row, |bytes| {
                bytes.push(9);
                false
            }));
        }
        batch
    };
    let cache = Cache::create(100, Cache::overhead(100) + 312 * 8 + 100).unwrap();
    cache.put(2, &[b"two"]).unwrap();
    assert!(!cache.put_all(&mut batch_of(&[])).unwrap());
    assert!(!cache.put_all(&mut batch_of(&[1, 2, 3])).unwrap());
    assert_eq!([1, 2, 3].map(|row| bytes(&cache, row).unwrap()), [vec![1; 290], b"two".to_vec(), vec![3; 290]]);
    assert_eq!((cache.usage().stored, cache.usage().unused), (24 + 2 * 312, 312));
    // Another process has stored all of them.
    let left = cache.usage().left;
    assert!(!cache.put_all(&mut batch_of(&[1, 3])).unwrap());
    assert_eq!(cache.usage().left, left);
    let mut batch = batch_of(&(4..14).collect::<Vec<_>>());
    assert!(cache.put_all(&mut batch).unwrap());
    assert_eq!((batch.size(), cache.closed()), (0, Closed::Full));
    assert_eq!((4..14).filter(|row| bytes(&cache, *row) == Some(vec![*row as u8; 290])).count(), 5);
    assert!(!cache.put_all(&mut batch_of(&[20])).unwrap());
}

#[test]
fn damaged_records_of_a_file_are_made_again() {
    let file = formatted(10);
    let open = || Cache::open_file(copy_of(&file), LIMIT, 1).unwrap();
    let cache = open();
    for row in 0..10 {
        cache.put(row, &[&[row as u8; 100]]).unwrap();
    }
    let (heap, index) = (Cache::overhead(10), INDEX);
    let write = |bytes: &[u8], at| crate::sys::sealed::write_at(file.as_fd(), bytes, at).unwrap();
    // Lost bytes, a wrong length, a wrong position, and another row's record.
    write(&[9], heap + 120 + 16 + 50);
    write(&200_u64.to_ne_bytes(), heap + 2 * 120);
    write(&3_u64.to_ne_bytes(), index + 3 * 8);
    write(&(heap + 5 * 120).to_ne_bytes(), index + 4 * 8);
    let cache = open();
    for row in 0..10 {
        let expected = (!(1..=4).contains(&row)).then(|| vec![row as u8; 100]);
        assert_eq!(bytes(&cache, row), expected, "row {row}");
    }
    assert_eq!(cache.usage().damaged, 4);
    assert_eq!(cache.put(1, &[b"new"]).unwrap(), Put::Stored);
    assert_eq!(bytes(&open(), 1).as_deref(), Some(&b"new"[..]));
}

#[test]
fn after_a_crash_of_the_machine_no_record_is_overwritten() {
    let file = formatted(10);
    let cache = Cache::open_file(copy_of(&file), LIMIT, 1).unwrap();
    cache.put(0, &[b"zero"]).unwrap();
    cache.put(1, &[b"one"]).unwrap();
    // After the crash, the header's page is older than that of the index.
    let write = |word: usize, value: u64| {
        crate::sys::sealed::write_at(file.as_fd(), &value.to_ne_bytes(), word as u64 * 8).unwrap();
    };
    write(word::END, Cache::overhead(10));
    write(word::BOOT, 1);
    let cache = Cache::open_file(copy_of(&file), LIMIT, 1).unwrap();
    cache.put(2, &[b"two"]).unwrap();
    let records: Vec<_> = (0..3).map(|row| bytes(&cache, row).unwrap()).collect();
    assert_eq!(records, [b"zero".to_vec(), b"one".to_vec(), b"two".to_vec()]);
    // Nor is the number of an opening that has stored a record given again.
    write(word::OPENED, 0);
    write(word::BOOT, 1);
    assert_eq!(Cache::open_file(copy_of(&file), LIMIT, 7).unwrap().opening(), 2);
}

#[test]
fn a_larger_limit_opens_a_full_file() {
    // Ends in the second record.
    let small = Cache::overhead(10) + 112 + 40;
    let file = file(LIMIT);
    Cache::format(file.as_fd(), 10, small, b"").unwrap();
    let cache = Cache::open_file(copy_of(&file), LIMIT, 1).unwrap();
    assert_eq!(cache.put(0, &[&[1; 90]]).unwrap(), Put::Stored);
    assert_eq!(cache.put(1, &[&[1; 90]]).unwrap(), Put::Closed(true));
    cache.grow(LIMIT);
    let larger = Cache::open_file(copy_of(&file), LIMIT, 1).unwrap();
    assert_eq!(larger.put(1, &[&[1; 90]]).unwrap(), Put::Stored);
    assert_eq!(larger.put(2, &[&[2; 90]]).unwrap(), Put::Stored);
    // The cache is full for the program with the old limit, but the file is not.
    assert_eq!(cache.put(3, &[&[3; 90]]).unwrap(), Put::Closed(false));
    assert_eq!(larger.closed(), Closed::Open);
    // That program does not see records beyond its limit, and does not count them as damaged.
    for row in [1, 2] {
        assert_eq!(bytes(&cache, row), None);
        assert_eq!((bytes(&larger, row), larger.usage().damaged), (Some(vec![row as u8; 90]), 0));
    }
}

#[test]
fn threads_fill_one_table() {
    const ROWS: u64 = 2000;
    let cache = Arc::new(Cache::create(ROWS, 1 << 22).unwrap());
    let content = |row: u64| row.to_le_bytes().repeat(1 + row as usize % 60);
    let fill = |start: u64| {
        let cache = Arc::clone(&cache);
        move || {
            for row in (0..ROWS).map(|row| (row + start) % ROWS) {
                match cache.lookup(row) {
                    Lookup::Whole(record) => assert_eq!(record.copy(0, usize::MAX), content(row)),
                    _ => drop(cache.put(row, &[&content(row)]).unwrap()),
                }
            }
        }
    };
    let threads: Vec<_> = [0, 0, 0, ROWS / 2].map(fill).into_iter().map(std::thread::spawn).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    for row in 0..ROWS {
        assert_eq!(bytes(&cache, row).unwrap(), content(row));
    }
    let usage = cache.usage();
    let stored: u64 = (0..ROWS).map(|row| 16 + content(row).len() as u64).sum();
    assert_eq!(usage.stored, stored);
}

#[test]
fn truncated_records_are_absent_and_their_space_is_reused() {
    let file = formatted(10);
    let cache = Cache::open_file(copy_of(&file), LIMIT, 1).unwrap();
    for row in 0..9 {
        cache.put(row, &[&[row as u8; 100]]).unwrap();
    }
    assert_eq!(cache.put(9, &[&vec![0; LIMIT as usize]]).unwrap(), Put::Closed(true));
    cache.never(9);
    let whole = Cache::overhead(10) + 5 * 120 + 50;
    let cut = Cache::open_file(copy_of(&file), whole, 1).unwrap();
    assert_eq!((0..10).filter(|row| bytes(&cut, *row).is_some()).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!((cut.usage().stored, cut.usage().unused, cut.usage().refused), (5 * 120, 0, 0));
    cut.reopen();
    assert_eq!(cut.put(9, &[b"new"]).unwrap(), Put::Stored);
}

/// Returns a file with an empty table of `rows` rows.
fn formatted(rows: u64) -> File {
    let file = file(LIMIT);
    Cache::format(file.as_fd(), rows, LIMIT, b"").unwrap();
    file
}

/// Returns a file with the records of one opening, in `rows` rows with these contents.
fn filled(rows: u64, content: impl Fn(u64) -> Vec<u8>) -> File {
    let file = formatted(rows);
    let writer = Cache::open_file(copy_of(&file), LIMIT, 1).unwrap();
    for row in 0..rows {
        writer.put(row, &[&content(row)]).unwrap();
        assert!(matches!(writer.lookup(row), Lookup::Whole(_)));
    }
    file
}

/// Reads rows in order and compares those that are due, which are equal. Returns these rows.
fn compared(cache: &Cache, rows: impl Iterator<Item = u64>, nanoseconds: u64) -> Vec<u64> {
    let is_due = |row: &u64| match cache.lookup(*row) {
        Lookup::Due(_) => {
            cache.compared(*row, true, nanoseconds);
            assert!(matches!(cache.lookup(*row), Lookup::Whole(_)));
            true
        }
        found => !matches!(found, Lookup::Whole(_)),
    };
    rows.filter(is_due).collect()
}

#[test]
fn records_of_another_opening_are_compared_in_all_parts_of_the_table() {
    let file = filled(1000, |row| row.to_le_bytes().to_vec());
    let open = |token| Cache::open_file(copy_of(&file), LIMIT, token).unwrap();
    let cache = open(2);
    assert_eq!(compared(&cache, 0..1000, 0), [0, 1, 125, 250, 375, 500, 625, 750]);
    // Other processes of the opening repeat none of the comparisons, another opening makes its own.
    let fork = Cache::open(copy_of(&file), cache.opening()).unwrap();
    assert!(compared(&fork, 0..1000, 0).is_empty());
    assert!(compared(&open(2), 0..1000, 0).is_empty());
    assert_eq!(compared(&open(3), 0..1000, 0).len(), 8);
    // A process that does not know its opening makes its own.
    assert_eq!(compared(&Cache::open(copy_of(&file), 0).unwrap(), 0..1000, 0).len(), 8);
    // A small table needs fewer. The time counts only from the third on.
    let small = filled(40, |row| row.to_le_bytes().to_vec());
    let open = Cache::open_file(copy_of(&small), LIMIT, 2).unwrap();
    assert_eq!(compared(&open, 0..40, 1 << 40), [0, 1]);
    assert_eq!(compared(&Cache::open_file(copy_of(&file), LIMIT, 4).unwrap(), 0..1000, 1 << 40), [0, 1]);
}

#[test]
fn equal_records_are_compared_once() {
    let file = filled(1000, |row| if row < 300 { vec![] } else { row.to_le_bytes().to_vec() });
    let cache = Cache::open_file(copy_of(&file), LIMIT, 2).unwrap();
    assert_eq!(compared(&cache, 0..1000, 0), [0, 300, 375, 500, 625, 750, 875]);
    // Two threads compare such records at the same time.
    let cache = Cache::open_file(copy_of(&file), LIMIT, 3).unwrap();
    [0, 200].iter().for_each(|row| cache.compared(*row, true, 1 << 40));
    assert_eq!(compared(&cache, 0..1000, 1 << 40), [300]);
}

#[test]
fn each_of_many_writers_is_compared() {
    let file = formatted(4000);
    let open = |token| Cache::open_file(copy_of(&file), LIMIT, token).unwrap();
    let openings: Vec<_> = (1..=80).map(open).collect();
    for row in 0..4000 {
        openings[row as usize % 80].put(row, &[&row.to_le_bytes()]).unwrap();
    }
    let cache = open(100);
    let mut of_writer = [0; 80];
    for row in 0..4000 {
        if let Lookup::Due(_) = cache.lookup(row) {
            cache.compared(row, true, 0);
            of_writer[row as usize % 80] += 1;
        }
    }
    // Beyond the words of the file and of the process, every record is compared.
    assert!(of_writer.iter().all(|&number| number >= 2), "{of_writer:?}");
    assert!(of_writer[..30].iter().all(|&number| number <= 8), "{of_writer:?}");
}

#[test]
fn after_a_difference_every_record_is_due() {
    let file = filled(1000, |row| row.to_le_bytes().to_vec());
    let cache = Cache::open_file(copy_of(&file), LIMIT, 2).unwrap();
    let child = Cache::open(copy_of(&file), cache.opening()).unwrap();
    assert_eq!(compared(&cache, 0..1000, 0).len(), 8);
    child.compared(700, false, 0);
    for cache in [cache, child] {
        assert_eq!(cache.differing_row(), Some(700));
        assert!((0..1000).all(|row| matches!(cache.lookup(row), Lookup::Due(_))));
    }
    let other = Cache::open_file(copy_of(&file), LIMIT, 3).unwrap();
    assert_eq!((other.differing_row(), compared(&other, 0..1000, 0).len()), (None, 8));
}

#[test]
fn each_writer_is_compared_and_many_openings_replace_the_oldest() {
    let file = formatted(900);
    let open = |token| Cache::open_file(copy_of(&file), LIMIT, token).unwrap();
    let openings: Vec<_> = (1..=90).map(open).collect();
    assert_eq!(openings.iter().map(Cache::opening).collect::<Vec<_>>(), (1..=90).collect::<Vec<_>>());
    for row in 0..900 {
        openings[row as usize % 3].put(row, &[&row.to_le_bytes()]).unwrap();
    }
    // Of the two other writers, 8 records each. The words of the first opening are those of a later one.
    for cache in [&openings[0], &openings[2], &openings[88]] {
        let expected = if cache.opening() == 89 { 24 } else { 16 };
        assert_eq!(compared(cache, 0..900, 0).len(), expected);
        assert!(compared(cache, 0..900, 0).is_empty());
    }
    assert_eq!(compared(&openings[89], 0..900, 0).len(), 24);
}
