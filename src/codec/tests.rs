//! Tests of both passes of encoding, with stand-ins for tensors. The payloads are read back without Python.

use std::collections::HashMap;
use std::rc::Rc;

use proptest::prelude::*;

use super::aliases::{Tensors, resolve};
use super::draft::{Draft, NotPlain, Plain};
use super::seen::Object;
use super::{Hold, Sink, within};
use crate::config::{INLINE_LIMIT, MAX_DEPTH};
use crate::error::{Error, Result};
use crate::interop::memory::Heap;
use crate::interop::view::{LeafView, TensorView};
use crate::tree::dtype::Dtype;
use crate::tree::layout::Dims;
use crate::tree::{Atom, Build, Group, Kind, Leaf, Place, Storage, Writer, walk};

/// Size in bytes of the memory that all tensors are views of.
const MEMORY: usize = 64 << 10;

/// A stand-in for a tensor; `id` is its identity.
#[derive(Clone, Debug)]
struct Tensor {
    id: usize,
    memory: Rc<Vec<u64>>,
    kind: Kind,
    dtype: Dtype,
    offset: usize,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

impl Tensor {
    fn first(&self) -> *const u8 {
        self.memory.as_ptr().cast::<u8>().wrapping_add(self.offset)
    }

    /// Returns the offset in bytes of each element from the first, in C order.
    fn elements(shape: &[i64], strides: &[i64], itemsize: usize) -> Vec<usize> {
        let mut all = vec![0];
        for (&size, &stride) in shape.iter().zip(strides) {
            let step = stride as usize * itemsize;
            all = all.iter().flat_map(|&at| (0..size as usize).map(move |i| at + i * step)).collect();
        }
        all
    }

    /// Returns the offsets of all bytes of the elements.
    fn bytes(&self) -> Vec<usize> {
        let size = self.dtype.itemsize();
        let elements = Self::elements(&self.shape, &self.strides, size);
        elements.iter().flat_map(|at| (0..size).map(move |byte| self.offset + at + byte)).collect()
    }
}

impl Object for Tensor {
    fn address(&self) -> usize {
        self.id
    }
}

struct Batch;

impl Tensors for Batch {
    type Object = Tensor;

    fn view<'t>(&self, tensor: &'t Tensor) -> Option<TensorView<'t>> {
        let (shape, strides) = (Dims::new(&tensor.shape)?, Dims::new(&tensor.strides)?);
        // SAFETY: the strategy creates views inside the memory.
        Some(unsafe { TensorView::new(tensor.first(), tensor.dtype, shape, strides) })
    }

    fn keep_alive(&self, tensors: Vec<&Tensor>) -> Option<Tensor> {
        tensors.first().map(|&tensor| tensor.clone())
    }
}

/// Leaves in ordinary memory.
#[derive(Default)]
struct HeapLeaves(Vec<Vec<u8>>);

// SAFETY: the leaves own the reserved memory.
unsafe impl Sink for HeapLeaves {
    fn reserve(&mut self, len: usize) -> Result<(u32, *mut u8)> {
        self.0.push(vec![0xee; len]);
        let leaf = self.0.len() - 1;
        Ok((leaf as u32, self.0[leaf].as_mut_ptr()))
    }

    unsafe fn adopt(&mut self, _: *const u8, len: usize, _: Hold) -> Option<(u32, u64)> {
        assert!(len >= INLINE_LIMIT);
        None
    }
}

/// Encodes a list of tensors as the codec does.
fn encode(batch: &[Tensor]) -> Plain<(Vec<u8>, HeapLeaves)> {
    let mut payload = vec![1, 2, 3];
    let from = payload.len();
    let mut draft = Draft::new(&mut payload);
    draft.out.open(Group::List, batch.len());
    for tensor in batch {
        let item = tensor.dtype.itemsize() as i64;
        let byte_strides: Vec<i64> = tensor.strides.iter().map(|stride| stride * item).collect();
        let Tensor { kind, dtype, shape, .. } = tensor;
        let (shape, byte_strides) = (Dims::new(shape).unwrap(), Dims::new(&byte_strides).unwrap());
        let view = LeafView { kind: *kind, dtype: *dtype, shape, byte_strides, first: tensor.first() };
        // SAFETY: the strategy creates views inside the memory.
        unsafe { draft.leaf(tensor, &view, false, || Ok(None)) }?;
    }
    let (seen, mut copies) = draft.finish();
    if let Some(extents) = seen.aliased_extents() {
        copies = resolve(&Batch, &seen, &extents, &mut payload, from, copies)?;
    }
    let (mut leaves, mut out) = (HeapLeaves::default(), Writer::new(&mut payload));
    for copy in copies {
        copy.run(&mut out, &mut leaves, |copy| copy.perform()).unwrap();
    }
    assert_eq!(payload[..from], [1, 2, 3]);
    payload.drain(..from);
    Ok((payload, leaves))
}

