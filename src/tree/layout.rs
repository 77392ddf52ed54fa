//! Shapes and strides, and plans for the transfer of strided views.

use crate::config::{MAX_DIMS, STREAM_FROM};
use crate::copy::copy;
use std::ops::Deref;

use super::gather::Gather;

/// The sizes or strides of a view, stored inline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    len: u8,
    values: [i64; MAX_DIMS],
}

impl Dims {
    /// No dimensions.
    pub const EMPTY: Self = Self { len: 0, values: [0; MAX_DIMS] };

    /// Copies `values`; `None` if there are more than [`MAX_DIMS`].
    #[inline]
    pub fn new(values: &[i64]) -> Option<Self> {
        let mut dims = Self::EMPTY;
        dims.values.get_mut(..values.len())?.copy_from_slice(values);
        dims.len = values.len() as u8;
        Some(dims)
    }

    /// Creates `len` zeros; `None` if `len` exceeds [`MAX_DIMS`].
    #[inline]
    pub fn zeros(len: usize) -> Option<Self> {
        (len <= MAX_DIMS).then_some(Self { len: len as u8, values: [0; MAX_DIMS] })
    }

    /// Returns the values as a mutable slice.
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [i64] {
        &mut self.values[..usize::from(self.len)]
    }

    /// Returns the strides, in elements, that torch gives a contiguous tensor of this shape; `None` on overflow.
    pub fn contiguous(shape: &[i64]) -> Option<Self> {
        let mut strides = Self::zeros(shape.len())?;
        let mut step = 1i64;
        for (stride, &size) in strides.as_mut_slice().iter_mut().zip(shape).rev() {
            *stride = step;
            step = step.checked_mul(size.max(1))?;
        }
        Some(strides)
    }
}

impl Deref for Dims {
    type Target = [i64];

    #[inline]
    fn deref(&self) -> &[i64] {
        &self.values[..usize::from(self.len)]
    }
}

/// Returns the number of elements of a shape; `None` on overflow or a negative size.
#[inline]
pub fn numel(shape: &[i64]) -> Option<i64> {
    if shape.iter().any(|&size| size < 0) {
        return None;
    }
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1i64, |product, &size| product.checked_mul(size))
}

/// Returns the number of bytes from the first to the last element of a view, inclusive. `strides` are in elements.
/// Returns `None` if a size or stride is negative, or a number is too large.
#[inline]
pub fn extent(shape: &[i64], strides: &[i64], itemsize: usize) -> Option<usize> {
    if shape.len() != strides.len() || strides.iter().any(|&stride| stride < 0) {
        return None;
    }
    if numel(shape)? == 0 {
        return Some(0);
    }
    let mut last = 0i64;
    for (&size, &stride) in shape.iter().zip(strides) {
        last = last.checked_add((size - 1).checked_mul(stride)?)?;
    }
    let bytes = last.checked_add(1)?.checked_mul(itemsize as i64)?;
    usize::try_from(bytes).ok()
}

/// Returns true if a view with these strides (in elements) is C-contiguous. The strides of dimensions of size 1 do not
/// matter; if there are no elements, none do.
#[inline]
pub fn is_contiguous(shape: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1i64;
    if shape.contains(&0) {
        return true;
    }
    for (&size, &stride) in shape.iter().zip(strides).rev() {
        if size != 1 {
            if stride != expected {
                return false;
            }
            expected = expected.wrapping_mul(size);
        }
    }
    true
}

/// The rules for the layout of a delivered view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// torch's rules: dense and expanded layouts keep their strides; all other layouts lose their holes, but keep the
    /// order of their dimensions.
    Tensor,
    /// NumPy's rules: layouts that are dense in C or Fortran order keep their strides; all others arrive in C order, as
    /// they do when pickled.
    Array,
}

/// A plan for the transfer of a view: its bytes, and the loops that read them.
#[derive(Clone, Copy, Debug)]
pub struct TransferPlan {
    /// The strides of the delivered view, in elements.
    pub(crate) strides: Dims,
    /// True if these strides are exactly those of [`Dims::contiguous`].
    pub(crate) contiguous: bool,
    /// Bytes to transfer.
    pub(crate) bytes: usize,
    /// Offset in bytes of the source's lowest byte from its first element (0 or less).
    pub low: isize,
    /// Number of bytes from the source's lowest to its highest byte, inclusive.
    pub span: usize,
    /// The loops of the copy; `None` if the bytes are copied in one piece.
    pub(crate) gather: Option<Gather>,
}

