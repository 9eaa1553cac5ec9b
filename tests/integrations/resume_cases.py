"""Every framework's loop, run through and interrupted; what was trained on is noted in the training step.

Labels carry the example's index (`10 * index + label`), so that it comes through workers, collators and prefetchers.
Run by torchrun, with a folder and the number of workers, this notes the cases of two processes; `test_resume.py` runs
those of one itself.
"""

import copy
import functools
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from leaving import leave
from scenarios import digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from coreset_sampler import CoresetSampler, DistributedCoresetSampler, strategies

EPOCHS, SIZE, BATCH, MIDDLE = 3, 30, 4, 2  # the last batch of an epoch is a partial one


class Coded(Dataset):
    targets = digits().tensors[1][:600]

    def __len__(self):
        return 600

    def __getitem__(self, index):
        return digits().tensors[0][int(index)].flatten(), int(index) * 10 + int(self.targets[int(index)])


class Plain(Coded):
    def __getitem__(self, index):
        return digits().tensors[0][int(index)].flatten(), int(self.targets[int(index)])


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def sampler_of(cls, data, model, **more):
    options = dict(size=SIZE, seed=3, strategy=strategies.Crest(pool_size=30, keep=10), progress=False)
    return cls(data, model, **options | dict(selection_dataset=Plain(), labels=Coded.targets) | more)


def processes():
    return dist.get_world_size() if dist.is_initialized() else 1


def point(batch, batches):
    """Where epoch 1 is interrupted: late is where reading ahead has come to the end, last still in the loop's body."""
    return {batches: "last", batches - 1: "late", MIDDLE: "middle"}.get(batch)


