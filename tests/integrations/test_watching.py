"""Watching in every framework: the scores are those of the logits that the test saw for the indices that it saw."""

import pytest
import torch
from frameworks import Noted, assert_same_scores, network, ray_session, scores_of, settings, two_processes
from torch import nn
from torch.utils.data import DataLoader

from coreset_sampler import CoresetSampler, DistributedCoresetSampler, IndexedDataset

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::UserWarning")]
WATCH = dict(strategy="uniform", watch=True, weighting="none")


def observed(sampler, visits, **more):
    assert not sampler._observing.off
    assert_same_scores(sampler.scores, scores_of(visits, **more))


# accelerate


def accelerated(config=None, wrap=lambda model: model, batch=9, **more):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config or {}))
    net, data = network(), IndexedDataset(Noted())
    model = wrap(net)
    sampler = CoresetSampler(data, model, **settings(**WATCH | more))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(sampler)
    return accelerator, sampler, model, optimizer, loader, []


def accelerate_epochs(parts, until=2, skip=0, save=None):
    accelerator, sampler, model, optimizer, loader, visits = parts
    model.train()
    for epoch in range(sampler.epoch, until):
        loader.set_epoch(epoch)
        shown = accelerator.skip_first_batches(loader, skip) if skip else loader
        skip = 0
        for number, (x, y, index) in enumerate(shown):
            logits = model(x)
            visits.append((index.tolist(), logits.detach().clone(), epoch))
            accelerator.backward(nn.functional.cross_entropy(logits, y))
            optimizer.step()
            optimizer.zero_grad()
            if save and (epoch, number) == save[0]:
                accelerator.save_state(save[1])
                return visits
    return visits


@pytest.mark.parametrize("config", [{}, {"dispatch_batches": True}, {"use_stateful_dataloader": True}])
def test_accelerate(config):
    parts = accelerated(config)
    observed(parts[1], accelerate_epochs(parts))


@pytest.mark.parametrize("stateful", [False, True])
def test_accelerate_goes_on_in_the_middle_of_an_epoch(tmp_path, stateful):
    config = {"use_stateful_dataloader": stateful}
    stopped, resumed = accelerated(config), accelerated(config)
    before = accelerate_epochs(stopped, save=((1, 3), tmp_path / "state"))
    resumed[0].load_state(tmp_path / "state")
    after = accelerate_epochs(resumed, skip=0 if stateful else 4)
    assert len(before) + len(after) == 20
    observed(resumed[1], before + after)


@pytest.mark.parametrize("workers", [0, 2])
def test_accelerate_with_a_second_pass_over_each_batch_is_not_watched_also_where_workers_have_read_ahead(workers):
    from accelerate import Accelerator

    net, data = network(), IndexedDataset(Noted())
    sampler = CoresetSampler(data, net, **settings(**WATCH))
    more = {"num_workers": workers, "prefetch_factor": 9} if workers else {}
    loader = Accelerator(cpu=True).prepare(DataLoader(data, 9, sampler=sampler, **more))
    net.train()
    with pytest.warns(UserWarning, match="given 9 rows where 0"):
        [(net(x), net(x)) for x, *_ in loader]


def test_accelerate_with_a_batch_sampler_that_nobody_knows_is_not_watched():
    class Backwards(torch.utils.data.BatchSampler):
        def __iter__(self):
            yield from reversed(list(super().__iter__()))

    from accelerate import Accelerator

    net, data = network(), IndexedDataset(Noted())
    sampler = CoresetSampler(data, net, **settings(**WATCH))
    loader = Accelerator(cpu=True).prepare(DataLoader(data, batch_sampler=Backwards(sampler, 9, False)))
    with pytest.warns(UserWarning, match="Backwards, whose batches are not known.*IndexedDataset"):
        next(iter(loader))
    with pytest.raises(RuntimeError, match="nothing has been observed"):
        _ = sampler.scores


# Hugging Face


