//! The first pass over a batch. It writes as if no object were repeated, and records what the second pass needs.

use super::seen::{Object, Seen, SeenLeaf};
use super::{Hold, Sink};
use crate::config::{INLINE_LIMIT, MAX_DEPTH};
use crate::error::Error;
use crate::interop::view::LeafView;
use crate::tree::layout::{Style, TransferPlan, extent, numel};
use crate::tree::{Kind, Placeholder, Writer};

/// The error for a batch that is not a plain tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotPlain;

pub type Plain<T = ()> = Result<T, NotPlain>;

/// A leaf that is copied as soon as the whole batch is known to be plain.
#[derive(Debug)]
pub struct PendingCopy<O> {
    /// Keeps the memory alive while the GIL is released.
    _owner: O,
    /// The position in the payload at which the leaf's index and offset will be written.
    pub place: Placeholder,
    first: *const u8,
    plan: TransferPlan,
    /// Required alignment of the leaf's address in shared memory, in bytes.
    align: usize,
    /// See [`Sink::adopt`].
    hold: Hold,
}

impl<O> PendingCopy<O> {
    /// Describes a copy of `len` bytes from `first` on to an address that is a multiple of `align`.
    ///
    /// # Safety
    /// `owner` keeps the bytes alive.
    pub unsafe fn of_bytes(owner: O, place: Placeholder, first: *const u8, len: usize, align: usize) -> Self {
        Self { _owner: owner, place, first, plan: TransferPlan::bytes(len), align, hold: Hold::Shared }
    }

    /// Passes the leaf to the sink: the sink adopts the leaf's memory or, if it cannot, reserves room, which `copy` then
    /// fills: it must perform the [`LeafCopy`]. Writes the leaf's index and offset to `place`.
    pub fn run<S: Sink>(
        &self,
        out: &mut Writer<'_>,
        sink: &mut S,
        copy: impl FnOnce(LeafCopy<'_>),
    ) -> Result<(), Error> {
        let Self { place, first, plan, align, hold, .. } = self;
        let fits = plan.gather.is_none() && (*first as usize).is_multiple_of(*align);
        // SAFETY: without a gather the plan's bytes are contiguous, and the owner keeps them alive.
        let adopt = || unsafe { sink.adopt(*first, plan.bytes, *hold) };
        let (leaf, offset) = match fits.then(adopt).flatten() {
            Some(adopted) => adopted,
            None => {
                let (leaf, target) = sink.reserve(plan.bytes)?;
                copy(LeafCopy { plan, source: *first, target });
                (leaf, 0)
            }
        };
        out.fill(*place, leaf, offset);
        Ok(())
    }
}

/// A copy of a leaf into memory that a sink has reserved for it.
pub struct LeafCopy<'a> {
    plan: &'a TransferPlan,
    source: *const u8,
    target: *mut u8,
}

// SAFETY: the owner of the pending copy keeps the source alive, and nothing else uses the target.
unsafe impl Send for LeafCopy<'_> {}

impl LeafCopy<'_> {
    /// Returns the number of bytes.
    pub fn bytes(&self) -> usize {
        self.plan.bytes
    }

    /// Copies the leaf.
    pub fn perform(self) {
        // SAFETY: the plan describes memory at `source` that the copy's owner keeps alive, by the contracts of
        // `PendingCopy::of_bytes` and `Draft::leaf`. The sink has reserved `plan.bytes` bytes at `target`.
        unsafe { self.plan.copy(self.source, self.target) }
    }
}

/// An unfinished payload.
pub struct Draft<'a, O> {
    pub out: Writer<'a>,
    seen: Seen<O>,
    /// Addresses of the containers around the current value.
    open: Vec<usize>,
    copies: Vec<PendingCopy<O>>,
}

