"""Run by torchrun in two processes: DDP and FSDP2 whose sampler watches the model train."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from watched import ReadsScores, digit_set, linear_net

from coreset_sampler import DistributedCoresetSampler, IndexedDataset

torch.set_num_threads(1)
warnings.simplefilter("error", UserWarning)


def train(wrap, epochs=3):
    """Scores after training; each process also notes what it was given."""
    net = linear_net()
    model = wrap(net)
    sampler = DistributedCoresetSampler(
        digit_set(), model, size=160, strategy=ReadsScores(), weighting="none", progress=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    given = []
    for _ in range(epochs):
        for x, y, index in DataLoader(IndexedDataset(digit_set()), 16, sampler=sampler):
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            given.append(index.tolist())
    pending = int(sampler.scores.counts.sum())
    sampler.select()
    hooks = sum(len(module._forward_hooks) for module in net.modules()) if wrap is not sharded else 0
    return dict(scores=sampler.scores.state_dict(), given=given, pending=pending, stats=sampler.stats, hooks=hooks)


def sharded(net):
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)


dist.init_process_group("gloo")
found = {"ddp": train(DistributedDataParallel), "fsdp": train(sharded)}
torch.save(found, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
dist.barrier()
dist.destroy_process_group()
