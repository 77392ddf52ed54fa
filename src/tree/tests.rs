use proptest::prelude::*;

use super::dtype::Dtype;
use super::layout::{Dims, Style, TransferPlan, extent, is_contiguous, numel};
use super::*;
use crate::config::MAX_DEPTH;
use crate::error::Error;

/// A builder that counts the values on its stack.
#[derive(Default)]
struct Counted {
    stack: usize,
    leaves: usize,
    ints: Vec<i64>,
    kept: Vec<usize>,
    backs: Vec<usize>,
    storages: usize,
}

impl Build for Counted {
    type Error = Error;

    fn atom(&mut self, atom: Atom<'_>) -> Result<(), Error> {
        self.stack += 1;
        match atom {
            Atom::Int(value) => self.ints.push(value),
            Atom::Ints(_, values) => self.ints.extend(values.iter().map(|&v| i64::from_le_bytes(v))),
            Atom::Leaf(leaf) => {
                self.leaves += 1;
                assert_eq!(Some(leaf.extent), extent(&leaf.shape, &leaf.strides, leaf.dtype.itemsize()));
                if let Place::Inline(bytes) = leaf.place {
                    assert_eq!(bytes.len(), leaf.extent);
                }
            }
            Atom::Back(mark) => self.backs.push(mark),
            _ => {}
        }
        Ok(())
    }

    fn keep(&mut self, index: usize) -> Result<(), Error> {
        assert!(self.stack > 0, "there is a value to keep");
        self.kept.push(index);
        Ok(())
    }

    fn storage(&mut self, storage: &Storage<'_>) -> Result<(), Error> {
        self.storages += 1;
        if let Place::Inline(bytes) = storage.place {
            assert_eq!(bytes.len(), storage.len);
        }
        Ok(())
    }

    fn close(&mut self, group: Group, count: usize) -> Result<(), Error> {
        let values = if group == Group::Dict { count * 2 } else { count };
        self.stack = self.stack.checked_sub(values).expect("the items of a container are built before it closes") + 1;
        Ok(())
    }
}

fn count(payload: &[u8]) -> Result<Counted, Error> {
    let mut build = Counted::default();
    walk(payload, &mut build)?;
    assert_eq!(build.stack, 1, "a payload is one value");
    Ok(build)
}

fn sample() -> Vec<u8> {
    let mut out = Vec::new();
    let mut w = Writer::new(&mut out);
    w.storage(&[7; 24]);
    let far = w.storage_outside(1 << 20);
    w.fill(far, 1, 0);
    w.open(Group::Dict, 4);
    w.str("shared");
    w.mark();
    w.open(Group::List, 3);
    w.shared(Dtype::INT64, &[2], &[1], 0, 8);
    w.mark();
    w.shared(Dtype::INT64, &[2, 2], &[1, 1], 1, 64);
    w.back(1);
    w.str("again");
    w.back(0);
    w.str("image");
    let plan = TransferPlan::new(&[2, 3], &[12, 4], 4, Style::Tensor).unwrap();
    let data = [1f32; 6];
    // SAFETY: `data` has six floats.
    unsafe {
        w.inline(Kind::Tensor, Dtype::from_dl(2, 32, 1).unwrap(), &[2, 3], &plan, data.as_ptr().cast());
    };
    w.str("rest");
    w.open(Group::List, 8);
    let far = w.bytes_outside(50_000);
    w.fill(far, 2, 0);
    w.empty(Dtype::INT64, &[0, 3], &TransferPlan::new(&[0, 3], &[24, 8], 8, Style::Tensor).unwrap(), 300);
    w.none();
    w.bool(true);
    w.complex(1.0, -2.0);
    w.open_ints(Group::Tuple, 3);
    (7..10).for_each(|i| w.next_int(i));
    w.bytes(b"abc");
    let plan = TransferPlan::new(&[100, 100], &[8, 800], 8, Style::Array).unwrap();
    let slot = w.outside(Kind::Array, Dtype::INT64, &[100, 100], &plan);
    w.fill(slot, 3, 64);
    out
}

#[test]
fn a_sample_is_read_back_and_each_truncation_is_detected() {
    let payload = sample();
    let counted = count(&payload).unwrap();
    assert_eq!((counted.leaves, counted.ints.as_slice()), (5, &[7, 8, 9][..]));
    assert_eq!((counted.storages, counted.kept, counted.backs), (2, vec![1, 0], vec![1, 0]));
    for len in 0..payload.len() {
        assert!(matches!(count(&payload[..len]), Err(Error::Corrupt { .. })), "cut at {len}");
    }
    assert!(count(&[&payload[..], &[0]].concat()).is_err());
}

#[test]
fn depth_is_bounded() {
    let nested = |depth: usize| [[tag::LIST, 1].repeat(depth), vec![tag::NONE]].concat();
    assert!(count(&nested(MAX_DEPTH)).is_ok());
    assert!(count(&nested(MAX_DEPTH + 1)).is_err());
    assert!(count(&nested(1_000_000)).is_err());
}

#[test]
fn huge_counts_are_refused() {
    for kind in [tag::LIST, tag::TUPLE, tag::DICT, tag::STR, tag::BYTES, tag::BYTES_OUTSIDE] {
        assert!(count(&[kind, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0, 0]).is_err());
    }
    assert!(count(&[tag::TENSOR, 8, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]).is_err());
    assert!(
        count(&[tag::TENSOR, 8, 2 | FORM_OUTSIDE, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 1])
            .is_err()
    );
}

