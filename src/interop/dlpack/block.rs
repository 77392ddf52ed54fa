//! One allocation for what a tensor over our memory needs: DLPack's structures, sizes, strides, the lease, or
//! the data itself.

use std::alloc::{Layout, alloc, dealloc};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use super::{
    CPU, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor, Lease,
};
use crate::tree::dtype::Dtype;

/// A block in the making: it is freed on drop unless [`Self::hand_over`] gave it to a tensor.
pub struct Block<L: Lease>(NonNull<Header<L>>);

/// The head of the allocation; sizes, strides and, for small tensors, the data follow.
struct Header<L> {
    versioned: DLManagedTensorVersioned,
    /// The same for older versions of torch.
    legacy: DLManagedTensor,
    /// One of the three below.
    state: AtomicU8,
    layout: Layout,
    lease: Option<L>,
}

/// The block is ours. The deleter frees nothing then: an import that fails may call it or not.
const OURS: u8 = 0;
/// The deleter has been called while the block was ours.
const LET_GO: u8 = 1;
/// A tensor owns the block; its deleter frees it.
const TENSORS: u8 = 2;

const EMPTY: DLTensor = DLTensor {
    data: std::ptr::null_mut(),
    device: DLDevice { device_type: CPU, device_id: 0 },
    ndim: 0,
    dtype: DLDataType { code: 0, bits: 0, lanes: 0 },
    shape: std::ptr::null_mut(),
    strides: std::ptr::null_mut(),
    byte_offset: 0,
};

impl<L: Lease> Block<L> {
    /// A block over leased memory, whose first element lies at `byte_offset`. `None`: no memory, or a dtype
    /// that DLPack cannot name.
    ///
    /// The caller has checked that the view stays inside the lease.
    pub fn leased(
        lease: L,
        byte_offset: usize,
        dtype: Dtype,
        shape: &[i64],
        strides: &[i64],
    ) -> Option<Self> {
        let data = lease.ptr().wrapping_add(byte_offset);
        let (block, _) = Self::allocate(Some(lease), dtype, shape, strides, 0)?;
        // SAFETY: the header was just written and nobody else knows it.
        unsafe { (*block.0.as_ptr()).set_data(data) };
        Some(block)
    }

    /// A block that holds a copy of `bytes` itself.
    pub fn copied(bytes: &[u8], dtype: Dtype, shape: &[i64], strides: &[i64]) -> Option<Self> {
        let (block, data) = Self::allocate(None, dtype, shape, strides, bytes.len())?;
        // SAFETY: `allocate` left room for these bytes at `data`; the header is still ours alone.
        unsafe {
            data.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            (*block.0.as_ptr()).set_data(data);
        }
        Some(block)
    }

    fn allocate(
        lease: Option<L>,
        dtype: Dtype,
        shape: &[i64],
        strides: &[i64],
        data_len: usize,
    ) -> Option<(Self, *mut u8)> {
        let (code, bits, lanes) = dtype.dl()?;
        // torch aligns to 64 bytes; for little data that costs the allocator more than it gives.
        let data_align = if data_len < 1024 { 16 } else { 64 };
        let (layout, dims_at) =
            Layout::new::<Header<L>>().extend(Layout::array::<i64>(shape.len() * 2).ok()?).ok()?;
        let (layout, data_at) = layout.extend(Layout::from_size_align(data_len, data_align).ok()?).ok()?;
        // SAFETY: the layout holds a header, so its size is not 0.
        let memory = NonNull::new(unsafe { alloc(layout) })?;
        let header = memory.cast::<Header<L>>();
        // SAFETY: `extend` gave these offsets inside the allocation, aligned for their types.
        let (dims, data) =
            unsafe { (memory.as_ptr().add(dims_at).cast::<i64>(), memory.as_ptr().add(data_at)) };
        let tensor = || DLTensor {
            ndim: shape.len() as i32,
            dtype: DLDataType { code, bits, lanes },
            shape: dims,
            strides: dims.wrapping_add(shape.len()),
            ..EMPTY
        };
        let context = header.as_ptr().cast();
        let value = Header {
            versioned: DLManagedTensorVersioned {
                version: DLPackVersion { major: 1, minor: 0 },
                manager_ctx: context,
                deleter: Some(delete_versioned::<L>),
                flags: 0,
                dl_tensor: tensor(),
            },
            legacy: DLManagedTensor {
                dl_tensor: tensor(),
                manager_ctx: context,
                deleter: Some(delete_legacy::<L>),
            },
            state: AtomicU8::new(OURS),
            layout,
            lease,
        };
        // SAFETY: the allocation has room for the header and for twice as many numbers as there are
        // dimensions.
        unsafe {
            header.write(value);
            dims.copy_from_nonoverlapping(shape.as_ptr(), shape.len());
            dims.add(shape.len()).copy_from_nonoverlapping(strides.as_ptr(), shape.len());
        }
        Some((Self(header), data))
    }