impl TransferPlan {
    /// Plans the transfer of a view with strides in **bytes**. `None` if it cannot be transferred this way: elements of
    /// a tensor share memory other than through an expanded dimension, or a number is out of range.
    pub fn new(shape: &[i64], byte_strides: &[i64], itemsize: usize, style: Style) -> Option<Self> {
        let item = itemsize as i64;
        let count = numel(shape)?;
        let natural = Dims::contiguous(shape)?;
        let total = usize::try_from(count.checked_mul(item)?).ok()?;
        let exact = natural.iter().zip(byte_strides).all(|(&expected, &actual)| expected.wrapping_mul(item) == actual);
        let whole = |strides: Dims, bytes: usize| Self {
            strides,
            contiguous: *strides == *natural,
            bytes,
            low: 0,
            span: bytes,
            gather: None,
        };
        if exact {
            return Some(whole(natural, total));
        }
        let mut strides = Dims::new(byte_strides)?;
        strides.as_mut_slice().iter_mut().for_each(|stride| *stride /= item);
        if count == 0 {
            let keep = style == Style::Tensor && strides.iter().all(|&stride| stride >= 0);
            return Some(whole(if keep { strides } else { natural }, 0));
        }

        // The dimensions along which the address changes, widest stride first.
        let mut order = [0usize; MAX_DIMS];
        let mut moving = 0;
        let mut expanded = false;
        for (dim, (&size, &stride)) in shape.iter().zip(byte_strides).enumerate() {
            if size > 1 && stride != 0 {
                order[moving] = dim;
                moving += 1;
            }
            expanded |= size > 1 && stride == 0;
        }
        let order = &mut order[..moving];
        order.sort_by_key(|&dim| std::cmp::Reverse(byte_strides[dim].unsigned_abs()));

        let mut expected = item;
        let dense = order.iter().rev().all(|&dim| {
            let fits = byte_strides[dim] == expected;
            expected = expected.wrapping_mul(shape[dim]);
            fits
        });
        // NumPy's pickles preserve only C and Fortran order, and so does torch's loader.
        let keeps_order = style == Style::Tensor || order.is_sorted() || order.iter().rev().is_sorted();
        if dense && keeps_order && !(expanded && style == Style::Array) {
            let bytes = extent(shape, &zero_unmoved(strides, shape), itemsize)?;
            if style == Style::Array {
                // The stride of a dimension of size 1 does not matter, and NumPy may report any value for it.
                (strides.as_mut_slice().iter_mut().zip(shape))
                    .filter(|(_, size)| **size == 1)
                    .for_each(|(s, _)| *s = 1);
            } else if strides.iter().any(|&stride| stride < 0) {
                return None;
            }
            return Some(whole(strides, bytes));
        }
        let (low, high) = offset_range(shape, byte_strides)?;
        let span = usize::try_from(high.checked_sub(low)?.checked_add(item)?).ok()?;
        let (strides, bytes, gather) = match style {
            Style::Array => {
                let every = (0..shape.len()).filter(|&dim| shape[dim] > 1);
                (natural, total, Gather::new(every, shape, byte_strides, itemsize))
            }
            Style::Tensor => {
                let mut taken = item;
                for &dim in order.iter().rev() {
                    if byte_strides[dim] < taken {
                        return None;
                    }
                    taken = taken.checked_add((shape[dim] - 1).checked_mul(byte_strides[dim])?)?;
                }
                let (strides, elements) = compact(shape, byte_strides, order)?;
                let bytes = usize::try_from(elements.checked_mul(item)?).ok()?;
                (strides, bytes, Gather::new(order.iter().copied(), shape, byte_strides, itemsize))
            }
        };
        let contiguous = *strides == *natural;
        Some(Self { strides, contiguous, bytes, low: isize::try_from(low).ok()?, span, gather: Some(gather) })
    }

    /// Plans the transfer of `len` plain bytes.
    pub fn bytes(len: usize) -> Self {
        let strides = Dims::EMPTY;
        Self { strides, contiguous: true, bytes: len, low: 0, span: len, gather: None }
    }

    /// Copies the planned bytes to `target`.
    ///
    /// # Safety
    /// `first` points to the first element of a readable view with the shape and strides of the plan. `target` points
    /// to `self.bytes` writable bytes that do not overlap the view.
    pub unsafe fn copy(&self, first: *const u8, target: *mut u8) {
        match &self.gather {
            // SAFETY: a view that is copied in one piece is dense: its memory is the `bytes` bytes from its first
            // element on, which the caller guarantees to be readable.
            None => unsafe { copy(first, target, self.bytes, self.bytes >= STREAM_FROM) },
            Some(gather) => {
                let mut target = target;
                // SAFETY: the loops visit exactly the elements of the view, and write `bytes` bytes in all.
                unsafe { gather.copy(first, &mut target) }
            }
        }
    }
}

/// Returns `strides` with 0 for each dimension of size 1.
fn zero_unmoved(mut strides: Dims, shape: &[i64]) -> Dims {
    (strides.as_mut_slice().iter_mut().zip(shape)).filter(|(_, size)| **size == 1).for_each(|(s, _)| *s = 0);
    strides
}

/// Returns the lowest and the highest byte offset, relative to the first element, at which an element of the view
/// starts.
fn offset_range(shape: &[i64], byte_strides: &[i64]) -> Option<(i64, i64)> {
    let (mut low, mut high) = (0i64, 0i64);
    for (&size, &stride) in shape.iter().zip(byte_strides) {
        let end = if size == 1 { 0 } else { (size - 1).checked_mul(stride)? };
        if end < 0 { low = low.checked_add(end)? } else { high = high.checked_add(end)? }
    }
    Some((low, high))
}

/// Returns the strides, in elements, of a layout without holes that keeps the order of the dimensions. Also returns the
/// number of elements that it spans.
fn compact(shape: &[i64], byte_strides: &[i64], order: &[usize]) -> Option<(Dims, i64)> {
    let mut strides = Dims::zeros(shape.len())?;
    let mut step = 1i64;
    for &dim in order.iter().rev() {
        strides.as_mut_slice()[dim] = step;
        step = step.checked_mul(shape[dim])?;
    }
    // As in a contiguous tensor, the stride of a dimension of size 1 is the stride of the next dimension times that
    // dimension's size.
    for dim in (0..shape.len()).rev() {
        if shape[dim] == 1 && byte_strides[dim] != 0 {
            let right = strides.get(dim + 1).map_or(1, |&stride| stride.max(1).saturating_mul(shape[dim + 1]));
            strides.as_mut_slice()[dim] = right;
        }
    }
    Some((strides, step))
}
