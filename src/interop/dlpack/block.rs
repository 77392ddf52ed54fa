//! The single allocation behind a tensor. It contains DLPack's structures, the sizes, the strides, and either the lease
//! or the data. In this folder, "block" means this allocation, not a block of the arena.

use std::alloc::{Layout, alloc, dealloc};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use super::abi::{CPU, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor};
use crate::interop::memory::Memory;
use crate::interop::moving;
use crate::interop::view::Form;

/// A block that no tensor owns yet. It is freed on drop, unless [`Self::release_to_tensor`] has passed it to a tensor.
#[derive(Debug)]
pub struct Block<M: Memory>(NonNull<Header<M>>);

/// The head of the allocation. Sizes, strides and, in a copied block, the data follow.
struct Header<M> {
    versioned: DLManagedTensorVersioned,
    /// The same description in the structure that older versions of torch require.
    legacy: DLManagedTensor,
    /// [`UNOWNED`], [`DELETED`] or [`OWNED`].
    state: AtomicU8,
    layout: Layout,
    lease: Option<M>,
}

/// No tensor owns the block. The deleter frees nothing, because a failed import may or may not call it.
const UNOWNED: u8 = 0;
/// The deleter was called, either before a tensor owned the block or to free it.
const DELETED: u8 = 1;
/// A tensor owns the block; its deleter frees it.
const OWNED: u8 = 2;

const EMPTY: DLTensor = DLTensor {
    data: std::ptr::null_mut(),
    device: DLDevice { device_type: CPU, device_id: 0 },
    ndim: 0,
    dtype: DLDataType { code: 0, bits: 0, lanes: 0 },
    shape: std::ptr::null_mut(),
    strides: std::ptr::null_mut(),
    byte_offset: 0,
};

impl<M: Memory> Block<M> {
    /// Creates a block over leased memory, with the first element at byte `offset`. Returns `None` if there is no memory
    /// for the block, or if DLPack does not support the dtype. If the form does not fit the memory, returns the reason
    /// in words.
    pub fn leased(lease: M, offset: usize, form: Form<'_>) -> Result<Option<Self>, &'static str> {
        form.check(&lease, offset)?;
        let data = lease.ptr().wrapping_add(offset);
        let Some((block, _)) = Self::allocate(Some(lease), form, 0) else { return Ok(None) };
        // SAFETY: the header was just written, and only this function uses it.
        unsafe { (*block.0.as_ptr()).set_data(data) };
        Ok(Some(block))
    }

    /// Creates a block that contains a copy of `bytes`, which must have the length of the form's extent. Returns what
    /// [`Self::leased`] does.
    pub fn copied(bytes: &[u8], form: Form<'_>) -> Result<Option<Self>, &'static str> {
        if form.extent() != Some(bytes.len()) {
            return Err("the bytes of a tensor do not fit its sizes and strides");
        }
        let Some((block, data)) = Self::allocate(None, form, bytes.len()) else { return Ok(None) };
        // SAFETY: `allocate` reserved room for these bytes at `data`; only this function uses the header.
        unsafe {
            data.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            (*block.0.as_ptr()).set_data(data);
        }
        Ok(Some(block))
    }

    fn allocate(lease: Option<M>, form: Form<'_>, data_len: usize) -> Option<(Self, *mut u8)> {
        let Form { dtype, shape, strides } = form;
        let (code, bits, lanes) = dtype.dl()?;
        // torch aligns data to 64 bytes. For small data, an allocation with that alignment would be too expensive.
        let data_align = if data_len < 1024 { 16 } else { 64 };
        let (layout, dims_at) = Layout::new::<Header<M>>().extend(Layout::array::<i64>(shape.len() * 2).ok()?).ok()?;
        let (layout, data_at) = layout.extend(Layout::from_size_align(data_len, data_align).ok()?).ok()?;
        // SAFETY: the layout holds a header, so its size is not 0.
        let memory = NonNull::new(unsafe { alloc(layout) })?;
        let header = memory.cast::<Header<M>>();
        // SAFETY: `extend` gave these offsets inside the allocation, aligned for their types.
        let (dims, data) = unsafe { (memory.as_ptr().add(dims_at).cast::<i64>(), memory.as_ptr().add(data_at)) };
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
                deleter: Some(delete_versioned::<M>),
                flags: 0,
                dl_tensor: tensor(),
            },
            legacy: DLManagedTensor { dl_tensor: tensor(), manager_ctx: context, deleter: Some(delete_legacy::<M>) },
            state: AtomicU8::new(UNOWNED),
            layout,
            lease,
        };
        // SAFETY: the allocation has room for the header, the sizes and the strides.
        unsafe {
            header.write(value);
            dims.copy_from_nonoverlapping(shape.as_ptr(), shape.len());
            dims.add(shape.len()).copy_from_nonoverlapping(strides.as_ptr(), shape.len());
        }
        Some((Self(header), data))
    }

