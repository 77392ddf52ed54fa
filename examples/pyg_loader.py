"""PyTorch Geometric: graphs of different sizes with random features, batched by its DataLoader.

python examples/pyg_loader.py
python examples/pyg_loader.py --no-install                      on torch's loader: the same losses
python -m rustloader run examples/pyg_loader.py --no-install    on the engine, switched from outside
"""

import argparse

import torch
from torch import nn
from torch_geometric.data import Data, Dataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

import rustloader


class Rings(Dataset):
    """Rings of 4 to 11 nodes with random features; the class says whether they are long."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def len(self) -> int:
        return self.n

    def get(self, i: int) -> Data:
        size = 4 + i % 8
        nodes = torch.arange(size)
        edges = torch.stack([nodes, (nodes + 1) % size])
        x = torch.randn(size, 4) + size / 8
        return Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], dim=1), y=torch.tensor([int(size > 7)]))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = GCNConv(4, 16), GCNConv(16, 16), nn.Linear(16, 2)

    def forward(self, graphs: Data) -> torch.Tensor:
        x = self.first(graphs.x, graphs.edge_index).relu()
        x = self.second(x, graphs.edge_index).relu()
        return self.last(global_mean_pool(x, graphs.batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-install", dest="install", action="store_false", help="leave torch's loader in place")
    options = parser.parse_args()
    if options.install:
        rustloader.install()

    torch.manual_seed(7)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    loader = DataLoader(Rings(128), batch_size=16, shuffle=True, num_workers=2)
    for epoch in range(2):
        losses = []
        for graphs in loader:
            loss = nn.functional.cross_entropy(net(graphs), graphs.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        print(f"epoch {epoch}: loss {torch.stack(losses).mean().item()}, the last batch is {graphs}")
    print(f"process 0: {rustloader.engine_batches()} batches from the engine")


if __name__ == "__main__":
    main()