def trained(folder, cls=None, model=None, data=None, resume=None, coreset=None, **more):
    from test_integration_huggingface import SMALL, Noting, arguments, sentences, tiny_bert

    coreset = {**SMALL, **WATCH, **(coreset or {})}
    options = {key: more.pop(key) for key in ("data_collator", "eval_dataset", "callbacks") if key in more}
    model = model or tiny_bert()
    visits, trainer = [], None

    def note(module, args, output):
        if module.training and torch.is_grad_enabled():
            visits.append(output.logits.detach().clone())

    handle = model.register_forward_hook(note)
    args = arguments(folder, **{"num_train_epochs": 2, "save_strategy": "no"} | more)
    data = sentences() if data is None else data
    trainer = (cls or Noting)(model=model, args=args, train_dataset=data, coreset=coreset, **options)
    trainer.train(resume_from_checkpoint=resume)
    handle.remove()
    return trainer, visits


def sentence_scores(trainer, logits, per_epoch=8, first=0):
    """What explicit observing gives for the sentences that the trainer was given."""
    from test_integration_huggingface import sentences

    epochs = [(first + number) // per_epoch for number in range(len(trainer.batches))]
    labels = torch.tensor(sentences()["label"])
    return list(zip(trainer.batches, logits, epochs, strict=True)), labels


@pytest.mark.parametrize(
    "more",
    [
        dict(gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2),
        dict(label_smoothing_factor=0.1, dataloader_num_workers=2, remove_unused_columns=True),
        dict(coreset=dict(weighting="loss"), bf16=True),
    ],
)
def test_huggingface(tmp_path, more):
    from test_integration_huggingface import sentences

    if "eval_steps" in more:
        more = {**more, "eval_dataset": sentences()}
    trainer, logits = trained(tmp_path, **more)
    visits, labels = sentence_scores(trainer, logits)
    observed(trainer.coreset_sampler, visits, labels=labels)
    assert trainer.coreset_sampler.stats["forward_examples"] == 0
    assert any("coreset_coverage" in log for log in trainer.state.log_history)
    assert "coreset_index" not in trainer.train_dataset[0]


def test_huggingface_goes_on_from_a_checkpoint_in_the_middle_of_an_epoch(tmp_path):
    straight, _ = trained(tmp_path / "a", save_strategy="steps", save_steps=3)
    resumed, _ = trained(tmp_path / "b", resume=str(tmp_path / "a" / "checkpoint-3"))
    assert resumed.batches == straight.batches[3:]
    assert_same_scores(resumed.coreset_sampler.scores, straight.coreset_sampler.scores)


def test_huggingface_twice_through_the_model_counts_once(tmp_path):
    from test_integration_huggingface import Noting

    class TwoViews(Noting):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss + model(**inputs).loss

    trainer, logits = trained(tmp_path, cls=TwoViews)
    visits, labels = sentence_scores(trainer, logits[::2])
    observed(trainer.coreset_sampler, visits, labels=labels)


def test_huggingface_says_when_a_collator_reorders_or_the_model_is_not_called(tmp_path):
    from test_integration_huggingface import Noting, default_data_collator

    def reordered(features):
        return default_data_collator(sorted(features, key=lambda feature: feature["label"]))

    with pytest.warns(UserWarning, match="something reorders them"):
        trainer, _ = trained(tmp_path, data_collator=reordered, num_train_epochs=1)
    assert trainer.state.global_step == 8

    class Around(Noting):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            return nn.functional.cross_entropy(model.forward(**inputs).logits, labels)

    with pytest.warns(UserWarning, match="no training step called it.*Let compute_loss call"):
        trained(tmp_path, cls=Around, num_train_epochs=1)


def test_huggingface_without_a_dict_counts_forward_passes(tmp_path):
    from test_integration_huggingface import default_data_collator, sentences

    data = sentences().remove_columns("text")

    class Pairs(torch.utils.data.Dataset):
        def __len__(self):
            return len(data)

        def __getitem__(self, index):
            return data[int(index)], "no dict"

    labelled = dict(labels=list(data["label"]))

    def collate(pairs):
        return default_data_collator([features for features, _ in pairs])

    trainer, logits = trained(tmp_path, data=Pairs(), data_collator=collate, num_train_epochs=3, coreset=labelled)
    visits, labels = sentence_scores(trainer, logits)
    observed(trainer.coreset_sampler, visits[8:], labels=labels)  # found out in the first epoch


# Lightning


def lightning_fit(folder, cls=CoresetSampler, *, module=None, model=None, resume=None, devices=1, **more):
    lightning = pytest.importorskip("lightning")
    from coreset_sampler.integrations.lightning import CoresetCallback
    from lightning.pytorch.callbacks import ModelCheckpoint
    from test_integration_lightning import Indexed

    data, module = Indexed(), module or Speaking()
    sampler = cls(data, model(module) if model else module, **settings(**WATCH | more))
    saved = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[saved, CoresetCallback(sampler)],
        val_check_interval=0.5, limit_val_batches=1,
    )  # fmt: skip
    loader, val = DataLoader(data, batch_size=9, sampler=sampler), DataLoader(data, batch_size=9)
    trainer.fit(module, loader, val, ckpt_path=resume)
    return module, sampler