    /// Returns the structure for the exchange API.
    pub fn versioned(&self) -> *mut DLManagedTensorVersioned {
        // SAFETY: the header lives; no reference is created.
        unsafe { &raw mut (*self.0.as_ptr()).versioned }
    }

    /// Returns the structure for a capsule.
    pub fn legacy(&self) -> *mut DLManagedTensor {
        // SAFETY: the header lives; no reference is created.
        unsafe { &raw mut (*self.0.as_ptr()).legacy }
    }

    /// Passes the block to the tensor that was imported from it. The tensor's deleter then frees the block. The caller
    /// must have the only reference to the tensor.
    pub fn release_to_tensor(self) {
        // SAFETY: the header lives, because the deleter frees nothing before the store below.
        let state = unsafe { &(*self.0.as_ptr()).state };
        if state.load(Ordering::Relaxed) == DELETED {
            return;
        }
        // SYNC: handed-over (pairs with the Acquire in `delete`). The tensor reaches other threads through the GIL, so
        // its deleter sees this store.
        state.store(OWNED, Ordering::Release);
        std::mem::forget(self);
    }
}

impl<M: Memory> Drop for Block<M> {
    fn drop(&mut self) {
        // SAFETY: no tensor owns the block, so nothing else frees it.
        unsafe { free(self.0) }
    }
}

impl<M> Header<M> {
    fn set_data(&mut self, data: *mut u8) {
        self.versioned.dl_tensor.data = data.cast();
        self.legacy.dl_tensor.data = data.cast();
    }
}

/// # Safety
/// `header` must come from [`Block::allocate`] and must not be used any more.
unsafe fn free<M: Memory>(header: NonNull<Header<M>>) {
    // SAFETY: the header is moved out once, and its memory is freed with the layout with which it was allocated.
    let lease = unsafe {
        let Header { layout, lease, .. } = header.read();
        dealloc(header.as_ptr().cast(), layout);
        lease
    };
    // A panic must not unwind into torch's destructors.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(lease)));
}

/// # Safety
/// `context` must be the `manager_ctx` of a `Block<M>`.
unsafe fn delete<M: Memory>(context: *mut std::ffi::c_void) {
    let Some(header) = NonNull::new(context.cast::<Header<M>>()) else { return };
    // SAFETY: a deleter is called once, and the header lives until then. Only an owned block is freed here.
    unsafe {
        // SYNC: handed-over (pairs with the Release in `release_to_tensor`).
        if (*header.as_ptr()).state.swap(DELETED, Ordering::Acquire) != OWNED {
            return;
        }
        let data = (*header.as_ptr()).legacy.dl_tensor.data.cast::<u8>();
        if !moving::catch(data, context, free_caught::<M>) {
            free(header);
        }
    }
}

/// # Safety
/// The same as for [`free`]; `header` must be the address of a `Header<M>`.
unsafe fn free_caught<M: Memory>(header: *mut std::ffi::c_void) {
    if let Some(header) = NonNull::new(header.cast::<Header<M>>()) {
        // SAFETY: by the contract.
        unsafe { free(header) }
    }
}

