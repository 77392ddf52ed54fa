//! Plans of batches for sequences. `_core.pyi` documents them.

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::interop::collate;
use crate::interop::tensor::Bridge;
use crate::sequences::{self, Order, Plan};

#[pyclass(frozen, module = "rustloader._core")]
pub struct SequencePlan(Plan);

/// `shuffle`, the seed, the epoch and the window.
type OrderTuple = (bool, u64, u64, usize);

/// Plans an epoch without the GIL.
fn planned(
    py: Python<'_>,
    lengths: &Bound<'_, PyAny>,
    (shuffle, seed, epoch, window): OrderTuple,
    plan: impl Fn(&[u32], &Order) -> Plan + Sync,
) -> PyResult<SequencePlan> {
    // A copy, because another thread may write to the array meanwhile.
    let lengths = PyBuffer::<u32>::get(lengths)?.to_vec(py)?;
    Ok(SequencePlan(py.detach(|| plan(&lengths, &Order { shuffle, seed, epoch, window }))))
}

#[pymethods]
impl SequencePlan {
    #[staticmethod]
    fn budget(
        py: Python<'_>,
        lengths: &Bound<'_, PyAny>,
        order: OrderTuple,
        max_tokens: u64,
        max_samples: u64,
        multiple: u64,
    ) -> PyResult<Self> {
        let plan = |it: &[u32], order: &Order| sequences::budget(it, order, max_tokens, max_samples, multiple);
        planned(py, lengths, order, plan)
    }

    #[staticmethod]
    fn packs(
        py: Python<'_>,
        lengths: &Bound<'_, PyAny>,
        order: OrderTuple,
        capacity: usize,
        per_batch: usize,
        skip_too_long: bool,
    ) -> PyResult<Self> {
        let plan = |it: &[u32], order: &Order| sequences::packs(it, order, capacity, per_batch, skip_too_long);
        planned(py, lengths, order, plan)
    }

    fn __len__(&self) -> usize {
        self.0.batches()
    }

    fn batch<'py>(&self, py: Python<'py>, number: usize) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.batch(number))
    }
}

#[pyfunction]
pub fn int_tensor(py: Python<'_>, ints: &Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
    collate::numbers(py, Bridge::get(py)?, ints)
}