def Speaking(call=lambda module, x: module(x), times=1):  # noqa: N802
    """A module that notes what it was given and what it said."""
    from test_integration_lightning import Digits

    class Module(Digits):
        def training_step(self, batch, _):
            self.seen.append((batch[2].tolist(), (z := call(self, batch[0])).detach().clone(), self.current_epoch))
            for _ in range(times - 1):
                z = z + call(self, batch[0])
            return nn.functional.cross_entropy(z, batch[1])

        def validation_step(self, batch, _):
            self(batch[0])

    return Module()


@pytest.mark.parametrize("times", [1, 2])
def test_lightning(tmp_path, times):
    module, sampler = lightning_fit(tmp_path, module=Speaking(times=times))
    observed(sampler, module.seen)
    assert len(module.seen) == 20


def test_lightning_watches_the_part_of_a_module_that_it_calls_and_says_when_it_does_not(tmp_path):
    def net(module, x):
        return module.net(x)

    module, sampler = lightning_fit(tmp_path, module=Speaking(net), model=lambda module: module.net)
    observed(sampler, module.seen)
    with pytest.warns(UserWarning, match="no training step called it.*module.net"):
        lightning_fit(tmp_path / "b", module=Speaking(net))


def test_lightning_goes_on_in_the_middle_of_an_epoch(tmp_path):
    straight, sampler = lightning_fit(tmp_path / "a")
    resumed, again = lightning_fit(tmp_path / "b", resume=tmp_path / "a" / "step=3.ckpt")
    assert [index for index, *_ in resumed.seen] == [index for index, *_ in straight.seen[3:]]
    observed(again, straight.seen[:3] + resumed.seen)
    assert_same_scores(again.scores, sampler.scores)


# timm


def test_timm_with_the_prefetcher_and_a_compiled_model():
    timm = pytest.importorskip("timm")
    from coreset_sampler.integrations.timm import with_sampler
    from test_integration_timm import Pictures, loader_of, picture_net

    data, net = Pictures(), picture_net()
    model = torch.compile(net, backend="eager")
    loader = with_sampler(loader_of(data), CoresetSampler(data, model, **settings(**WATCH)))
    ema, visits = timm.utils.ModelEmaV3(net), []
    for epoch in range(2):
        for number, (x, y) in enumerate(loader):
            z = model(x)
            visits.append((data.seen[90 * epoch + 10 * number :][:10], z.detach().clone(), epoch))
            nn.functional.cross_entropy(z, y).backward()
            ema.update(net)
            ema(x)
    observed(loader.sampler, visits)


def test_timm_s_mixup_is_not_watched_until_it_is_off():
    timm_data = pytest.importorskip("timm.data")
    from coreset_sampler.integrations.timm import with_sampler
    from test_integration_timm import Pictures, loader_of, picture_net
    from timm.loss import SoftTargetCrossEntropy

    data, net, visits = Pictures(), picture_net(), []
    mixup = timm_data.FastCollateMixup(mixup_alpha=1.0, num_classes=10)
    sampler = CoresetSampler(data, net, **settings(**WATCH))
    with pytest.warns(UserWarning, match="mixed images belongs to no single example"):
        loader = with_sampler(loader_of(data, collate_fn=mixup), sampler)
    for epoch in range(2):
        loader.mixup_enabled = epoch == 0
        for number, (x, y) in enumerate(loader):
            z = net(x)
            visits.append((data.seen[90 * epoch + 10 * number :][:10], z.detach().clone(), epoch))
            SoftTargetCrossEntropy()(z, y).backward()
        if epoch == 0:
            with pytest.raises(RuntimeError, match="nothing has been observed"):
                _ = sampler.scores
    observed(sampler, visits[9:])


