"""Names that the pages of the documentation presuppose: a dataset, a loader, a training loop, a writer."""

import torch

import rustloader

dataset = torch.utils.data.TensorDataset(torch.randn(256, 3, 8, 8), torch.randint(10, (256,)))
loader = rustloader.DataLoader(dataset, batch_size=8, num_workers=2)


def train(loader):
    for _images, _labels in loader:
        pass


class Writer:
    """Stands for TensorBoard's SummaryWriter."""

    def add_scalar(self, name, value, global_step):
        assert isinstance(name, str) and isinstance(value, float) and isinstance(global_step, int)


writer = Writer()
