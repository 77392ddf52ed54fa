"""Made-up figures of `python -m rustloader bench`."""

from support import rustloader

if rustloader is not None:
    from rustloader.tools.bench import passes, results


def a_pass(rate, **kw):
    """A pass at the given rate, and at twice that rate in the steady state."""
    figures = {
        "batches": 100,
        "complete": True,
        "steady_batches_per_second": 2 * rate,
        "steady_cpu_seconds_per_batch": 0.001,
        "seconds": 100 / rate,
        "first_batch_seconds": 0.5,
        "batches_per_second": rate,
        "cpu_seconds_per_batch": 0.002,
    }
    return passes.Pass(**figures | kw)


def a_point(workers, torch_rates, rustloader_rates, batches=100, **kw):
    """A point for a number of workers, with a pass for each rate of either side."""

    def side(rates):
        return results.SideRates([a_pass(rate, batches=batches) for rate in rates], 1e6, 50_000_000)

    return results.Point(workers, side(torch_rates), side(rustloader_rates), **kw)
