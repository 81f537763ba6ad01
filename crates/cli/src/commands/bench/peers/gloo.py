# PyTorch over gloo: DistributedDataParallel with gradients that are views of its buckets, or one plain all-reduce of
# all elements. There is no server and no optimizer step: every worker ends with the mean of all gradients.

import zlib
from datetime import timedelta

import torch
import torch.distributed as dist


class GradientsOnly(torch.autograd.Function):
    """A backward pass that costs nothing: the gradients are there already."""

    @staticmethod
    def forward(context, gradients, *parameters):
        context.gradients = gradients
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(context, _):
        return (None, *context.gradients)


class Model(torch.nn.Module):
    def __init__(self, shapes, rank):
        super().__init__()
        self.tensors = torch.nn.ParameterList([torch.full(shape, 0.5) for shape in shapes])
        self.gradients = [torch.full(shape, 0.001 * (rank + 1)) for shape in shapes]

    def forward(self):
        return GradientsOnly.apply(self.gradients, *self.tensors)


def data_parallel(shapes, rank):
    model = Model(shapes, rank)
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def iterate():
        parallel.zero_grad(set_to_none=True)
        parallel().backward()

    return iterate, lambda: model.tensors[0].grad


def all_reduce(shapes, rank):
    # Sums of sums grow without bound, but for those of zeros; adding them takes as long.
    gradient = torch.zeros([sum(torch.Size(shape).numel() for shape in shapes)])

    def iterate():
        dist.all_reduce(gradient)

    def check():
        gradient.fill_(0.001 * (rank + 1))
        dist.all_reduce(gradient)
        return gradient

    return iterate, check


def main():
    mine = part()
    rank, workers = mine["rank"], mine["workers"]
    dist.init_process_group(
        "gloo",
        init_method="tcp://127.0.0.1:%d" % mine["port"],
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=mine["timeout_s"]),
    )
    kind = {"ddp": data_parallel, "all_reduce": all_reduce}[mine["kind"]]
    iterate, result = kind(mine["shapes"], rank)

    def checksum():
        values = result()
        expected = 0.001 * workers * (workers + 1) / 2
        expected = expected / workers if mine["kind"] == "ddp" else expected
        assert torch.allclose(values, torch.tensor(expected)), "gloo did not reduce"
        return zlib.crc32(values.numpy().tobytes())

    obey(iterate, checksum)
    dist.destroy_process_group()


main()
