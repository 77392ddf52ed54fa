//! Views of memory as tensors or arrays, and the check that a view fits its memory.

use std::marker::PhantomData;

use super::memory::Memory;
use crate::tree::Kind;
use crate::tree::dtype::Dtype;
use crate::tree::layout::{Dims, extent, is_contiguous};

/// The memory of a plain CPU tensor, which the view borrows. The pointer is valid as long as no code resizes or moves
/// the tensor's storage.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    ptr: *const u8,
    dtype: Dtype,
    shape: Dims,
    strides: Dims,
    tensor: PhantomData<&'a ()>,
}

impl TensorView<'_> {
    /// Creates the view of a tensor.
    ///
    /// # Safety
    /// `ptr` is the address of the tensor's first element, and the tensor has this dtype, shape and strides, in
    /// elements. The tensor lives as long as the view.
    #[inline]
    pub unsafe fn new(ptr: *const u8, dtype: Dtype, shape: Dims, strides: Dims) -> Self {
        Self { ptr, dtype, shape, strides, tensor: PhantomData }
    }

    /// Returns the address of the first element.
    #[inline]
    pub fn ptr(&self) -> *const u8 {
        self.ptr
    }

    #[inline]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    #[inline]
    pub fn shape(&self) -> &Dims {
        &self.shape
    }

    /// Returns the strides, in elements.
    #[inline]
    pub fn strides(&self) -> &Dims {
        &self.strides
    }
}

/// The memory of a plain tensor or array, with strides in bytes.
#[derive(Clone, Copy, Debug)]
pub struct LeafView {
    pub kind: Kind,
    pub dtype: Dtype,
    pub shape: Dims,
    pub byte_strides: Dims,
    /// The address of the first element.
    pub first: *const u8,
}

/// The dtype, shape and strides of a tensor or array. Strides count elements.
#[derive(Clone, Copy, Debug)]
pub struct Form<'a> {
    pub dtype: Dtype,
    pub shape: &'a [i64],
    pub strides: &'a [i64],
}

impl<'a> Form<'a> {
    /// Returns the form of a vector of `len` bytes.
    pub fn bytes(len: &'a [i64; 1]) -> Self {
        Self { dtype: Dtype::UINT8, shape: len, strides: &[1] }
    }

    /// Returns the form of an empty vector of a dtype.
    pub fn empty(dtype: Dtype) -> Self {
        Self { dtype, shape: &[0], strides: &[1] }
    }

    /// Returns the number of bytes from the start of the first element to the end of the last one. Returns `None` if no
    /// memory can be that large, or if a size or stride is negative.
    pub fn extent(&self) -> Option<usize> {
        extent(self.shape, self.strides, self.dtype.itemsize())
    }

    /// Checks that a view of this form at byte `offset` stays inside `memory` and is aligned. Otherwise, returns the
    /// reason in words.
    #[inline]
    pub fn check<M: Memory>(&self, memory: &M, offset: usize) -> Result<(), &'static str> {
        let end = self.extent().and_then(|bytes| bytes.checked_add(offset));
        if end.is_none_or(|end| end > memory.len()) {
            return Err("a tensor's sizes and strides reach beyond its memory");
        }
        if !(memory.ptr() as usize).wrapping_add(offset).is_multiple_of(self.dtype.align()) {
            return Err("a tensor's memory is not aligned to its dtype");
        }
        Ok(())
    }
}

/// The order of a view's elements in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The last index varies fastest.
    C,
    /// The first index varies fastest.
    Fortran,
    /// Any other order.
    Other,
}

impl Order {
    /// Returns the order of a view, whose strides count elements. Returns [`Order::C`] if the order is both C and
    /// Fortran.
    pub fn of(shape: &[i64], strides: &[i64]) -> Self {
        let reversed = |dims: &[i64]| dims.iter().rev().copied().collect::<Vec<_>>();
        if is_contiguous(shape, strides) {
            Self::C
        } else if is_contiguous(&reversed(shape), &reversed(strides)) {
            Self::Fortran
        } else {
            Self::Other
        }
    }
}