    /// The structure for the exchange API.
    pub fn versioned(&self) -> *mut DLManagedTensorVersioned {
        // SAFETY: the header lives; no reference is made.
        unsafe { &raw mut (*self.0.as_ptr()).versioned }
    }

    /// The structure for a capsule.
    pub fn legacy(&self) -> *mut DLManagedTensor {
        // SAFETY: the header lives; no reference is made.
        unsafe { &raw mut (*self.0.as_ptr()).legacy }
    }

    /// A tensor owns the block from now on: its deleter frees it. The caller still holds the only reference
    /// to that tensor.
    pub fn hand_over(self) {
        // SAFETY: the header lives, because the deleter has freed nothing up to now.
        let state = unsafe { &(*self.0.as_ptr()).state };
        if state.load(Ordering::Relaxed) == LET_GO {
            return;
        }
        // SYNC: handed-over (pairs with the Acquire in `delete`). The tensor reaches other threads through the GIL, so that
        // its deleter finds this store.
        state.store(TENSORS, Ordering::Release);
        std::mem::forget(self);
    }
}

impl<L: Lease> Drop for Block<L> {
    fn drop(&mut self) {
        // SAFETY: not handed over, so nobody else frees it.
        unsafe { free(self.0) }
    }
}

impl<L> Header<L> {
    fn set_data(&mut self, data: *mut u8) {
        self.versioned.dl_tensor.data = data.cast();
        self.legacy.dl_tensor.data = data.cast();
    }
}

/// # Safety
/// `header` was made by [`Block::allocate`] and is used by nobody any more.
unsafe fn free<L: Lease>(header: NonNull<Header<L>>) {
    // SAFETY: the header is read out once, and its memory freed with the layout that it was allocated with.
    let lease = unsafe {
        let Header { layout, lease, .. } = header.read();
        dealloc(header.as_ptr().cast(), layout);
        lease
    };
    // A panic must not pass through torch's destructors.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(lease)));
}

/// # Safety
/// `context` is the `manager_ctx` of a block of `L`.
unsafe fn delete<L: Lease>(context: *mut std::ffi::c_void) {
    let Some(header) = NonNull::new(context.cast::<Header<L>>()) else { return };
    // SAFETY: a deleter is called once, and the header lives until then; a block of ours is not freed here.
    unsafe {
        // SYNC: handed-over (pairs with the Release in `hand_over`).
        if (*header.as_ptr()).state.swap(LET_GO, Ordering::Acquire) == TENSORS {
            free(header);
        }
    }
}

unsafe extern "C" fn delete_versioned<L: Lease>(managed: *mut DLManagedTensorVersioned) {
    // SAFETY: torch calls it with the structure that it was given.
    unsafe { delete::<L>((*managed).manager_ctx) }
}

unsafe extern "C" fn delete_legacy<L: Lease>(managed: *mut DLManagedTensor) {
    // SAFETY: torch calls it with the structure that it was given.
    unsafe { delete::<L>((*managed).manager_ctx) }
}
