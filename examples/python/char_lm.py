"""A small transformer that learns to write, letter by letter: `paramill launch -n 2 -- python char_lm.py`, or alone."""

import argparse
import pathlib

import torch
from torch import nn

import paramill as pm

try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
try:
    from tqdm import trange
except ImportError:
    trange = range
MADE = "the quick brown fox jumps over the lazy dog, and the dog lets it be. " * 200


class Transformer(nn.Module):
    def __init__(self, letters, width, layers, context):
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, letters)

    def forward(self, x):
        ahead = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.out(self.body(self.letters(x) + self.places[: x.shape[1]], mask=ahead, is_causal=True))


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", help="a text file; a few made sentences otherwise")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--context", type=int, default=64)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--optimizer", default="adamw:lr=3e-3,weight_decay=0.01")
    options.add_argument("--sync", help="consistency model, such as ssp:s=3; the job's otherwise")
    options.add_argument("--plot", help="where the curve of the loss goes, if matplotlib is there")
    args = options.parse_args()
    text = pathlib.Path(args.data).read_text() if args.data else MADE
    alphabet = sorted(set(text))
    letters = torch.tensor([alphabet.index(letter) for letter in text])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Transformer(len(alphabet), args.width, args.layers, args.context).to(device)
    optimizer = pm.torch.DistributedOptimizer(model.named_parameters(), args.optimizer, sync=args.sync)
    torch.manual_seed(optimizer.job.rank)
    losses = []
    for _ in trange(args.steps):
        starts = torch.randint(len(letters) - args.context - 1, (args.batch,))
        piece = letters[starts[:, None] + torch.arange(args.context + 1)].to(device)
        loss = nn.functional.cross_entropy(model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"worker {optimizer.job.rank} of {optimizer.job.workers}: loss {sum(losses[-10:]) / len(losses[-10:]):.4f}")
    if plt and args.plot and optimizer.job.rank == 0:
        plt.plot(losses)
        plt.savefig(args.plot)


if __name__ == "__main__":
    main()