def step(model, optimizer, batch, seen, backward=torch.Tensor.backward):
    x, coded = batch
    seen.append((coded // 10).tolist())
    optimizer.zero_grad()
    backward(nn.functional.cross_entropy(model(x), coded % 10))
    optimizer.step()


def own_sampler():
    return DistributedCoresetSampler if processes() > 1 else CoresetSampler


def wrapped(model):
    return DistributedDataParallel(model) if processes() > 1 else model


def plain(folder, workers, state=None, loader_of=None):
    """A plain loop and torchrun: in the loop the state is told the position, after it there is nothing to tell."""
    data, inner = Coded(), net()
    model = wrapped(inner)
    sampler = sampler_of(own_sampler(), data, model)
    loader = (loader_of or DataLoader)(data, batch_size=BATCH, sampler=sampler, num_workers=workers)
    optimizer, seen, saved = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), [], {}

    def save(name, **position):
        parts = dict(model=inner.state_dict(), optimizer=optimizer.state_dict(), sampler=sampler.state_dict(**position))
        saved[name] = copy.deepcopy(parts)

    if state:
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for i, batch in enumerate(loader, 1):
            step(model, optimizer, batch, seen)
            if epoch == 1 and point(i, len(loader)):
                save(point(i, len(loader)), position=i * BATCH)
        if epoch == 1:
            save("end")
    return seen, saved


def timm(folder, workers, state=None):
    """timm's loader, whose prefetcher reads one batch ahead."""
    from coreset_sampler.integrations.timm import with_sampler
    from timm.data.loader import PrefetchLoader

    def loader_of(data, sampler, **options):
        made = with_sampler(DataLoader(data, shuffle=True, **options), sampler)
        sampler.forward_fn = None
        fetched = PrefetchLoader(made, mean=(0.0,), std=(1.0,), channels=1, device=torch.device("cpu"))
        fetched.mean, fetched.std = fetched.mean.flatten(), fetched.std.flatten()  # rows of numbers, not images
        return fetched

    return plain(folder, workers, state, loader_of)


def ray_train(folder, workers, state=None):
    """Inside a worker of Ray Train, whose loader reads one batch ahead."""
    from coreset_sampler.integrations.ray import prepare_data_loader

    return plain(folder, workers, state, lambda data, **options: prepare_data_loader(DataLoader(data, **options)))


def torchdata(folder, workers, state=None):
    """StatefulDataLoader, which needs no position."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    data, inner = Coded(), net()
    model = wrapped(inner)
    sampler = sampler_of(own_sampler(), data, model)
    loader = StatefulDataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=workers)
    optimizer, seen, saved = torch.optim.SGD(model.parameters(), lr=0.1), [], {}
    if state:
        inner.load_state_dict(state["model"])
        loader.load_state_dict(state["loader"])

    def save(name, epoch):
        parts = dict(model=inner.state_dict(), loader=loader.state_dict(), epoch=epoch)
        saved[name] = copy.deepcopy(parts)

    for epoch in range(state["epoch"] if state else 0, EPOCHS):
        for i, batch in enumerate(loader, 1):
            step(model, optimizer, batch, seen)
            if epoch == 1 and point(i, len(loader)):
                save(point(i, len(loader)), epoch)
        if epoch == 1:
            save("end", epoch + 1)
    return seen, saved


def accelerate(folder, workers, state=None, **config):
    """The recipe of the page: `skip_first_batches` after a resume in the loop. Stateful loaders skip by themselves."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    data, model = Coded(), net()
    sampler = sampler_of(CoresetSampler, data, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(sampler)
    seen, saved, skip = [], {}, 0
    if state:
        accelerator.load_state(state["path"])
        skip = 0 if config.get("use_stateful_dataloader") else state["done"]

    def save(name, done):
        saved[name] = dict(path=str(folder / f"{workers}-{name}"), done=done)
        accelerator.save_state(saved[name]["path"])

    for epoch in range(sampler.epoch, EPOCHS):
        loader.set_epoch(epoch)
        shown = accelerator.skip_first_batches(loader, skip) if skip else loader
        skip = 0
        for i, batch in enumerate(shown, 1):
            step(model, optimizer, batch, seen, accelerator.backward)
            if state is None and epoch == 1 and point(i, len(loader)):
                save(point(i, len(loader)), i)
        if state is None and epoch == 1:
            save("end", 0)
    return seen, saved


def accelerate_stateful(folder, workers, state=None):
    return accelerate(folder, workers, state, use_stateful_dataloader=True)


def accelerate_dispatched(folder, workers, state=None):
    """Process 0 reads for all of them."""
    return accelerate(folder, workers, state, dispatch_batches=True)


class Noting(nn.Module):
    """A Hugging Face sort of model, which notes what it is trained on."""

    def __init__(self):
        super().__init__()
        self.net, self.seen = net(), []

    def forward(self, pixel_values, labels=None):
        logits = self.net(pixel_values)
        if labels is None:
            return {"logits": logits}
        self.seen.append((labels // 10).tolist())
        return {"loss": nn.functional.cross_entropy(logits, labels % 10), "logits": logits}


class Rows(Dataset):
    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        x, y = self.pairs[index]
        return {"pixel_values": x, "labels": y}


def huggingface(folder, workers, state=None):
    """The Trainer skips batches itself; a checkpoint at an epoch's last step is one at its end."""
    from coreset_sampler.integrations.huggingface import CoresetTrainer
    from transformers import TrainingArguments

    batches = -(-SIZE // (BATCH * processes()))
    run = folder / f"hf-{workers}-{'again' if state else 'straight'}"
    args = TrainingArguments(
        str(run), per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, save_steps=1, report_to=[],
        disable_tqdm=True, use_cpu=True, dataloader_num_workers=workers, learning_rate=0.01, logging_strategy="no",
        ddp_backend="gloo" if processes() > 1 else None, save_strategy="no" if state else "steps",
    )  # fmt: skip
    options = dict(
        strategy=strategies.Crest(pool_size=30, keep=10), selection_dataset=Rows(Plain()), labels=Coded.targets
    )
    coreset = dict(size=SIZE, seed=3, num_workers=0, **options)
    trainer = CoresetTrainer(model=Noting(), args=args, train_dataset=Rows(Coded()), coreset=coreset)
    trainer.train(resume_from_checkpoint=state and state["path"])
    steps = dict(middle=batches + MIDDLE, late=2 * batches - 1, last=2 * batches)
    return trainer.model.seen, {name: dict(path=str(run / f"checkpoint-{at}")) for name, at in steps.items()}


def lightning(folder, workers, state=None, **limits):
    import lightning as L
    from coreset_sampler.integrations.lightning import CoresetCallback

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen = net(), []

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            self.seen.append((batch[1] // 10).tolist())
            return nn.functional.cross_entropy(self(batch[0]), batch[1] % 10)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    saved = {}

    class Save(L.Callback):
        def save(self, trainer, name):
            if state is None and trainer.current_epoch == 1:
                saved[name] = dict(path=str(folder / f"{workers}-{name}-{len(limits)}.ckpt"))
                trainer.save_checkpoint(saved[name]["path"])

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            name = point(batch_idx + 1, trainer.num_training_batches)
            if name:
                self.save(trainer, name)

        def on_train_epoch_end(self, trainer, module):
            self.save(trainer, "end")

    module, data = Module(), Coded()
    sampler = sampler_of(own_sampler(), data, module)
    trainer = L.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=processes(), strategy="ddp" if processes() > 1 else "auto",
        enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False,
        callbacks=[CoresetCallback(sampler), Save()], **limits,
    )  # fmt: skip
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=workers)
    trainer.fit(module, loader, ckpt_path=state and state["path"])
    return module.seen, saved


def lightning_limited(folder, workers, state=None):
    """An epoch ends before its loader does."""
    return lightning(folder, workers, state, limit_train_batches=3)


FRAMEWORKS = (plain, timm, torchdata, accelerate, accelerate_stateful, huggingface, lightning, lightning_limited)


@functools.cache
def cases(framework, workers):
    """The batches that were trained on: of the run that goes `straight` through, and after a resume at each point."""
    with tempfile.TemporaryDirectory() as own, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folders = [own]
        if processes() > 1:
            dist.broadcast_object_list(folders)
        folder = Path(folders[0])
        straight, saved = framework(folder, workers)
        found = {"straight": straight}
        for name, state in saved.items():
            if processes() > 1:
                dist.barrier()
            try:
                found[name] = framework(folder, workers, state)[0]
            except RuntimeError as error:
                found[name] = str(error)
        if processes() > 1:
            dist.barrier()
    return found


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {
        framework.__name__: cases(framework, int(sys.argv[2])) for framework in (*FRAMEWORKS, accelerate_dispatched)
    }
    torch.save(found, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    leave()


if __name__ == "__main__":
    main()
