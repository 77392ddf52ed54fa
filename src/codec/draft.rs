//! The first pass over a batch: writes as if nothing came twice, and notes what the second pass has to know.

use super::Sink;
use super::seen::{Again, Met, Object, Seen};
use crate::config::{INLINE_LIMIT, MAX_DEPTH};
use crate::error::Error;
use crate::tree::dtype::Dtype;
use crate::tree::layout::{Dims, Plan, Style, extent, numel};
use crate::tree::{Kind, Placeholder, Writer};

/// Why an encoder stops before the end: the batch is no plain tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotPlain;

/// What encoding gives, unless the batch is no plain tree.
pub type Plain<T = ()> = Result<T, NotPlain>;

/// A leaf that is copied once the whole batch is known to be plain.
#[derive(Debug)]
pub struct PendingCopy<O> {
    /// Keeps the memory alive while the GIL is released.
    _owner: O,
    /// Where its number goes.
    pub place: Placeholder,
    first: *const u8,
    plan: Plan,
}

impl<O> PendingCopy<O> {
    /// The copy of `len` bytes from `first` on, which `owner` keeps alive.
    pub fn of_bytes(owner: O, place: Placeholder, first: *const u8, len: usize) -> Self {
        Self { _owner: owner, place, first, plan: Plan::bytes(len) }
    }

    /// Puts the leaf into the sink: memory that may travel as it is, or a copy, which `copy` makes of (plan, source, target).
    ///
    /// # Errors
    /// What the sink says.
    pub fn run<S: Sink>(
        &self,
        out: &mut Writer<'_>,
        sink: &mut S,
        copy: impl FnOnce(&Plan, *const u8, *mut u8),
    ) -> Result<(), Error> {
        let Self { place, first, plan, .. } = self;
        let (leaf, offset) = match plan.gather.is_none().then(|| sink.adopt(*first, plan.bytes)).flatten() {
            Some(adopted) => adopted,
            None => {
                let (leaf, target) = sink.reserve(plan.bytes)?;
                copy(plan, *first, target);
                (leaf, 0)
            }
        };
        out.fill(*place, leaf, offset);
        Ok(())
    }
}

/// A tensor or an array that is being encoded, with strides in bytes.
#[derive(Clone, Copy, Debug)]
pub struct LeafView<'a> {
    /// Which of both.
    pub kind: Kind,
    /// The element type.
    pub dtype: Dtype,
    /// The sizes.
    pub shape: &'a [i64],
    /// The strides, in bytes.
    pub byte_strides: &'a [i64],
    /// The first element.
    pub first: *const u8,
}

/// A payload in the making.
pub struct Draft<'a, O> {
    /// The payload.
    pub out: Writer<'a>,
    seen: Seen<O>,
    /// Addresses of the containers around the value that is being written.
    open: Vec<usize>,
    copies: Vec<PendingCopy<O>>,
}

impl<'a, O: Object + Clone> Draft<'a, O> {
    /// A draft that is appended to `out`.
    pub fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out: Writer::new(out), seen: Seen::new(), open: Vec::new(), copies: Vec::new() }
    }

    /// What was noted, and the copies that are still to be made.
    pub fn finish(self) -> (Seen<O>, Vec<PendingCopy<O>>) {
        (self.seen, self.copies)
    }

    /// Notes an object. False: it came before, and what stands for it has been written.
    ///
    /// # Errors
    /// It contains itself.
    #[inline]
    pub fn is_new(&mut self, value: &O) -> Plain<bool> {
        let (address, at) = (value.address(), self.out.len());
        let Some(first) = self.seen.object(address, at) else { return Ok(true) };
        if self.open.contains(&address) {
            return Err(NotPlain);
        }
        self.seen.again.push(Again { at, first });
        self.out.gap();
        Ok(false)
    }

    /// Notes a container that lies `depth` deep; false as for [`Self::is_new`]. To be closed by [`Self::leave`].
    ///
    /// # Errors
    /// It contains itself, or lies too deep.
    #[inline]
    pub fn enter(&mut self, value: &O, depth: usize) -> Plain<bool> {
        if depth >= MAX_DEPTH {
            return Err(NotPlain);
        }
        let new = self.is_new(value)?;
        if new {
            self.open.push(value.address());
        }
        Ok(new)
    }

    /// Ends the container that was entered last.
    #[inline]
    pub fn leave(&mut self) {
        self.open.pop();
    }

    /// Writes a bytes object that is large enough to be a leaf of its own.
    ///
    /// # Errors
    /// As for [`Self::is_new`].
    pub fn bytes_outside(&mut self, value: &O, bytes: &[u8]) -> Plain {
        if self.is_new(value)? {
            let place = self.out.bytes_outside(bytes.len());
            self.copies.push(PendingCopy::of_bytes(value.clone(), place, bytes.as_ptr(), bytes.len()));
        }
        Ok(())
    }

    /// Writes a tensor or an array. `storage_offset` gives where in its storage a tensor without elements begins, in elements.
    ///
    /// # Errors
    /// The view cannot travel as a leaf.
    ///
    /// # Safety
    /// The view describes memory that `value` keeps alive.
    #[inline]
    pub unsafe fn leaf(
        &mut self,
        value: &O,
        view: LeafView<'_>,
        storage_offset: impl FnOnce() -> Plain<Option<u64>>,
    ) -> Plain {
        let LeafView { kind, dtype, shape, byte_strides, first } = view;
        let style = if kind == Kind::Tensor { Style::Tensor } else { Style::Array };
        let at = self.out.len();
        let Some(plan) = Plan::new(shape, byte_strides, dtype.itemsize(), style) else {
            return self.window(value, view);
        };
        if plan.span == 0 {
            // Without memory the object alone shows that it came before.
            if !self.is_new(value)? {
                return Ok(());
            }
            if let Some(offset) = storage_offset()? {
                self.out.empty(dtype, shape, &plan, offset);
                return Ok(());
            }
        }
        if plan.bytes < INLINE_LIMIT {
            // SAFETY: the plan was made of this view, which the caller vouches for.
            unsafe { self.out.inline(kind, dtype, shape, &plan, first) };
        } else {
            let place = self.out.outside(kind, dtype, shape, &plan);
            self.copies.push(PendingCopy { _owner: value.clone(), place, first, plan });
        }
        if plan.span > 0 {
            let start = first.wrapping_offset(plan.low) as usize;
            let end = start.saturating_add(plan.span);
            let written = (at, self.out.len());
            self.seen.leaf(Met { object: value.clone(), kind, window: false, written, start, end });
        }
        Ok(())
    }

    /// Notes a tensor whose elements share memory; what it becomes is written when all others are known.
    fn window(&mut self, value: &O, view: LeafView<'_>) -> Plain {
        let LeafView { kind, dtype, shape, byte_strides, first } = view;
        let item = dtype.itemsize() as i64;
        let mut strides = Dims::new(byte_strides).ok_or(NotPlain)?;
        strides.as_mut_slice().iter_mut().for_each(|stride| *stride /= item);
        let count = numel(shape).filter(|count| count.checked_mul(item).is_some());
        let span = extent(shape, &strides, dtype.itemsize()).filter(|&span| span > 0);
        let (Kind::Tensor, Some(_), Some(span)) = (kind, count, span) else { return Err(NotPlain) };
        let at = self.out.len();
        self.out.gap();
        self.seen.windows = true;
        let (start, end) = (first as usize, (first as usize).saturating_add(span));
        let written = (at, self.out.len());
        self.seen.leaf(Met { object: value.clone(), kind, window: true, written, start, end });
        Ok(())
    }
}
