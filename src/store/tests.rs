//! Checks that rows are read as they were written. Reading an image must never panic or access memory outside the
//! image, whatever bytes it contains.

use std::os::fd::{AsFd, OwnedFd};

use proptest::prelude::*;

use super::*;
use crate::error::Error;
use crate::sys::{memfd, sealed};
use crate::tree::Writer;

#[derive(Clone, Debug)]
enum Value {
    Int(i64),
    Float(f64),
    Record(Vec<u8>),
}

impl Value {
    fn push(&self, builder: &mut Builder) {
        match self {
            Value::Int(value) => builder.int(*value),
            Value::Float(value) => builder.float(*value),
            Value::Record(bytes) => {
                let (one, two) = bytes.split_at(bytes.len() / 2);
                builder.record(&[one, two])
            }
        }
        .unwrap();
    }

    /// Returns true if a row holds this value, either as a number or as a tree.
    fn is(&self, row: Row<'_>) -> bool {
        let mut tree = Vec::new();
        match (self, row) {
            (Value::Int(value), Row::Int(read)) => return *value == read,
            (Value::Float(value), Row::Float(read)) => return value.to_bits() == read.to_bits(),
            (Value::Int(value), _) => Writer::new(&mut tree).int(*value),
            (Value::Float(value), _) => Writer::new(&mut tree).float(*value),
            (Value::Record(bytes), _) => tree.extend_from_slice(bytes),
        }
        matches!(row, Row::Record(found) if found == tree)
    }
}

fn image(rows: &[Value]) -> OwnedFd {
    let mut builder = Builder::new().unwrap();
    for row in rows {
        row.push(&mut builder);
    }
    builder.finish(7, b"meta").unwrap()
}

fn check(rows: &[Value]) {
    let fd = image(rows);
    let store = Store::open(fd.as_fd()).unwrap();
    assert_eq!((store.rows(), store.kind, store.meta()), (rows.len() as u64, 7, &b"meta"[..]));
    for (at, value) in rows.iter().enumerate() {
        let row = store.row(at as u64).unwrap();
        assert!(value.is(row), "row {at}: {value:?} is {row:?}");
    }
    assert!(store.row(rows.len() as u64).is_err());
    assert!(store.row(u64::MAX).is_err());
}

fn record(len: usize, seed: usize) -> Value {
    Value::Record((0..len).map(|at| (at * 31 + seed) as u8).collect())
}

#[test]
fn rows_of_one_kind_fill_chunks() {
    for count in [0, 1, 1023, 1024, 1025, 5000] {
        check(&(0..count).map(|n| Value::Int(n - 7)).collect::<Vec<_>>());
        check(&(0..count).map(|n| Value::Float(n as f64 / 3.0)).collect::<Vec<_>>());
        check(&(0..count).map(|n| record(n as usize % 40, n as usize)).collect::<Vec<_>>());
    }
    check(&[Value::Float(f64::from_bits(0x7ff8_0000_0000_1234)), Value::Float(-0.0)]);
}

#[test]
fn large_rows_have_their_own_chunks() {
    let sizes = [10, CHUNK - 1, 10, CHUNK, CHUNK + 3, 0, 3 * CHUNK, CHUNK / 2, CHUNK / 2 + 1, 5];
    let mut rows: Vec<_> = sizes.iter().enumerate().map(|(n, len)| record(*len, n)).collect();
    rows.extend((0..3000).map(|n| record(n % 9, n)));
    check(&rows);
}

#[test]
fn keys_are_found_by_their_hash() {
    let mut builder = Builder::new().unwrap();
    for n in 0..3000u64 {
        builder.record(&[&n.to_le_bytes()]).unwrap();
        // Two successive keys have the same hash.
        builder.key((n % 10 != 9).then(|| hash(&(n / 2).to_le_bytes())));
        builder.int(n as i64).unwrap();
    }
    let fd = builder.finish(0, b"").unwrap();
    let store = Store::open(fd.as_fd()).unwrap();
    for n in 0..3000u64 {
        let rows: Vec<u64> = store.candidates(hash(&(n / 2).to_le_bytes())).collect();
        assert_eq!(rows.contains(&(2 * n)), n % 10 != 9, "key {n}: {rows:?}");
        assert!(rows.len() < 6, "{rows:?}");
    }
    let unhashed: Vec<u64> = store.unhashed().collect();
    assert_eq!(unhashed, (0..300).map(|n| 2 * (10 * n + 9)).collect::<Vec<_>>());
    assert_eq!(store.candidates(hash(b"missing")).count(), 0);
}