/// The layout of the tensor that `torch.stack` makes from tensors of the same shape and dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackPlan {
    pub dtype: Dtype,
    pub shape: Dims,
    /// The strides of the contiguous result, in elements.
    pub strides: Dims,
    /// Bytes of an item.
    pub each: usize,
    /// Bytes of all items.
    pub total: usize,
}

impl StackPlan {
    /// Returns the plan for a stack of `count` items. Returns `None` if the stack has too many dimensions, or does not
    /// fit into any memory.
    pub fn new(count: usize, item_shape: &[i64], dtype: Dtype) -> Option<Self> {
        let shape = Dims::new(&[&[i64::try_from(count).ok()?], item_shape].concat())?;
        let strides = Dims::contiguous(&shape)?;
        let product = |n: usize, &size: &i64| n.checked_mul(usize::try_from(size).ok()?);
        let elements = item_shape.iter().try_fold(1usize, product)?;
        let each = elements.checked_mul(dtype.itemsize())?;
        Some(Self { dtype, shape, strides, each, total: each.checked_mul(count)? })
    }

    /// Returns the form of the result.
    pub fn form(&self) -> Form<'_> {
        Form { dtype: self.dtype, shape: &self.shape, strides: &self.strides }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::interop::memory::Heap;

    #[test]
    fn a_view_that_leaves_its_memory_or_is_not_aligned_is_refused() {
        let heap = Heap::new(64).unwrap();
        let check = |offset, shape: &[i64], strides: &[i64]| {
            Form { dtype: Dtype::INT64, shape, strides }.check(&heap, offset).is_ok()
        };
        assert!(check(0, &[8], &[1]) && check(56, &[1], &[1]) && check(0, &[2, 4], &[4, 1]));
        assert!(check(64, &[0], &[1]), "an empty view needs no bytes");
        assert!(!check(8, &[8], &[1]) && !check(0, &[9], &[1]) && !check(0, &[2], &[8]));
        assert!(!check(0, &[2], &[-1]) && !check(usize::MAX - 7, &[1], &[1]));
        assert!(!check(4, &[1], &[1]), "not aligned");
    }

    #[test]
    fn orders_are_distinguished() {
        assert_eq!(Order::of(&[2, 3], &[3, 1]), Order::C);
        assert_eq!(Order::of(&[2, 3], &[1, 2]), Order::Fortran);
        assert_eq!(Order::of(&[4], &[1]), Order::C);
        assert_eq!(Order::of(&[2, 3, 4], &[4, 8, 1]), Order::Other);
        assert_eq!(Order::of(&[2, 3], &[6, 2]), Order::Other);
    }

    proptest! {
        #[test]
        fn a_stack_has_room_for_each_item(
            count in 1usize..50,
            shape in proptest::collection::vec(0i64..20, 0..5),
        ) {
            let plan = StackPlan::new(count, &shape, Dtype::FLOAT64).unwrap();
            let each = shape.iter().product::<i64>() as usize * 8;
            prop_assert_eq!((plan.each, plan.total), (each, each * count));
            prop_assert_eq!(&plan.shape[1..], &shape[..]);
            prop_assert!(is_contiguous(&plan.shape, &plan.strides));
            if each > 0 {
                prop_assert_eq!(plan.strides[0] as usize * 8, each, "an item begins where the previous one ends");
            }
        }
    }

    #[test]
    fn a_stack_that_no_memory_holds_is_none() {
        assert!(StackPlan::new(1 << 20, &[1 << 45], Dtype::INT64).is_none());
        assert!(StackPlan::new(2, &[-1], Dtype::INT64).is_none());
        assert!(StackPlan::new(2, &[1; 16], Dtype::INT64).is_none(), "17 dimensions");
    }
}
