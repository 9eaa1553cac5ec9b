"""Trains with scores of its own forward passes: `watched_run.py FILE WORKERS [kill] [explicit]`.

With `kill` it saves at every third step, and is killed two steps after it has saved. With `explicit` it calls `observe`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from scenarios import conv_net, digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from coreset_sampler import CoresetSampler, IndexedDataset
from coreset_sampler.selection.testing import inject_label_noise

EPOCHS, BATCH, SAVED_EVERY, KILLED_AT = 20, 32, 3, (14, 4)


def digest(sampler: CoresetSampler, model: nn.Module) -> str:
    """Of every bit of the scores, and of the weights."""
    state = {**sampler.scores.state_dict(), **model.state_dict()}
    bits = [value.numpy().tobytes() if isinstance(value, torch.Tensor) else value for value in state.values()]
    return hashlib.sha256(repr(bits).encode()).hexdigest()


def main(file: str, workers: int, kill: bool, explicit: bool) -> None:
    torch.set_num_threads(1)
    x, y = digits().tensors
    data = TensorDataset(x, inject_label_noise(y, 0.4, seed=3))
    model = conv_net()
    sampler = CoresetSampler(data, model, size=300, seed=1, progress=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    torch.manual_seed(0)
    begun = (0, 0)
    if Path(file).exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sampler.load_state_dict(saved["sampler"])
        torch.set_rng_state(saved["rng"])
        begun = saved["begun"]
    loader = DataLoader(
        IndexedDataset(data), BATCH, sampler=sampler, num_workers=workers, generator=torch.Generator()
    )  # its own generator: a loader that begins anew draws a seed
    for epoch in range(begun[0], EPOCHS):
        sampler.set_epoch(epoch)
        for step, (images, labels, index) in enumerate(loader, begun[1] if epoch == begun[0] else 0):
            optimizer.zero_grad()
            logits = model(images)
            if explicit:
                sampler.observe(index, logits)
            cross_entropy(logits, labels).backward()
            optimizer.step()
            print(epoch, step, *index.tolist(), flush=True)
            if kill and step % SAVED_EVERY == SAVED_EVERY - 1:
                parts = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), rng=torch.get_rng_state())
                position = min((step + 1) * BATCH, len(sampler))
                torch.save(parts | dict(sampler=sampler.state_dict(position), begun=(epoch, step + 1)), file + ".part")
                os.replace(file + ".part", file)
            if kill and (epoch, step) == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
    print("rate", sampler.stats["estimated_noise_rate"])
    print("scores and weights", digest(sampler, model))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "kill" in sys.argv, "explicit" in sys.argv)
