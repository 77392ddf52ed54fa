//! Copying of a strided view into dense memory.

use crate::config::MAX_DIMS;

/// Nested loops that copy the elements of a strided source to consecutive addresses.
#[derive(Clone, Copy, Debug)]
pub struct Gather {
    loops: u8,
    /// (size, stride in bytes), outermost first.
    dims: [(usize, isize); MAX_DIMS],
    /// Bytes per copy at the innermost level.
    run: usize,
}

impl Gather {
    /// Plans the loops over the dimensions in `order`, outermost first. `order` may omit dimensions of size 1, and
    /// expanded dimensions, whose elements are then copied only once.
    pub fn new(order: impl Iterator<Item = usize>, shape: &[i64], byte_strides: &[i64], itemsize: usize) -> Self {
        let mut gather = Self { loops: 0, dims: [(0, 0); MAX_DIMS], run: itemsize };
        for dim in order {
            let (size, stride) = (shape[dim] as usize, byte_strides[dim] as isize);
            let loops = usize::from(gather.loops);
            match gather.dims[..loops].last_mut() {
                // The outer dimension continues where this one ends, so one loop visits both.
                Some(outer) if stride.checked_mul(size as isize) == Some(outer.1) => {
                    *outer = (outer.0 * size, stride);
                }
                _ => {
                    gather.dims[loops] = (size, stride);
                    gather.loops += 1;
                }
            }
        }
        if let Some(&(size, stride)) = gather.dims[..usize::from(gather.loops)].last()
            && stride == itemsize as isize
        {
            gather.run = size * itemsize;
            gather.loops -= 1;
        }
        gather
    }

    /// Copies the elements of the view whose first element is at `first` to `target`, and moves `target` past the copy.
    ///
    /// # Safety
    /// As for [`TransferPlan::copy`](super::layout::TransferPlan::copy).
    pub unsafe fn copy(&self, first: *const u8, target: &mut *mut u8) {
        // SAFETY: the caller guarantees what the outermost level requires.
        unsafe { self.level(0, first, target) }
    }

    /// # Safety
    /// As for [`Self::copy`]: `at` points to an element, and the loops from `level` on stay inside the view.
    unsafe fn level(&self, level: usize, at: *const u8, target: &mut *mut u8) {
        let rest = &self.dims[level..usize::from(self.loops)];
        match *rest {
            // SAFETY: the caller guarantees that the `run` bytes at `at` are in the view and that the target has room.
            [] => unsafe { step(self.run, at, target) },
            [(size, stride)] => {
                for i in 0..size as isize {
                    // SAFETY: `i` is below the dimension's size, so the element is in the view.
                    unsafe { step(self.run, at.offset(i * stride), target) }
                }
            }
            [(size, stride), ..] => {
                for i in 0..size as isize {
                    // SAFETY: `i` is below the dimension's size, so the next level starts inside the view.
                    unsafe { self.level(level + 1, at.offset(i * stride), target) }
                }
            }
        }
    }
}

/// # Safety
/// `run` bytes are readable at `at` and writable at `*target`.
#[inline]
unsafe fn step(run: usize, at: *const u8, target: &mut *mut u8) {
    // SAFETY: the caller guarantees both ranges. The constant lengths let the compiler emit plain moves.
    unsafe {
        match run {
            4 => target.copy_from_nonoverlapping(at, 4),
            8 => target.copy_from_nonoverlapping(at, 8),
            1 => target.copy_from_nonoverlapping(at, 1),
            2 => target.copy_from_nonoverlapping(at, 2),
            _ => target.copy_from_nonoverlapping(at, run),
        }
        *target = target.add(run);
    }
}