# torchdata


def stateful(workers=0, **options):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    data, model = IndexedDataset(Noted()), network()
    sampler = CoresetSampler(data, model, **settings(**WATCH))
    return model, loaders.StatefulDataLoader(data, 9, sampler=sampler, num_workers=workers, **options)


def stateful_epochs(model, loader, stop=20):
    visits = []
    model.train()
    while len(visits) < stop:
        for x, _, index in loader:
            visits.append((index.tolist(), model(x).detach().clone(), loader.sampler.epoch))
            if len(visits) == stop:
                break
    return visits


@pytest.mark.parametrize(("workers", "options"), [(0, {}), (2, {}), (2, {"snapshot_every_n_steps": 3})])
def test_torchdata_goes_on_in_the_middle_of_an_epoch(workers, options):
    model, loader = stateful(workers, **options)
    before = stateful_epochs(model, loader, 14)
    state = loader.state_dict()
    again, resumed = stateful(workers, **options)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    after = stateful_epochs(again, resumed, 6)
    assert len({i for index, *_ in before[10:] + after for i in index}) == 90
    assert not resumed.sampler._observing.off
    found = resumed.sampler.scores
    if workers == 0:
        assert_same_scores(found, scores_of(before + after))
    for index, logits, _ in after:
        expected = scores_of([(index, logits, 1)])
        new = torch.tensor(index)[found.counts[index] == 1]
        assert torch.equal(found.label_probability[new], expected.label_probability[new])
    assert (found.last_seen[torch.tensor([i for index, *_ in after for i in index])] == 1).all()


# Two processes: each watches its share, with DistributedDataParallel around the model


def together(name):
    """The scores of both processes, which must be alike, and what each of them saw."""
    first, second = (rank["watching"][name] for rank in two_processes())
    assert not first["off"] + second["off"]
    assert_same_scores(first["scores"], second["scores"])
    return first, second


@pytest.mark.parametrize("name", ["plain", "split", "uneven", "lightning", "lightning_split"])
def test_two_processes_watch_their_shares(name):
    first, second = together(name)
    assert first["visits"][0][0] != second["visits"][0][0]
    assert_same_scores(first["scores"], scores_of(first["visits"] + second["visits"]), atol=1e-6)


@pytest.mark.parametrize("name", ["trainer", "trainer_dispatched"])
def test_two_processes_of_the_trainer_watch_what_they_are_given(name):
    from sentences import sentences

    first, second = together(name)
    visits = first["visits"] + second["visits"]
    assert_same_scores(first["scores"], scores_of(visits, torch.tensor(sentences()["label"][:])), atol=1e-6)


def test_two_processes_of_the_trainer_go_on_in_the_middle_of_an_epoch():
    resumed, _ = together("trainer_resumed")
    straight, _ = together("trainer")
    assert len(resumed["visits"]) == len(straight["visits"]) - 2
    assert_same_scores(resumed["scores"], straight["scores"])


def test_batches_that_accelerate_dispatches_to_two_processes_are_not_watched():
    for rank in two_processes():
        assert "dispatch_batches=True" in rank["watching"]["dispatched"]["off"]


def on_a_worker():
    """Of Ray Train: what it saw and said itself, and the scores."""
    import ray.train.torch
    from coreset_sampler.integrations.ray import prepare_data_loader

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, visits = IndexedDataset(Noted()), []
    model = ray.train.torch.prepare_model(network())
    sampler = DistributedCoresetSampler(data, model, **settings(**WATCH))
    loader = prepare_data_loader(DataLoader(data, batch_size=9, sampler=sampler))
    model.train()
    for epoch in range(2):
        for x, y, index in loader:
            visits.append((index.tolist(), (z := model(x)).detach().clone(), epoch))
            nn.functional.cross_entropy(z, y).backward()
    sampler.select()
    found = [None, None]
    torch.distributed.all_gather_object(found, (visits, sampler.scores, sampler._observing.off))
    return found


@pytest.mark.slow
def test_two_workers_of_ray_watch_their_shares():
    pytest.importorskip("ray.train.torch")
    (visits, scores, off), (more, _, _) = ray_session(on_a_worker)
    assert not off
    assert_same_scores(scores, scores_of(visits + more), atol=1e-6)
