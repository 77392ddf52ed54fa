"""The shutdown routine that programs copy out of torch."""

from torch.utils.data import _utils


def copied_shutdown(iterator):
    """The shutdown routine of some version of torch, as programs copy it, with a longer join."""
    if iterator._shutdown:
        return
    iterator._shutdown = True
    try:
        if hasattr(iterator, "_pin_memory_thread"):
            iterator._pin_memory_thread_done_event.set()
            iterator._worker_result_queue.put((None, None))
            iterator._pin_memory_thread.join()
            iterator._worker_result_queue.cancel_join_thread()
            iterator._worker_result_queue.close()
        iterator._workers_done_event.set()
        for worker_id in range(len(iterator._workers)):
            if iterator._persistent_workers or iterator._workers_status[worker_id]:
                iterator._mark_worker_as_unavailable(worker_id, shutdown=True)
        for worker in iterator._workers:
            worker.join(timeout=60)
        for queue in iterator._index_queues:
            queue.cancel_join_thread()
            queue.close()
    finally:
        if iterator._worker_pids_set:
            _utils.signal_handling._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        for worker in iterator._workers:
            if worker.is_alive():
                worker.terminate()
