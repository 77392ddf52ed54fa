//! Alias resolution, the second pass of encoding: repeated objects become references to a mark, and tensors that share
//! memory get a common storage. Most batches do not need this pass.

use std::collections::HashMap;

use super::draft::{NotPlain, PendingCopy, Plain};
use super::seen::{Extent, Object, Seen, SeenLeaf};
use crate::config::{INLINE_LIMIT, OVERLAP_STEPS, STORAGE_WASTE};
use crate::interop::view::TensorView;
use crate::tree::layout::{Style, TransferPlan};
use crate::tree::overlap::{Lattice, any_shared, components};
use crate::tree::{Kind, Placeholder, Writer};

/// The tensors of a batch.
pub trait Tensors {
    type Object: Object + Clone;

    /// Returns a view of a tensor's memory; `None` if the tensor is no longer plain.
    fn view<'t>(&self, tensor: &'t Self::Object) -> Option<TensorView<'t>>;

    /// Returns an object that keeps all of `tensors` alive; `None` if it cannot be created.
    fn keep_alive(&self, tensors: Vec<&Self::Object>) -> Option<Self::Object>;
}

/// A change to one part of the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Change {
    /// Inserts a mark for the value that follows; replaces nothing.
    Mark,
    /// Replaces a repeated object with a reference to its first encoding, which starts at this position.
    Back(usize),
    /// Replaces a tensor with a view into a common storage that begins at address `low`. `leaf` is the tensor's index
    /// in [`Seen::leaves`].
    Shared { leaf: usize, storage: usize, low: usize },
}

/// Memory that several tensors share. It is copied only once.
struct SharedMemory<O> {
    low: usize,
    len: usize,
    /// The largest alignment of the tensors' elements.
    align: usize,
    /// An object that keeps the tensors, and so this memory, alive.
    tensors: O,
}

struct Aliases<'a, T: Tensors> {
    tensors: &'a T,
    leaves: &'a [SeenLeaf<T::Object>],
    /// (start and end of the replaced part, change).
    changes: Vec<(usize, usize, Change)>,
    storages: Vec<SharedMemory<T::Object>>,
}

/// Rewrites the payload, which begins at `from` in `out`. Returns those of `copies` that are still needed, with updated
/// placeholders, and the copies of the common storages. Returns an error if the tensors share memory in a way that the
/// payload cannot describe.
pub fn resolve<T: Tensors>(
    tensors: &T,
    seen: &Seen<T::Object>,
    extents: &[Extent],
    out: &mut Vec<u8>,
    from: usize,
    copies: Vec<PendingCopy<T::Object>>,
) -> Plain<Vec<PendingCopy<T::Object>>> {
    let mut aliases = Aliases { tensors, leaves: &seen.leaves, changes: Vec::new(), storages: Vec::new() };
    aliases.changes.extend(seen.repeats.iter().map(|&(at, first)| (at, at + 1, Change::Back(first))));
    let unique = aliases.repeated_leaves(extents);
    let mut result = Ok(());
    components(
        &unique,
        |extent| (extent.start, extent.end),
        |component| {
            if result.is_ok() {
                result = aliases.component(component);
            }
        },
    );
    result?;
    let old = out.split_off(from);
    Ok(aliases.write(&old, out, from, copies))
}

