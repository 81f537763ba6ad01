"""A small CNN on Fashion-MNIST."""

import argparse
import gzip
import pathlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import matplotlib.pyplot as plt
    from tqdm import tqdm
except ImportError:
    plt = tqdm = None


def load(folder, part, made):
    """Images and labels from idx files; without a folder, made ones: a bright bar whose place is the label."""
    if folder is None:
        labels = torch.arange(made) % 10
        images = torch.rand(made, 1, 28, 28) / 2
        for label in range(10):
            images[labels == label, :, 2 + 2 * label : 5 + 2 * label] += 0.5
        return TensorDataset(images, labels)
    images, labels = (
        np.frombuffer(gzip.open(pathlib.Path(folder, f"{part}-{kind}-ubyte.gz")).read(), np.uint8, offset=offset)
        for kind, offset in (("images-idx3", 16), ("labels-idx1", 8))
    )
    images = torch.from_numpy(images.copy()).view(-1, 1, 28, 28) / 255
    return TensorDataset(images, torch.from_numpy(labels.astype(np.int64)))


def accuracy(model, data):
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(data, 1000))
    model.train()
    return right / len(data)


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", help="folder with the four .gz files of Fashion-MNIST; made data otherwise")
    options.add_argument("--epochs", type=int, default=1)
    options.add_argument("--batch", type=int, default=64, help="pictures in a step of this process")
    options.add_argument("--lr", type=float, default=0.1)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--plot", help="where the curve of the loss goes, if matplotlib is there")
    args = options.parse_args()
    torch.manual_seed(args.seed)
    train, test = load(args.data, "train", 4000), load(args.data, "t10k", 1000)
    conv = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*conv, nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = DataLoader(train, args.batch, shuffle=True, drop_last=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    losses = []
    for epoch in range(args.epochs):
        for x, y in tqdm(loader, f"epoch {epoch}") if tqdm else loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    print(f"accuracy {accuracy(model, test):.4f}")
    if plt and args.plot:
        plt.plot(losses)
        plt.savefig(args.plot)


if __name__ == "__main__":
    main()
