use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::format::{HEADER, word};
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
    let cache = Cache::create(10, LIMIT, b"meta").unwrap();
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
    assert_eq!(usage.stored, 16 + 8 + (8 + 400_001 + 7));
    assert_eq!(usage.left, LIMIT - Cache::overhead(10) - usage.stored);
}

#[test]
fn a_row_whose_sample_cannot_be_kept_stays_marked() {
    let cache = Cache::create(2, LIMIT, b"").unwrap();
    cache.never(1);
    assert_eq!(cache.lookup(1), Lookup::Never);
    assert_eq!(cache.put(1, &[b"x"]).unwrap(), Put::Known);
    cache.never(1);
    assert_eq!((cache.usage().refused, cache.usage().stored), (1, 0));
}

#[test]
fn a_full_cache_keeps_what_it_has() {
    let cache = Cache::create(100, Cache::overhead(100) + 1000, b"").unwrap();
    let put = |row| cache.put(row, &[&[row as u8; 290]]).unwrap();
    assert_eq!([put(0), put(1), put(2)], [Put::Stored; 3]);
    assert_eq!(put(3), Put::Closed(true));
    assert_eq!(put(4), Put::Closed(false));
    assert_eq!(cache.closed(), Closed::Full);
    assert_eq!(bytes(&cache, 2).unwrap(), [2; 290]);
    assert_eq!(bytes(&cache, 3), None);
    assert_eq!(cache.usage().left, 1000 - 3 * 304);
}

#[test]
fn probes_and_news_come_once() {
    let cache = Cache::create(250, LIMIT, b"").unwrap();
    assert_eq!((0..10).filter(|_| cache.take_probe()).count(), 3);
    assert!(cache.is_news(1) && !cache.is_news(1) && cache.is_news(2));
}

#[test]
fn another_process_opens_it_by_its_descriptor() {
    let cache = Cache::create(10, LIMIT, b"").unwrap();
    let other = Cache::open(cache.fd().unwrap().try_clone_to_owned().unwrap(), true).unwrap();
    other.put(5, &[b"five"]).unwrap();
    assert_eq!(bytes(&cache, 5).as_deref(), Some(&b"five"[..]));
    assert_eq!((other.rows(), other.limit()), (10, LIMIT));
}

#[test]
fn other_files_are_refused() {
    for file in [file(0), file(100), file(1 << 16), File::open("/proc/self/exe").unwrap()] {
        assert_eq!(Cache::head(file.as_fd()).ok().flatten(), None);
        assert!(Cache::open(file.into(), false).is_err());
    }
    assert!(matches!(Cache::create(1 << 40, LIMIT, b""), Err(Error::Usage { .. })));
    assert!(matches!(Cache::create(1, LIMIT, &[0; 4000]), Err(Error::Usage { .. })));
}

#[test]
fn a_file_is_used_again() {
    let file = file(LIMIT);
    Cache::format(file.as_fd(), 10, LIMIT, b"a dataset").unwrap();
    let cache = Cache::open_file(copy_of(&file), false, LIMIT).unwrap();
    cache.put(1, &[b"one"]).unwrap();
    drop(cache);
    let head = Cache::head(file.as_fd()).unwrap().unwrap();
    assert_eq!(head, Head { version: VERSION, rows: 10, limit: LIMIT, meta: b"a dataset".to_vec() });
    let cache = Cache::open_file(copy_of(&file), false, LIMIT).unwrap();
    assert_eq!(bytes(&cache, 1).as_deref(), Some(&b"one"[..]));
    assert_eq!(cache.usage().stored, 16);
}