impl<T: Tensors> Aliases<'_, T> {
    /// Turns repeated leaves into references. Returns the extents of the distinct tensors, sorted by address.
    fn repeated_leaves(&mut self, extents: &[Extent]) -> Vec<Extent> {
        let mut first: HashMap<usize, usize> = HashMap::new();
        // In the order of the payload, so that references point backward.
        let mut ordered: Vec<&Extent> = extents.iter().collect();
        ordered.sort_unstable_by_key(|extent| extent.leaf);
        let mut unique = Vec::new();
        for extent in ordered {
            let seen_leaf = &self.leaves[extent.leaf];
            let earlier = *first.entry(seen_leaf.object.address()).or_insert(extent.leaf);
            if earlier != extent.leaf {
                let first = self.leaves[earlier].written.0;
                self.changes.push((seen_leaf.written.0, seen_leaf.written.1, Change::Back(first)));
            } else if seen_leaf.kind == Kind::Tensor {
                unique.push(*extent);
            }
        }
        unique.sort_unstable();
        unique
    }

    /// Decides whether tensors with overlapping extents are sent separately or in a common storage.
    fn component(&mut self, component: &[Extent]) -> Plain {
        if let [Extent { leaf, .. }] = component
            && !self.leaves[*leaf].overlaps_itself
        {
            return Ok(());
        }
        let (leaves, tensors) = (self.leaves, self.tensors);
        let view = |extent: &Extent| {
            let view = tensors.view(&leaves[extent.leaf].object).ok_or(NotPlain)?;
            if view.ptr() as usize == extent.start { Ok(view) } else { Err(NotPlain) }
        };
        let views = component.iter().map(view).collect::<Result<Vec<_>, _>>()?;
        let lattices: Vec<_> = component.iter().zip(&views).map(|(e, view)| lattice(e, view)).collect();
        let bytes: usize = lattices.iter().zip(&views).map(|(lattice, view)| bytes_alone(lattice, view)).sum();
        let low = component[0].start;
        let len = component.iter().map(|extent| extent.end).max().unwrap_or(low) - low;
        // A large common storage is worth its gaps only if the tensors really share elements.
        if len > bytes.saturating_mul(STORAGE_WASTE) && !any_shared(&lattices, OVERLAP_STEPS) {
            for (extent, view) in component.iter().zip(&views) {
                if leaves[extent.leaf].overlaps_itself {
                    self.share(std::slice::from_ref(extent), std::slice::from_ref(view), extent.end - extent.start)?;
                }
            }
            return Ok(());
        }
        self.share(component, &views, len)
    }

    /// Puts tensors into a common storage of `len` bytes that begins at the address of the first one.
    fn share(&mut self, extents: &[Extent], views: &[TensorView<'_>], len: usize) -> Plain {
        let (low, storage) = (extents[0].start, self.storages.len());
        for (extent, view) in extents.iter().zip(views) {
            if !(extent.start - low).is_multiple_of(view.dtype().itemsize()) {
                return Err(NotPlain);
            }
            let (at, end) = self.leaves[extent.leaf].written;
            self.changes.push((at, end, Change::Shared { leaf: extent.leaf, storage, low }));
        }
        let objects = extents.iter().map(|extent| &self.leaves[extent.leaf].object);
        let tensors = self.tensors.keep_alive(objects.collect()).ok_or(NotPlain)?;
        let align = views.iter().map(|view| view.dtype().align()).max().unwrap_or(1);
        self.storages.push(SharedMemory { low, len, align, tensors });
        Ok(())
    }

    /// Writes the new payload: the storages, then the old payload with the changes. Returns the copies to perform.
    fn write(
        mut self,
        old: &[u8],
        out: &mut Vec<u8>,
        from: usize,
        copies: Vec<PendingCopy<T::Object>>,
    ) -> Vec<PendingCopy<T::Object>> {
        let back = |&(_, _, change): &_| if let Change::Back(first) = change { Some(first) } else { None };
        let mut marks: Vec<usize> = self.changes.iter().filter_map(back).collect();
        marks.sort_unstable();
        marks.dedup();
        self.changes.extend(marks.iter().map(|&at| (at, at, Change::Mark)));
        // A mark sorts before the replacement of the value that it marks.
        self.changes.sort_unstable_by_key(|&(at, _, change)| (at, change));

        let mut writer = Writer::new(out);
        let mut new_copies = self.write_storages(&mut writer);
        let mut copies = copies.into_iter().peekable();
        let mut copied = from;
        let end = (from + old.len(), from + old.len(), None);
        for (at, part_end, change) in self.changes.iter().map(|&(a, b, c)| (a, b, Some(c))).chain([end]) {
            let new_at = writer.len();
            while let Some(mut copy) = copies.next_if(|copy| copy.place.at() < at) {
                copy.place = Placeholder::moved(copy.place.at() - copied + new_at);
                new_copies.push(copy);
            }
            writer.raw(&old[copied - from..at - from]);
            // The leaves of a replaced part are not copied.
            while copies.next_if(|copy| copy.place.at() < part_end).is_some() {}
            copied = part_end;
            match change {
                Some(Change::Mark) => writer.mark(),
                Some(Change::Back(first)) => writer.back(marks.partition_point(|&mark| mark < first)),
                Some(Change::Shared { leaf, storage, low }) => {
                    self.write_shared(&mut writer, leaf, storage, low);
                }
                None => {}
            }
        }
        new_copies
    }

    fn write_storages(&self, writer: &mut Writer<'_>) -> Vec<PendingCopy<T::Object>> {
        let mut copies = Vec::new();
        for SharedMemory { low, len, align, tensors } in &self.storages {
            let (first, len) = (*low as *const u8, *len);
            if len < INLINE_LIMIT {
                // SAFETY: the extents of live tensors cover the `len` bytes from `low` on without gaps, so all of these
                // bytes are in the tensors' storages. The GIL is held, as for every read of a tensor's memory.
                writer.storage(unsafe { std::slice::from_raw_parts(first, len) });
            } else {
                let place = writer.storage_outside(len);
                // SAFETY: as above; `tensors` keeps the tensors alive.
                copies.push(unsafe { PendingCopy::of_bytes(tensors.clone(), place, first, len, *align) });
            }
        }
        copies
    }

    fn write_shared(&self, writer: &mut Writer<'_>, leaf: usize, storage: usize, low: usize) {
        let view = self.tensors.view(&self.leaves[leaf].object);
        // `component` has just read the view, so there is one. If there were none, nothing would be written here, and
        // the reader would refuse the payload.
        if let Some(view) = view {
            writer.shared(view.dtype(), view.shape(), view.strides(), storage, view.ptr() as usize - low);
        }
    }
}

fn lattice<'a>(extent: &Extent, view: &'a TensorView<'_>) -> Lattice<'a> {
    Lattice {
        start: extent.start,
        extent: extent.end - extent.start,
        shape: view.shape(),
        strides: view.strides(),
        itemsize: view.dtype().itemsize(),
    }
}

/// Returns the number of bytes that a tensor takes if it is sent separately.
fn bytes_alone(lattice: &Lattice<'_>, view: &TensorView<'_>) -> usize {
    let item = lattice.itemsize as i64;
    let mut byte_strides = *view.strides();
    byte_strides.as_mut_slice().iter_mut().for_each(|stride| *stride = stride.saturating_mul(item));
    let plan = TransferPlan::new(view.shape(), &byte_strides, lattice.itemsize, Style::Tensor);
    plan.map_or(lattice.extent, |plan| plan.bytes)
}
