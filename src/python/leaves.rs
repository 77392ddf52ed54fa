//! The core's leases and leaves, as the codec wants them.

use crate::codec::Source;
use crate::engine::completions::Leaves;
use crate::error::Error;
use crate::interop::dlpack;
use crate::shm::lease::Lease;

impl dlpack::Lease for Lease {
    fn ptr(&self) -> *mut u8 {
        Lease::ptr(self)
    }

    fn len(&self) -> usize {
        Lease::len(self)
    }
}

impl Source for Leaves {
    type Lease = Lease;

    fn leaf(&mut self, index: u32) -> Result<Lease, Error> {
        self.take(index as usize)
    }
}