#[test]
fn a_slot_without_a_row_is_no_candidate() {
    let mut builder = Builder::new().unwrap();
    builder.record(&[b"key"]).unwrap();
    builder.key(Some(hash(b"key")));
    let fd = builder.finish(0, b"").unwrap();
    let mut bytes = Store::open(fd.as_fd()).unwrap().bytes().to_vec();
    let word = |at: usize| u64::from_le_bytes(*bytes[at * 8..].first_chunk().unwrap()) as usize;
    let (at, len) = (word(7), word(8));
    for slot in bytes[at..at + len].as_chunks_mut::<8>().0 {
        *slot = tag(u64::from_le_bytes(*slot)).to_le_bytes();
    }
    let damaged = Store::open(file(&bytes).as_fd()).unwrap();
    assert_eq!(damaged.candidates(hash(b"key")).count(), 0);
}

#[test]
fn raw_data_begin_on_a_page() {
    let mut builder = Builder::new().unwrap();
    builder.raw(&[1; 5000]).unwrap();
    builder.raw(&[2; 5000]).unwrap();
    let fd = builder.finish(3, b"<f4").unwrap();
    let store = Store::open(fd.as_fd()).unwrap();
    let (at, len) = store.data();
    assert_eq!((at % 4096, len), (0, 10000));
    assert_eq!(store.bytes()[at + 4999..at + 5001], [1, 2]);
    assert_eq!(store.candidates(1).count() + store.unhashed().count(), 0);
}

/// Returns a sealed file with the given contents.
fn file(bytes: &[u8]) -> OwnedFd {
    let fd = memfd::create("rustloader-test", 0).unwrap();
    sealed::write_at(fd.as_fd(), bytes, 0).unwrap();
    sealed::seal_all(fd.as_fd()).unwrap();
    fd
}

fn read_all(bytes: &[u8]) {
    let fd = file(bytes);
    let store = match Store::open(fd.as_fd()) {
        Ok(store) => store,
        Err(error) => return assert!(matches!(error, Error::Foreign { .. }), "{error}"),
    };
    for row in (0..store.rows().min(3000)).chain([u64::MAX, store.rows()]) {
        match store.row(row) {
            Ok(Row::Record(bytes)) => assert!(bytes.len() <= store.bytes().len()),
            Ok(_) => {}
            Err(error) => assert!(matches!(error, Error::Foreign { .. }), "{error}"),
        }
    }
    let seen = store.candidates(hash(b"1")).count() + store.unhashed().count();
    assert!(seen <= store.bytes().len());
    let (at, len) = store.data();
    assert!(store.meta().len() <= store.bytes().len() && at + len <= store.bytes().len());
}

#[test]
fn short_and_foreign_files_are_refused() {
    for bytes in [&b"x"[..], &[0; 4096], &[0xff; 9000]] {
        let fd = file(bytes);
        assert!(matches!(Store::open(fd.as_fd()), Err(Error::Foreign { .. })));
    }
    let whole = Store::open(image(&[Value::Int(1)]).as_fd()).unwrap();
    let mut newer = whole.bytes().to_vec();
    newer[8] = 2;
    let error = Store::open(file(&newer).as_fd()).unwrap_err().to_string();
    assert!(error.contains("version is 2, not 1"), "{error}");
}

fn values() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<i64>().prop_map(Value::Int),
        any::<f64>().prop_map(Value::Float),
        prop::collection::vec(any::<u8>(), 0..30).prop_map(Value::Record),
    ]
}

/// Returns a strategy for runs of equal rows, which may be long enough to fill chunks.
fn rows() -> impl Strategy<Value = Vec<Value>> {
    prop::collection::vec((values(), 1usize..1500), 0..5)
        .prop_map(|runs| runs.into_iter().flat_map(|(row, count)| vec![row; count]).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_rows_come_back(rows in rows()) {
        check(&rows);
    }

    #[test]
    fn any_damage_is_an_error_or_another_value(
        rows in rows(),
        places in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut builder = Builder::new().unwrap();
        for (n, row) in rows.iter().enumerate() {
            row.push(&mut builder);
            builder.key((n % 3 > 0).then(|| hash(&[n as u8])));
        }
        let fd = builder.finish(1, b"meta").unwrap();
        let mut bytes = Store::open(fd.as_fd()).unwrap().bytes().to_vec();
        for (place, byte, in_header) in places {
            let within = if in_header { 8 * WORDS } else { bytes.len() };
            bytes[place.index(within)] = byte;
        }
        read_all(&bytes);
        read_all(&bytes[..=cut.index(bytes.len())]);
    }
}