#[test]
fn damaged_records_of_a_file_are_made_again() {
    let file = file(LIMIT);
    Cache::format(file.as_fd(), 10, LIMIT, b"").unwrap();
    let open = || Cache::open_file(copy_of(&file), false, LIMIT).unwrap();
    let cache = open();
    for row in 0..10 {
        cache.put(row, &[&[row as u8; 100]]).unwrap();
    }
    let (heap, index) = (Cache::overhead(10), HEADER);
    let write = |bytes: &[u8], at| crate::sys::sealed::write_at(file.as_fd(), bytes, at).unwrap();
    // Lost bytes, a wrong length, a wrong position, and another row's record.
    write(&[9], heap + 112 + 8 + 50);
    write(&200_u64.to_ne_bytes(), heap + 2 * 112);
    write(&3_u64.to_ne_bytes(), index + 3 * 8);
    write(&(heap + 5 * 112).to_ne_bytes(), index + 4 * 8);
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
    let file = file(LIMIT);
    Cache::format(file.as_fd(), 10, LIMIT, b"").unwrap();
    let cache = Cache::open_file(copy_of(&file), false, LIMIT).unwrap();
    cache.put(0, &[b"zero"]).unwrap();
    cache.put(1, &[b"one"]).unwrap();
    // After the crash, the header's page is older than that of the index.
    let write = |word: usize, value: u64| {
        crate::sys::sealed::write_at(file.as_fd(), &value.to_ne_bytes(), word as u64 * 8).unwrap();
    };
    write(word::END, Cache::overhead(10));
    write(word::BOOT, 1);
    let cache = Cache::open_file(copy_of(&file), false, LIMIT).unwrap();
    cache.put(2, &[b"two"]).unwrap();
    let records: Vec<_> = (0..3).map(|row| bytes(&cache, row).unwrap()).collect();
    assert_eq!(records, [b"zero".to_vec(), b"one".to_vec(), b"two".to_vec()]);
}

#[test]
fn a_larger_limit_opens_a_full_file() {
    let small = Cache::overhead(10) + 104;
    let file = file(LIMIT);
    Cache::format(file.as_fd(), 10, small, b"").unwrap();
    let cache = Cache::open_file(copy_of(&file), false, LIMIT).unwrap();
    assert_eq!(cache.put(0, &[&[1; 90]]).unwrap(), Put::Stored);
    assert_eq!(cache.put(1, &[&[1; 90]]).unwrap(), Put::Closed(true));
    cache.grow(LIMIT);
    let larger = Cache::open_file(copy_of(&file), false, LIMIT).unwrap();
    assert_eq!(larger.put(1, &[&[1; 90]]).unwrap(), Put::Stored);
    assert_eq!(larger.put(2, &[&[2; 90]]).unwrap(), Put::Stored);
    // The cache is full for the program with the old limit, but the file is not.
    assert_eq!(cache.put(3, &[&[3; 90]]).unwrap(), Put::Closed(false));
    assert_eq!(larger.closed(), Closed::Open);
    // That program does not see records beyond its limit, and does not count them as damaged.
    assert_eq!(bytes(&cache, 2), None);
    assert_eq!((bytes(&larger, 2), larger.usage().damaged), (Some(vec![2; 90]), 0));
}

#[test]
fn threads_fill_one_table() {
    const ROWS: u64 = 2000;
    let cache = Arc::new(Cache::create(ROWS, 1 << 22, b"").unwrap());
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
    let stored: u64 = (0..ROWS).map(|row| 8 + content(row).len() as u64).sum();
    assert_eq!(usage.stored, stored);
}

#[test]
fn truncated_records_are_absent_and_their_space_is_reused() {
    let file = file(LIMIT);
    Cache::format(file.as_fd(), 10, LIMIT, b"").unwrap();
    let cache = Cache::open_file(copy_of(&file), false, LIMIT).unwrap();
    for row in 0..9 {
        cache.put(row, &[&[row as u8; 100]]).unwrap();
    }
    cache.never(9);
    let whole = Cache::overhead(10) + 5 * 112 + 50;
    let cut = Cache::open_file(copy_of(&file), false, whole).unwrap();
    assert_eq!((0..10).filter(|row| bytes(&cut, *row).is_some()).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(cut.some_rows(3), [0, 1, 2]);
    assert_eq!((cut.usage().stored, cut.usage().unused, cut.usage().refused), (5 * 112, 0, 0));
    assert_eq!(cut.put(9, &[b"new"]).unwrap(), Put::Stored);
}