unsafe extern "C" fn delete_versioned<M: Memory>(managed: *mut DLManagedTensorVersioned) {
    // SAFETY: torch calls the deleter with the structure that contains it.
    unsafe { delete::<M>((*managed).manager_ctx) }
}

unsafe extern "C" fn delete_legacy<M: Memory>(managed: *mut DLManagedTensor) {
    // SAFETY: torch calls the deleter with the structure that contains it.
    unsafe { delete::<M>((*managed).manager_ctx) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::interop::memory::Heap;
    use crate::tree::dtype::Dtype;

    /// Memory that counts its releases.
    struct Counted(Heap, Arc<AtomicU8>);

    // SAFETY: the memory is that of a `Heap`.
    unsafe impl Memory for Counted {
        fn ptr(&self) -> *mut u8 {
            self.0.ptr()
        }

        fn len(&self) -> usize {
            self.0.len()
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn counted() -> (Block<Counted>, *mut u8, Arc<AtomicU8>) {
        let released = Arc::default();
        let memory = Counted(Heap::new(64).unwrap(), Arc::clone(&released));
        let ptr = memory.ptr();
        let form = Form { dtype: Dtype::INT64, shape: &[2, 3], strides: &[3, 1] };
        (Block::leased(memory, 8, form).unwrap().unwrap(), ptr, released)
    }

    fn released(count: &AtomicU8) -> u8 {
        count.load(Ordering::Relaxed)
    }

    #[test]
    fn both_structures_describe_the_view() {
        let (block, ptr, _) = counted();
        // SAFETY: the block lives.
        let (versioned, legacy) = unsafe { (&*block.versioned(), &*block.legacy()) };
        assert_eq!((versioned.version.major, versioned.flags), (1, 0));
        for tensor in [&versioned.dl_tensor, &legacy.dl_tensor] {
            assert_eq!(tensor.data.cast::<u8>(), ptr.wrapping_add(8));
            assert_eq!((tensor.ndim, tensor.byte_offset, tensor.device.device_type), (2, 0, CPU));
            assert_eq!((tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes), (0, 64, 1));
            // SAFETY: the block has two sizes and two strides.
            let (shape, strides) =
                unsafe { (std::slice::from_raw_parts(tensor.shape, 2), std::slice::from_raw_parts(tensor.strides, 2)) };
            assert_eq!((shape, strides), (&[2, 3][..], &[3, 1][..]));
        }
    }

    #[test]
    fn a_copied_block_holds_an_aligned_copy() {
        for len in [0, 5, 4096] {
            let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
            let block = Block::<Heap>::copied(&bytes, Form::bytes(&[len as i64])).unwrap().unwrap();
            // SAFETY: the block lives, and holds a copy of the bytes.
            let (data, copy) = unsafe {
                let data = (*block.versioned()).dl_tensor.data.cast::<u8>();
                (data, std::slice::from_raw_parts(data, len))
            };
            assert_eq!(copy, bytes);
            assert!((data as usize).is_multiple_of(if len < 1024 { 16 } else { 64 }));
        }
    }

    #[test]
    fn memory_is_released_once() {
        // The block was never imported.
        let (block, _, count) = counted();
        drop(block);
        assert_eq!(released(&count), 1);
        // The import failed after calling the deleter.
        let (block, _, count) = counted();
        // SAFETY: the deleter is called with the structure to which it belongs.
        unsafe { (*block.versioned()).deleter.unwrap()(block.versioned()) };
        assert_eq!(released(&count), 0);
        drop(block);
        assert_eq!(released(&count), 1);
        // A tensor owned the block, and was dropped before or after the import returned.
        for early in [true, false] {
            let (block, _, count) = counted();
            let legacy = block.legacy();
            // SAFETY: as above; the structure lives until the deleter has run on an owned block.
            let delete = || unsafe { (*legacy).deleter.unwrap()(legacy) };
            if early {
                delete();
            }
            block.release_to_tensor();
            if !early {
                assert_eq!(released(&count), 0);
                delete();
            }
            assert_eq!(released(&count), 1);
        }
    }
}