/// A byte that was read back: the index of its memory, and the offset in it.
type At = (usize, usize);

/// A tensor that was read back, with the positions of its elements' bytes in C order.
#[derive(Debug)]
struct DecodedTensor {
    shape: Vec<i64>,
    bytes: Vec<At>,
}

/// Reads a list of tensors. A reference to an earlier object shares its `Rc`.
#[derive(Default)]
struct Rebuilt {
    memories: Vec<Vec<u8>>,
    leaves: Vec<Option<Vec<u8>>>,
    /// The memory of each storage.
    storages: Vec<usize>,
    stack: Vec<Rc<DecodedTensor>>,
    kept: HashMap<usize, Rc<DecodedTensor>>,
    done: bool,
}

impl Rebuilt {
    fn memory(&mut self, bytes: Vec<u8>) -> usize {
        self.memories.push(bytes);
        self.memories.len() - 1
    }

    fn place(&mut self, place: &Place<'_>) -> At {
        match place {
            Place::Inline(bytes) => (self.memory(bytes.to_vec()), 0),
            Place::Outside { leaf, offset } => {
                let bytes = self.leaves[*leaf as usize].take().expect("a leaf is taken once");
                (self.memory(bytes), *offset as usize)
            }
            Place::Shared { storage, offset } => (self.storages[*storage], *offset as usize),
            Place::Empty { .. } => unreachable!("every tensor has elements"),
        }
    }

    fn tensor(&mut self, leaf: &Leaf<'_>) -> DecodedTensor {
        let (memory, offset) = self.place(&leaf.place);
        let size = leaf.dtype.itemsize();
        let elements = Tensor::elements(&leaf.shape, &leaf.strides, size);
        let bytes = elements.iter().flat_map(|at| (0..size).map(move |byte| (memory, offset + at + byte)));
        DecodedTensor { shape: leaf.shape.to_vec(), bytes: bytes.collect() }
    }
}

impl Build for Rebuilt {
    type Error = Error;

    fn atom(&mut self, atom: Atom<'_>) -> Result<()> {
        let tensor = match atom {
            Atom::Leaf(leaf) => Rc::new(self.tensor(leaf)),
            Atom::Back(mark) => Rc::clone(&self.kept[&mark]),
            other => panic!("not a tensor: {other:?}"),
        };
        self.stack.push(tensor);
        Ok(())
    }

    fn close(&mut self, group: Group, count: usize) -> Result<()> {
        assert_eq!((group, count), (Group::List, self.stack.len()));
        self.done = true;
        Ok(())
    }

    fn keep(&mut self, mark: usize) -> Result<()> {
        self.kept.insert(mark, Rc::clone(self.stack.last().unwrap()));
        Ok(())
    }

    fn storage(&mut self, storage: &Storage<'_>) -> Result<()> {
        let (memory, offset) = self.place(&storage.place);
        assert_eq!((offset, self.memories[memory].len()), (0, storage.len));
        self.storages.push(memory);
        Ok(())
    }
}

fn decode(payload: &[u8], leaves: HeapLeaves) -> Rebuilt {
    let mut reader = Rebuilt { leaves: leaves.0.into_iter().map(Some).collect(), ..Rebuilt::default() };
    walk(payload, &mut reader).unwrap();
    assert!(reader.done || reader.stack.is_empty());
    assert!(reader.leaves.iter().all(Option::is_none), "every leaf is used");
    reader
}

/// A view: its first word in the memory, its element type, its sizes and strides, and true for an array.
type View = (usize, Dtype, Vec<(i64, i64)>, bool);

