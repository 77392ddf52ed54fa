"""The main statistics as a flat dict with stable names."""

from __future__ import annotations

from rustloader.metrics.fields import StatsFields


def scalars(stats: StatsFields) -> dict[str, float]:
    """Computes the result of ``Stats.scalars()``."""
    loop = stats.next_seconds + stats.step_seconds
    waited = stats.first_seconds + stats.waited_seconds
    values: dict[str, float] = {
        "batches": stats.batches,
        "bytes": stats.bytes,
        "epochs": stats.epochs,
        "batches_per_second": stats.batches / stats.loop_seconds if stats.loop_seconds else 0.0,
        "wait_share": waited / loop if loop else 0.0,
        "wait_seconds": stats.waited_seconds,
        "first_wait_seconds": stats.first_seconds,
        "blocked_seconds": stats.blocked_seconds,
        "next_seconds": stats.next_seconds,
        "step_seconds": stats.step_seconds,
        "turnaround_seconds": stats.turnaround_seconds,
        "workers": stats.num_workers,
        "worker_fetch_seconds": sum(worker.fetch_seconds for worker in stats.workers),
        "worker_collate_seconds": sum(worker.collate_seconds for worker in stats.workers),
        "worker_pack_seconds": sum(worker.pack_seconds for worker in stats.workers),
        "worker_idle_seconds": sum(worker.idle_seconds for worker in stats.workers),
        "worker_resident_bytes": sum(worker.rss_bytes for worker in stats.workers),
        "arena_bytes": stats.arena.warm_bytes,
        "restarts": stats.faults.restarts,
        "stalls": stats.faults.stalls,
        "skipped_samples": stats.faults.skipped,
        "replaced_samples": stats.faults.replaced,
        "transfer_seconds": stats.transfers.seconds,
        "transfer_wait_seconds": stats.transfers.waited_seconds,
    }
    if stats.cache is not None:
        lookups = stats.cache.hits + stats.cache.misses
        values |= {
            "cache_hits": stats.cache.hits,
            "cache_misses": stats.cache.misses,
            "cache_hit_share": stats.cache.hits / lookups if lookups else 0.0,
            "cache_bytes": stats.cache.samples_bytes,
        }
    return {name: float(value) for name, value in values.items()}