impl<'a, O: Object + Clone> Draft<'a, O> {
    /// Creates a draft that appends to `out`.
    pub fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out: Writer::new(out), seen: Seen::new(), open: Vec::new(), copies: Vec::new() }
    }

    /// Returns the seen objects and the pending copies.
    pub fn finish(self) -> (Seen<O>, Vec<PendingCopy<O>>) {
        (self.seen, self.copies)
    }

    /// Records an object. Returns true if the caller must write it. If it is repeated, writes a gap instead and returns
    /// false. Returns an error if the object contains itself.
    #[inline]
    pub fn record(&mut self, value: &O) -> Plain<bool> {
        let (address, at) = (value.address(), self.out.len());
        let Some(first) = self.seen.object(address, at) else { return Ok(true) };
        if self.open.contains(&address) {
            return Err(NotPlain);
        }
        self.seen.repeats.push((at, first));
        self.out.gap();
        Ok(false)
    }

    /// Records a container that is nested `depth` levels deep, and returns what [`Self::record`] returns. Returns an
    /// error if it is nested too deeply. A new container is open until [`Self::leave`].
    #[inline]
    pub fn enter(&mut self, value: &O, depth: usize) -> Plain<bool> {
        if depth >= MAX_DEPTH {
            return Err(NotPlain);
        }
        let new = self.record(value)?;
        if new {
            self.open.push(value.address());
        }
        Ok(new)
    }

    /// Closes the innermost open container.
    #[inline]
    pub fn leave(&mut self) {
        self.open.pop();
    }

    /// Writes a bytes object as a leaf.
    ///
    /// # Safety
    /// `value` keeps `bytes` alive.
    pub unsafe fn bytes_outside(&mut self, value: &O, bytes: &[u8]) -> Plain {
        if self.record(value)? {
            let place = self.out.bytes_outside(bytes.len());
            // SAFETY: by the contract.
            let copy = unsafe { PendingCopy::of_bytes(value.clone(), place, bytes.as_ptr(), bytes.len(), 1) };
            self.copies.push(copy);
        }
        Ok(())
    }

    /// Writes a tensor or an array. For `is_sole`, see [`Hold::Sole`]. `storage_offset` is called only if there are no
    /// elements. It returns a tensor's offset in its storage, in elements, or `None` if the offset is 0.
    ///
    /// # Safety
    /// The view describes memory that `value` keeps alive.
    #[inline]
    pub unsafe fn leaf(
        &mut self,
        value: &O,
        view: &LeafView,
        is_sole: bool,
        storage_offset: impl FnOnce() -> Plain<Option<u64>>,
    ) -> Plain {
        let &LeafView { kind, dtype, ref shape, ref byte_strides, first } = view;
        let style = if kind == Kind::Tensor { Style::Tensor } else { Style::Array };
        let at = self.out.len();
        let Some(plan) = TransferPlan::new(shape, byte_strides, dtype.itemsize(), style) else {
            return self.self_overlapping(value, view);
        };
        if plan.span == 0 {
            // A view without elements has no extent to compare, so only the object's identity shows a repetition.
            if !self.record(value)? {
                return Ok(());
            }
            if let Some(offset) = storage_offset()? {
                self.out.empty(dtype, shape, &plan, offset);
                return Ok(());
            }
        }
        if plan.bytes < INLINE_LIMIT {
            // SAFETY: the plan describes this view; the caller guarantees that its memory is alive.
            unsafe { self.out.inline(kind, dtype, shape, &plan, first) };
        } else {
            let place = self.out.outside(kind, dtype, shape, &plan);
            let align = dtype.align();
            let hold = match kind {
                _ if is_sole => Hold::Sole,
                Kind::Tensor => Hold::Shared,
                Kind::Array | Kind::ReadOnlyArray => Hold::Private,
            };
            self.copies.push(PendingCopy { _owner: value.clone(), place, first, plan, align, hold });
        }
        if plan.span > 0 {
            let start = first.wrapping_offset(plan.low) as usize;
            let end = start.saturating_add(plan.span);
            let written = (at, self.out.len());
            self.seen.leaf(SeenLeaf { object: value.clone(), kind, overlaps_itself: false, written, start, end });
        }
        Ok(())
    }

    /// Writes a gap for a tensor whose elements share memory with each other; alias resolution fills the gap. Returns
    /// an error for an array, and for a view whose size is out of range.
    fn self_overlapping(&mut self, value: &O, view: &LeafView) -> Plain {
        let &LeafView { kind, dtype, ref shape, byte_strides: mut strides, first } = view;
        let item = dtype.itemsize() as i64;
        strides.as_mut_slice().iter_mut().for_each(|stride| *stride /= item);
        let count = numel(shape).filter(|count| count.checked_mul(item).is_some());
        let span = extent(shape, &strides, dtype.itemsize()).filter(|&span| span > 0);
        let (Kind::Tensor, Some(_), Some(span)) = (kind, count, span) else { return Err(NotPlain) };
        let at = self.out.len();
        self.out.gap();
        self.seen.has_self_overlaps = true;
        let (start, end) = (first as usize, (first as usize).saturating_add(span));
        let written = (at, self.out.len());
        self.seen.leaf(SeenLeaf { object: value.clone(), kind, overlaps_itself: true, written, start, end });
        Ok(())
    }
}