#[test]
fn marks_and_storages_come_before_values() {
    assert!(count(&[tag::MARK, tag::NONE]).is_ok());
    assert!(count(&[tag::STORAGE, 0, 0, tag::NONE]).is_ok());
    for broken in [
        &[tag::MARK][..],
        &[tag::MARK, tag::MARK, tag::NONE],
        &[tag::MARK, tag::STORAGE, 0, 0, tag::NONE],
        &[tag::STORAGE, 0, 2, 9, tag::NONE],
        &[tag::STORAGE, FORM_SHARED, 0, tag::NONE],
        &[tag::TENSOR, 8, FORM_SHARED | FORM_OUTSIDE, 0, 0],
        &[tag::ARRAY, 8, FORM_SHARED, 0, 0],
        &[tag::NONE, tag::MARK],
    ] {
        assert!(count(broken).is_err(), "{broken:?}");
    }
}

#[test]
fn plans_of_known_layouts() {
    let strides = |p: &TransferPlan| p.strides.to_vec();
    let plan = |shape: &[i64], strides: &[i64], style| TransferPlan::new(shape, strides, 4, style);
    let t = plan(&[2, 3], &[4, 8], Style::Tensor).unwrap();
    assert!(t.gather.is_none() && !t.contiguous && t.bytes == 24 && strides(&t) == [1, 2]);
    let t = plan(&[5, 3], &[0, 4], Style::Tensor).unwrap();
    assert!(t.gather.is_none() && t.bytes == 12 && t.span == 12 && strides(&t) == [0, 1]);
    let t = plan(&[5, 3], &[24, 8], Style::Tensor).unwrap();
    assert!(t.gather.is_some() && t.contiguous && t.bytes == 60 && t.span == 4 * 24 + 16 + 4);
    let t = plan(&[3, 5], &[8, 24], Style::Tensor).unwrap();
    assert!(strides(&t) == [1, 3]);
    assert!(plan(&[3, 3], &[4, 4], Style::Tensor).is_none(), "overlapping windows share elements");
    let a = plan(&[3, 3], &[4, 4], Style::Array).unwrap();
    assert!(a.contiguous && a.bytes == 36 && a.span == 20);
    let a = plan(&[4], &[-4], Style::Array).unwrap();
    assert!((a.low, a.span, a.bytes) == (-12, 16, 16));
    let a = plan(&[1 << 20, 3], &[0, 4], Style::Array).unwrap();
    assert!(a.contiguous && a.bytes == 12 << 20);
    assert!(plan(&[i64::MAX, 2], &[0, 4], Style::Tensor).is_none());
    let t = plan(&[0, 3], &[12, 4], Style::Tensor).unwrap();
    assert!(t.bytes == 0 && t.span == 0);
    let t = plan(&[], &[], Style::Tensor).unwrap();
    assert!(t.contiguous && t.bytes == 4);
}

/// Returns the elements of a view of `data`, in C order. `first` is the index of its first element.
fn elements(shape: &[i64], strides: &[i64], data: &[i32], first: usize) -> Vec<i32> {
    let mut all = vec![first as i64];
    for (&size, &stride) in shape.iter().zip(strides) {
        all = all.iter().flat_map(|&at| (0..size).map(move |i| at + i * stride)).collect();
    }
    all.into_iter().map(|at| data[at as usize]).collect()
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = count(&bytes);
    }

    #[test]
    fn likely_bytes_never_panic(bytes in proptest::collection::vec(0u8..20, 0..300)) {
        let _ = count(&bytes);
    }

    #[test]
    fn damaged_samples_never_panic(
        hits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut payload = sample();
        for (at, value) in hits {
            let at = at.index(payload.len());
            payload[at] = value;
        }
        let _ = count(&payload);
    }

    #[test]
    fn copies_contain_the_elements(
        dims in proptest::collection::vec((0i64..5, -7i64..30), 0..5),
        array in any::<bool>(),
    ) {
        let style = if array { Style::Array } else { Style::Tensor };
        let shape: Vec<i64> = dims.iter().map(|d| d.0).collect();
        let strides: Vec<i64> = dims.iter().map(|d| if array { d.1 } else { d.1.max(0) }).collect();
        let bytes: Vec<i64> = strides.iter().map(|s| s * 4).collect();
        let data: Vec<i32> = (0..2000).collect();
        let first = 1000;
        if let Some(plan) = TransferPlan::new(&shape, &bytes, 4, style) {
            let mut target = vec![0i32; plan.bytes / 4];
            // SAFETY: the view reaches at most 4 x 4 x 30 elements to either side of element 1000 of 2000.
            unsafe { plan.copy(data[first..].as_ptr().cast(), target.as_mut_ptr().cast()) };
            prop_assert_eq!(extent(&shape, &plan.strides, 4), Some(plan.bytes));
            prop_assert_eq!(plan.contiguous, Dims::contiguous(&shape).unwrap() == plan.strides);
            if numel(&shape) != Some(0) {
                let copied = elements(&shape, &plan.strides, &target, 0);
                prop_assert_eq!(copied, elements(&shape, &strides, &data, first));
            }
            if plan.contiguous {
                prop_assert!(is_contiguous(&shape, &plan.strides));
            }
        } else {
            prop_assert!(!array, "every array can be sent");
        }
    }
}