/// Returns a strategy for batches of views of one memory. A batch may contain a view more than once.
fn batches() -> impl Strategy<Value = Vec<Tensor>> {
    let small = proptest::collection::vec((1i64..6, 0i64..12), 0..4);
    let large =
        (1i64..3, 2000i64..2100, 0i64..3).prop_map(|(rows, columns, step)| vec![(rows, columns * step), (columns, 1)]);
    let shape = prop_oneof![6 => small, 1 => large];
    let int32 = Dtype::from_dl(0, 32, 1).unwrap();
    let dtype = prop_oneof![Just(Dtype::UINT8), Just(int32), Just(Dtype::FLOAT64)];
    let view = (0usize..12, dtype, shape, prop::bool::weighted(0.1));
    let views = proptest::collection::vec(view, 1..7);
    (views, proptest::collection::vec(any::<prop::sample::Index>(), 1..10)).prop_map(|(views, items)| {
        let memory = Rc::new((0..MEMORY as u64 / 8).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect());
        let make = |(id, (at, dtype, dims, is_array)): (usize, View)| {
            let (shape, strides) = dims.into_iter().unzip();
            let kind = if is_array { Kind::Array } else { Kind::Tensor };
            Tensor { id, memory: Rc::clone(&memory), kind, dtype, offset: at * 8, shape, strides }
        };
        let tensors: Vec<Tensor> = views.into_iter().enumerate().map(make).collect();
        items.iter().map(|index| index.get(&tensors).clone()).collect()
    })
}

/// Returns the bytes of the memory that a tensor is a view of.
fn source(tensor: &Tensor) -> Vec<u8> {
    tensor.memory.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// Tensors share memory in the decoded batch exactly where they do in the original: the bytes of their elements
    /// correspond one to one.
    #[test]
    fn tensors_come_back_with_their_values_and_shared_memory(batch in batches()) {
        let Ok((payload, leaves)) = encode(&batch) else {
            // Pickle handles arrays whose elements share memory.
            let is_pickled = |it: &Tensor| it.kind == Kind::Array && has_duplicates(it);
            let misaligned = batch.iter().any(|it| !it.offset.is_multiple_of(it.dtype.itemsize()));
            prop_assert!(misaligned || batch.iter().any(is_pickled));
            return Ok(());
        };
        let bytes = source(&batch[0]);
        let decoded = decode(&payload, leaves);
        prop_assert_eq!(decoded.stack.len(), batch.len());
        let (mut decoded_of, mut original_of) = (HashMap::new(), HashMap::new());
        for (tensor, copy) in batch.iter().zip(&decoded.stack) {
            prop_assert_eq!(&tensor.shape, &copy.shape);
            let places = tensor.bytes();
            prop_assert_eq!(places.len(), copy.bytes.len());
            for (&place, &at) in places.iter().zip(&copy.bytes) {
                prop_assert_eq!(bytes[place], decoded.memories[at.0][at.1]);
                if tensor.kind == Kind::Tensor {
                    prop_assert_eq!(*decoded_of.entry(place).or_insert(at), at, "shared memory was separated");
                    prop_assert_eq!(*original_of.entry(at).or_insert(place), place, "separate memory is shared");
                }
            }
        }
        for (i, tensor) in batch.iter().enumerate() {
            for (j, other) in batch.iter().enumerate() {
                let same = Rc::ptr_eq(&decoded.stack[i], &decoded.stack[j]);
                prop_assert_eq!(same, tensor.id == other.id, "items {} and {}", i, j);
            }
        }
    }
}

fn has_duplicates(tensor: &Tensor) -> bool {
    let mut places = tensor.bytes();
    places.sort_unstable();
    places.windows(2).any(|pair| pair[0] == pair[1])
}

fn tensor(id: usize, offset: usize, shape: &[i64], strides: &[i64]) -> Tensor {
    let memory = Rc::new(vec![7; MEMORY / 8]);
    let (shape, strides) = (shape.to_vec(), strides.to_vec());
    Tensor { id, memory, kind: Kind::Tensor, dtype: Dtype::INT64, offset, shape, strides }
}

#[test]
fn columns_of_a_large_matrix_are_copied_separately() {
    let base = tensor(0, 0, &[80, 1], &[80, 1]);
    let columns: Vec<Tensor> = (0..2).map(|at| Tensor { id: at, offset: at * 8, ..base.clone() }).collect();
    let (payload, leaves) = encode(&columns).unwrap_or_else(|NotPlain| panic!("columns are plain"));
    // A common storage would contain the whole matrix.
    assert!(leaves.0.is_empty() && payload.len() < 2 * 80 * 8 + 100, "{} bytes", payload.len());
}

#[test]
fn an_object_inside_itself_or_nested_too_deeply_is_not_plain() {
    let mut payload = Vec::new();
    let mut draft = Draft::new(&mut payload);
    let list = tensor(5, 0, &[], &[]);
    assert_eq!(draft.enter(&list, 0), Ok(true));
    assert_eq!(draft.enter(&list, 1), Err(NotPlain));
    draft.leave();
    assert_eq!(draft.enter(&list, 1), Ok(false), "a repetition, not a cycle");
    assert_eq!(draft.enter(&tensor(6, 0, &[], &[]), MAX_DEPTH), Err(NotPlain));
}

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
