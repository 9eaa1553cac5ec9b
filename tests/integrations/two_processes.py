"""Run by torchrun in two processes: torchrun, timm, accelerate, the Trainer and Lightning, and what each was given."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from frameworks import Noted, loss_of, network, settings
from leaving import leave
from sentences import index_of, sentences, tiny_bert
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from coreset_sampler import CoresetSampler, DistributedCoresetSampler, strategies

torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])


def said(call):
    """The error that a call ends with."""
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def step(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def torchrun(shared):
    """A plain loop; the process group is there only after the sampler was made."""
    data, net = Noted(), network()
    sampler = DistributedCoresetSampler(data, net, **settings(selection_dataset=Noted()))
    before = sampler.num_replicas
    dist.init_process_group("gloo")
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=9, sampler=sampler)
    coresets = []
    for _ in range(3):
        for batch in loader:
            step(model, optimizer, loss_of(model, batch))
        coresets.append(sampler.coreset.indices.tolist())
    return dict(seen=data.seen, coresets=coresets, stats=sampler.stats, replicas=(before, sampler.num_replicas))


def accelerate(shared):
    from accelerate import Accelerator

    def parts(cls=CoresetSampler):
        torch.manual_seed(0)
        accelerator, data, net = Accelerator(cpu=True), Noted(), network()
        sampler = cls(data, net, **settings(selection_dataset=Noted()))
        loader = DataLoader(data, batch_size=9, sampler=sampler)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        accelerator.register_for_checkpointing(sampler)
        return accelerator, data, sampler, model, optimizer, loader

    def train(accelerator, data, sampler, model, optimizer, loader, *, skip=0, save=False):
        batches, coresets = [], []
        for epoch in range(sampler.epoch, 3):
            loader.set_epoch(epoch)
            shown = accelerator.skip_first_batches(loader, skip) if skip else loader
            skip, before = 0, len(data.seen)
            for i, batch in enumerate(shown):
                step(model, optimizer, loss_of(model, batch))
                if save and epoch == 1 and i == 1:
                    accelerator.save_state(shared / "middle")
            batches += data.seen[before:]
            coresets.append(sampler.coreset.indices.tolist())
            if save and epoch == 1:
                accelerator.save_state(shared / "end")
        return dict(seen=batches, coresets=coresets, selections=sampler.stats["selections"])

    def resumed(name, **options):
        own = parts()
        own[0].load_state(shared / name)
        return train(*own, **options)

    def counted_from_zero():
        accelerator, _, _, _, _, loader = parts()
        accelerator.load_state(shared / "end")
        next(iter(loader))  # without loader.set_epoch, which counts from 0 again

    *_, self_sharding = parts(DistributedCoresetSampler)
    return dict(
        straight=train(*parts(), save=True),
        middle=resumed("middle", skip=2),
        end=resumed("end"),
        twice=said(lambda: next(iter(self_sharding))),
        unskipped=said(lambda: resumed("middle")),
        from_zero=said(counted_from_zero),
    )


def timm(shared):
    from coreset_sampler.integrations.timm import with_sampler
    from test_integration_timm import Pictures, loader_of, picture_net

    data, net = Pictures(), picture_net()
    options = settings(selection_dataset=data.fixed())
    loader = with_sampler(loader_of(data, distributed=True), DistributedCoresetSampler(data, net, **options))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for _ in loader:
            pass
    unsharded = CoresetSampler(data, net, **options)
    refused = said(lambda: with_sampler(loader_of(data, distributed=True), unsharded))
    return dict(seen=data.seen, coreset=loader.sampler.coreset.indices.tolist(), length=len(loader), refused=refused)


def huggingface(shared):
    from coreset_sampler.integrations.huggingface import CoresetTrainer
    from transformers import TrainingArguments

    def run(resume=None):
        data = sentences()
        known, batches = index_of(data), []
        args = TrainingArguments(
            str(shared / "hf"), per_device_train_batch_size=3, num_train_epochs=3, save_steps=3, logging_steps=1,
            report_to=[], disable_tqdm=True, use_cpu=True, ddp_backend="gloo", learning_rate=1e-3,
        )  # fmt: skip
        coreset = settings(size=30, strategy=strategies.Crest(pool_size=40, keep=10))
        trainer = CoresetTrainer(model=tiny_bert(), args=args, train_dataset=data, coreset=coreset)
        train_on = trainer.training_step

        def noted(model, inputs, *rest, **more):
            batches.append([known[tuple(row)] for row in inputs["input_ids"].tolist()])
            return train_on(model, inputs, *rest, **more)

        trainer.training_step = noted
        trainer.train(resume_from_checkpoint=resume)
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
        selections = trainer.coreset_sampler.stats["selections"]
        return dict(batches=batches, weights=weights, steps=trainer.state.max_steps, rates=rates, selections=selections)

    straight = run()
    dist.barrier()
    return dict(straight=straight, **{str(at): run(str(shared / "hf" / f"checkpoint-{at}")) for at in (3, 6)})


def lightning(shared):
    from test_integration_lightning import fit

    def run(name, cls, resume=None):
        module, sampler = fit(shared / name, cls, resume=resume, devices=2)
        return dict(seen=module.seen, coreset=sampler.coreset.indices.tolist(), selections=sampler.stats["selections"])

    own, shared_out = DistributedCoresetSampler, CoresetSampler
    return dict(
        straight=run("own", own),
        **{str(at): run("again", own, shared / "own" / f"step={at}.ckpt") for at in (3, 5)},
        shared_out=run("shared_out", shared_out),
        end=run("again", shared_out, shared / "shared_out" / "step=5.ckpt"),
        middle=said(lambda: run("again", shared_out, shared / "shared_out" / "step=3.ckpt")),
    )


def watching(shared):
    """What each process saw and said itself, and the scores that all of them have after a selection."""
    from coreset_sampler.integrations.huggingface import CoresetTrainer
    from test_watching import WATCH, accelerate_epochs, accelerated, lightning_fit
    from transformers import TrainingArguments

    def scores(sampler, visits):
        sampler.select()
        off = sampler._observing.off
        return dict(scores=None if off else sampler.scores, visits=visits, off=off)

    def on_accelerate(batch=9, **config):
        parts = accelerated(config, batch=batch, size=85)
        return scores(parts[1], accelerate_epochs(parts))

    def on_lightning(name, cls):
        module, sampler = lightning_fit(shared / name, cls, devices=2, size=85)
        return scores(sampler, module.seen)

    def on_trainer(resume=None, **more):
        data, said_of = sentences(), []
        known, model = index_of(data), tiny_bert()

        def note(module, args, named, output):
            if module.training and torch.is_grad_enabled():
                index = [known[tuple(row)] for row in named["input_ids"].tolist()]
                said_of.append((index, output.logits.detach().clone(), trainer.coreset_sampler.epoch))

        model.register_forward_hook(note, with_kwargs=True)
        args = TrainingArguments(
            str(shared / "watched"), per_device_train_batch_size=4, num_train_epochs=2, save_steps=2, report_to=[],
            disable_tqdm=True, use_cpu=True, ddp_backend="gloo", learning_rate=1e-3, **more,
        )  # fmt: skip
        trainer = CoresetTrainer(model=model, args=args, train_dataset=data, coreset=dict(size=27, seed=5, **WATCH))
        trainer.train(resume_from_checkpoint=resume)
        return scores(trainer.coreset_sampler, said_of)

    found = dict(
        plain=on_accelerate(),
        split=on_accelerate(batch=18, split_batches=True),
        uneven=on_accelerate(even_batches=False),
        dispatched=on_accelerate(dispatch_batches=True),
        lightning=on_lightning("a", DistributedCoresetSampler),
        lightning_split=on_lightning("b", CoresetSampler),
        trainer=on_trainer(),
    )
    dist.barrier()
    found["trainer_resumed"] = on_trainer(str(shared / "watched" / "checkpoint-2"))
    found["trainer_dispatched"] = on_trainer(accelerator_config={"dispatch_batches": True}, save_strategy="no")
    return found


def main():
    out = dict(torchrun=torchrun(None))
    shared = [tempfile.mkdtemp(dir=FOLDER)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(shared)
    for part in (timm, accelerate, huggingface, lightning, watching):
        out[part.__name__] = part(Path(shared[0]))
        dist.barrier()
    torch.save(out, FOLDER / f"{dist.get_rank()}.pt")
    leave()


if __name__ == "__main__":
    main()
