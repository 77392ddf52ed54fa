use super::within;
use crate::error::Error;
use crate::interop::memory::Heap;

#[test]
fn bytes_of_a_leaf_are_checked() {
    let heap = Heap::new(100).unwrap();
    assert_eq!(within(&heap, 0, 40, 60, 8).unwrap(), 40);
    assert!(within(&heap, 0, 40, 61, 8).is_err() && within(&heap, 0, u64::MAX, 2, 1).is_err());
    assert!(within(&heap, 0, 4, 8, 8).is_err(), "not aligned");
}

#[test]
fn a_refusal_of_the_heap_names_the_bytes() {
    let error = Heap::new(isize::MAX as usize).err().unwrap();
    assert_eq!(error, Error::NoHeap { wanted: isize::MAX as u64 });
    let text = format!("cannot get {} bytes of memory for a batch: the system refused them; use a smaller", isize::MAX);
    assert!(error.to_string().starts_with(&text), "{error}");
}
