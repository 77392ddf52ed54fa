"""Positions between two snapshots: the dataset replays batches, and the sampler goes to where the replay begins."""

import pytest
import torch
from sample_data import Numbers
from torch.utils.data import RandomSampler, Sampler, WeightedRandomSampler

from rustloader import StatefulDataLoader

pytestmark = pytest.mark.ours


class Reversed(Sampler):
    """A sampler without a state, whose iterator is that of a list."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter([*range(self.size)][::-1])

    def __len__(self):
        return self.size


class Counting(Numbers):
    """Its state is the number of samples that were made."""

    made = 0

    def __getitem__(self, index):
        self.made += 1
        return super().__getitem__(index)

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


class Drawing(Numbers):
    """Samples are random numbers. The state is that of torch's generator."""

    def __getitem__(self, index):
        return torch.rand(()).item()

    def state_dict(self):
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state):
        torch.set_rng_state(state["generator"])


@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_samplers_without_a_state_repeat_no_batch(num_workers, every):
    def make():
        options = {"batch_size": 2, "num_workers": num_workers, "snapshot_every_n_steps": every}
        return StatefulDataLoader(Counting(10), sampler=Reversed(10), **options)

    expected = [batch.tolist() for batch in make()]
    for taken in range(len(expected)):
        iterator = iter(loader := make())
        assert [next(iterator).tolist() for _ in range(taken)] == expected[:taken]
        other = make()
        other.load_state_dict(loader.state_dict())
        assert [batch.tolist() for batch in other] == expected[taken:]


@pytest.mark.parametrize("sampler", [RandomSampler, lambda data: WeightedRandomSampler([1.0] * len(data), len(data))])
def test_first_snapshot_follows_the_draws_of_the_sampler(sampler):
    def make():
        data = Drawing(6)
        return StatefulDataLoader(data, sampler=sampler(data), batch_size=1, snapshot_every_n_steps=0)

    torch.manual_seed(3)
    iterator = iter(loader := make())
    expected = [next(iterator).item() for _ in range(3)]
    state = loader.state_dict(back=3)
    other = make()
    other.load_state_dict(state)
    resumed = iter(other)
    assert [next(resumed).item() for _ in range(3)] == expected


@pytest.mark.filterwarnings("ignore:an epoch of 0 batches")
def test_state_after_an_empty_rest_of_an_epoch_is_that_of_its_end():
    def make():
        return StatefulDataLoader(Drawing(2), batch_size=1)

    iterator = iter(first := make())
    next(iterator), next(iterator)
    second, third = make(), make()
    second.load_state_dict(first.state_dict())
    assert [*second] == []
    torch.manual_seed(5)
    state = second.state_dict()
    expected = [batch.item() for batch in second]
    third.load_state_dict(state)
    assert [batch.item() for batch in third] == expected
