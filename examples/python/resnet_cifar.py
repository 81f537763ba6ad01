"""ResNet-20 or -56 on CIFAR-10: `paramill launch -n 4 -s 2 -- python resnet_cifar.py --data cifar10.npz`, or alone."""

import argparse

import numpy as np
import torch
from torch import nn

import paramill as pm

try:
    import matplotlib.pyplot as plt
    from tqdm import tqdm
except ImportError:
    plt = tqdm = None


class Block(nn.Module):
    def __init__(self, before, width):
        super().__init__()
        self.stride, self.room = width // before, width - before
        self.conv1 = nn.Conv2d(before, width, 3, self.stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        short = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.room))
        return torch.relu(y + short)


def resnet(depth):
    widths = [16] + [width for width in (16, 32, 64) for _ in range((depth - 2) // 6)]
    blocks = [Block(before, width) for before, width in zip(widths, widths[1:])]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def load(path, device):
    """Arrays x_train (n, 32, 32, 3) and y_train, x_test and y_test of an .npz file; without a path, noise."""
    if path is None:
        made, labels = np.random.default_rng(0).integers(0, 256, (1000, 32, 32, 3), np.uint8), np.arange(1000) % 10
    arrays = np.load(path) if path else {"x_train": made, "y_train": labels, "x_test": made, "y_test": labels}
    x, y = ([torch.from_numpy(arrays[f"{kind}_{part}"]).to(device) for part in ("train", "test")] for kind in "xy")
    return [(x.permute(0, 3, 1, 2).float() / 127.5 - 1, y.long()) for x, y in zip(x, y)]


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", help="an .npz file with CIFAR-10; noise otherwise")
    options.add_argument("--depth", type=int, default=20, help="20, 56 or another 6n + 2")
    options.add_argument("--epochs", type=int, default=1)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--optimizer", default="momentum:lr=0.1,weight_decay=1e-4")
    options.add_argument("--plot", help="where the curve of the loss goes, if matplotlib is there")
    args = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = resnet(args.depth).to(device)
    optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), args.optimizer)
    (x, y), (x_test, y_test) = load(args.data, device)
    sampler, losses = pm.torch.ShardSampler(x, optimizer), []
    for epoch in range(args.epochs):
        batches = torch.tensor(list(sampler), device=device).split(args.batch)
        for batch in tqdm(batches, f"epoch {epoch}") if tqdm else batches:
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    with torch.no_grad():
        right = (torch.cat([model.eval()(x).argmax(1) for x in x_test.split(1000)]) == y_test).float().mean()
    print(f"accuracy {right:.4f}")
    if plt and args.plot:
        plt.plot(torch.stack(losses).tolist())
        plt.savefig(args.plot)


if __name__ == "__main__":
    main()
