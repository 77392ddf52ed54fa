"""Checks that classes and lambdas of a `__main__` without a file reach workers: `python - <try_definitions.py`."""

import multiprocessing

import rustloader


class Squares:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index * index


for method in multiprocessing.get_all_start_methods():
    loader = rustloader.DataLoader(
        Squares(), num_workers=2, collate_fn=lambda samples: samples, multiprocessing_context=method
    )
    assert list(loader) == [[0], [1], [4], [9]]
    print(f"{method}: classes and lambdas of stdin reach the workers")
