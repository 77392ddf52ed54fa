//! Running and joining the pin thread.

use std::time::Duration;

use pyo3::prelude::*;

use crate::codec::prepare::PinnedDecoder;
use crate::engine::Handle;
use crate::engine::pin::Body;
use crate::interop::detached::attached;
use crate::sys::clock;

/// The body of the pin thread. It attaches to Python once, and holds the GIL only where it needs it.
pub fn run(body: Body<PinnedDecoder>) -> Result<(), String> {
    attached(|py| {
        body.prepare().begin(py).map_err(|error| error.to_string())?;
        py.detach(|| body.run())
    })
}

/// Waits up to `seconds` for the pin thread to end, without the GIL; returns whether it has.
pub fn join(py: Python<'_>, handle: &Handle, seconds: Option<f64>) -> PyResult<bool> {
    if !handle.is_ours() {
        return Ok(true);
    }
    let Some(control) = handle.pinning() else { return Ok(true) };
    if control.is_current() {
        return Ok(false);
    }
    let limit = seconds.map_or(Duration::MAX, |seconds| {
        Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
    });
    let start = clock::monotonic();
    loop {
        let left = limit.saturating_sub(clock::monotonic() - start);
        if py.detach(|| control.join(left)) {
            return Ok(true);
        }
        if left.is_zero() {
            return Ok(false);
        }
        py.check_signals()?;
    }
}
