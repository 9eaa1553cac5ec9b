"""Run by torchrun in two processes: DDP and FSDP2 whose sampler watches the model train."""

import copy
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from leaving import leave
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


def resumed(epochs=3, save_at=(1, 2)):
    """What a run gives that saves in mid-epoch, after all have put their scores together; then one that goes on from it."""
    runs, saved = [], None
    for _ in range(2):
        model = DistributedDataParallel(linear_net())
        sampler = DistributedCoresetSampler(
            digit_set(), model, size=160, strategy=ReadsScores(), weighting="none", progress=False
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if saved is not None:
            model.load_state_dict(saved[0])
            sampler.load_state_dict(saved[1])
        model.train()
        given, first = [], sampler.epoch
        for epoch in range(first, epochs):
            for step, (x, y, index) in enumerate(DataLoader(IndexedDataset(digit_set()), 16, sampler=sampler), 1):
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                given.append(index.tolist())
                if saved is None and (epoch, step) == save_at:
                    sampler.sync_scores()
                    box = [(copy.deepcopy(model.state_dict()), sampler.state_dict(position=step * 16))]
                    dist.broadcast_object_list(box)  # as if all read the file that process 0 wrote
                    saved, given = box[0], []
        sampler.sync_scores()
        runs.append(dict(given=given, scores=sampler.scores.state_dict()))
    return runs


def sharded(net):
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)


dist.init_process_group("gloo")
found = {"ddp": train(DistributedDataParallel), "fsdp": train(sharded), "resumed": resumed()}
torch.save(found, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
leave()
