"""The real Trainer on a coreset: text and images, weights, logs, schedule, exact resume, and what is refused."""

import subprocess
import sys

import pytest
import torch
from frameworks import SIZE, first_coreset, network, settings, two_processes
from scenarios import digits
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.integration

from coreset_sampler.integrations.huggingface import CoresetTrainer, CoresetTrainerMixin  # noqa: E402
from sentences import index_of, sentences, tiny_bert  # noqa: E402
from transformers import (  # noqa: E402
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)

from coreset_sampler import Coreset, CoresetSampler, WeightedDataset, strategies  # noqa: E402

SMALL = dict(size=30, seed=5, strategy=strategies.Crest(pool_size=40, keep=10))


class Noting(CoresetTrainerMixin, Trainer):
    """Somebody's own Trainer, which notes which sentences it was given."""

    def training_step(self, model, inputs, *rest, **more):
        if not hasattr(self, "batches"):
            self.batches, self.known = [], index_of(sentences())
        self.batches.append([self.known[tuple(row)] for row in inputs["input_ids"].tolist()])
        return super().training_step(model, inputs, *rest, **more)


def arguments(folder, **more):
    usual = dict(num_train_epochs=3, save_steps=3, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True)
    return TrainingArguments(
        str(folder),
        **{**usual, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_strategy": "steps"} | more,
    )


def trainer_of(folder, coreset=SMALL, cls=Noting, data=None, **more):
    options = {key: more.pop(key) for key in ("data_collator", "compute_loss_func", "eval_dataset") if key in more}
    data = sentences() if data is None else data
    return cls(model=tiny_bert(), args=arguments(folder, **more), train_dataset=data, coreset=coreset, **options)


def test_text_is_trained_on_the_coreset_with_the_schedule_and_the_logs_right(tmp_path):
    trainer = trainer_of(tmp_path, coreset={**SMALL, "reselect_every": 2}, save_strategy="no")
    coresets = []

    class Noted(TrainerCallback):
        def on_epoch_end(self, *_, **__):
            coresets.append(set(trainer.coreset_sampler.coreset.indices.tolist()))

    trainer.add_callback(Noted())
    result = trainer.train()
    steps = -(-30 // 4)
    assert trainer.state.max_steps == trainer.state.global_step == len(trainer.batches) == 3 * steps
    for epoch in range(3):
        assert {i for batch in trainer.batches[epoch * steps : (epoch + 1) * steps] for i in batch} <= coresets[epoch]
    assert coresets[0] == coresets[1] != coresets[2]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["coreset_selections"] for log in logs] == [1] * 2 * steps + [2] * steps
    assert {"coreset_seconds", "coreset_share", "coreset_forward_examples"} <= logs[0].keys()
    rates = [log["learning_rate"] for log in logs]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-3 / (3 * steps))  # linear decay comes down to its last step, not to a quarter
    speed = result.metrics["train_samples_per_second"] * result.metrics["train_runtime"]
    assert speed == pytest.approx(90, rel=0.01)  # examples that were trained on, not those of the whole set


def test_the_first_coreset_is_that_of_the_plain_loop(tmp_path):
    trainer = trainer_of(tmp_path, save_strategy="no", num_train_epochs=1)
    trainer.train()
    data = sentences().remove_columns("text")
    plain = CoresetSampler(data, tiny_bert(), collate_fn=default_data_collator, **SMALL).select()
    assert trainer.coreset_sampler.coreset.indices.tolist() == plain.indices.tolist()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resume_from_any_checkpoint_gives_the_batches_still_to_come_and_the_same_model(tmp_path, accumulate):
    more = dict(gradient_accumulation_steps=accumulate, save_steps=3)
    straight = trainer_of(tmp_path / "a", **more)
    straight.train()
    for folder in sorted((tmp_path / "a").glob("checkpoint-*")):
        done = int(folder.name.split("-")[1])
        if done == straight.state.max_steps:
            continue
        resumed = trainer_of(tmp_path / "b", **{**more, "save_strategy": "no"})
        resumed.train(resume_from_checkpoint=str(folder))
        per_epoch = -(-8 // accumulate)
        batches = done // per_epoch * 8 + done % per_epoch * accumulate
        assert resumed.batches == straight.batches[batches:]
        for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(one, other)
        assert resumed.coreset_sampler.stats["selections"] == straight.coreset_sampler.stats["selections"] == 3


def test_a_checkpoint_without_the_state_of_the_sampler_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, num_train_epochs=1)
    trainer.train()
    (tmp_path / "checkpoint-3" / "coreset_sampler.pt").unlink()
    with pytest.raises(FileNotFoundError, match="another checkpoint"):
        trainer_of(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_training_twice_begins_anew(tmp_path):
    trainer = trainer_of(tmp_path, num_train_epochs=1, save_strategy="no", learning_rate=0.0)
    trainer.train()
    trainer.get_train_dataloader()  # somebody has a look
    trainer.train()
    assert trainer.batches[:8] == trainer.batches[8:]
    assert trainer.coreset_sampler.stats["selections"] == 1


def lopsided(view, size, generator):
    indices = torch.randperm(len(view.labels), generator=generator)[:size]
    return Coreset(indices, (indices + 1.0) * len(view.labels) / (indices + 1.0).sum())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_reach_the_loss_under_remove_unused_columns_and_accumulation(tmp_path, accumulate):
    coreset = dict(size=16, strategy=lopsided, weighting="loss", seed=0)
    more = dict(max_steps=1, max_grad_norm=0.0, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant")
    trainer = trainer_of(
        tmp_path, coreset, save_strategy="no", gradient_accumulation_steps=accumulate, weight_decay=0.0, **more
    )
    assert trainer.args.remove_unused_columns
    expected = tiny_bert()
    trainer.model.eval(), expected.eval()
    trainer.model.train = lambda mode=True: trainer.model  # no dropout, so that one step can be worked out by hand
    trainer.model.training = True
    trainer.train()
    index = torch.tensor([i for batch in trainer.batches for i in batch])
    assert len(index) == 4 * accumulate
    sampled = trainer.coreset_sampler.coreset
    by_index = dict(zip(sampled.indices.tolist(), sampled.weights.tolist(), strict=True))
    weight = torch.tensor([by_index[int(i)] for i in index]) * 16 / sampled.weights.sum()
    rows = sentences()[index.tolist()]
    inputs = {name: torch.tensor(rows[name]) for name in ("input_ids", "attention_mask")}
    losses = nn.functional.cross_entropy(expected(**inputs).logits, torch.tensor(rows["label"]), reduction="none")
    (losses * weight.float()).mean().backward()
    for own, other in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        if other.grad is not None:
            assert torch.allclose(own, other - other.grad, atol=1e-5)


def test_evaluation_is_not_weighted(tmp_path):
    coreset = dict(size=16, strategy=lopsided, weighting="loss")
    trainer = trainer_of(tmp_path, coreset, save_strategy="no", eval_dataset=sentences(), learning_rate=0.0)
    plain = Trainer(model=tiny_bert(), args=arguments(tmp_path), eval_dataset=sentences())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)


def test_a_collator_that_drops_the_weight_is_an_error(tmp_path):
    def without(features):
        return default_data_collator([{k: v for k, v in f.items() if k != "weight"} for f in features])

    trainer = trainer_of(tmp_path, {**SMALL, "weighting": "loss"}, data_collator=without, save_strategy="no")
    with pytest.raises(ValueError, match='data_collator keep the entry "weight"'):
        trainer.train()


class OwnLoss(Noting):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        loss = nn.functional.cross_entropy(model(**inputs).logits, labels)
        return (loss, None) if return_outputs else loss


class CallsSuper(Noting):
    def compute_loss(self, *args, **more):
        return 2 * super().compute_loss(*args, **more)


class MyTrainer(Trainer):
    compute_loss = OwnLoss.compute_loss


class Mixed(CoresetTrainerMixin, MyTrainer):
    pass


@pytest.mark.parametrize("cls", [OwnLoss, Mixed])
def test_a_compute_loss_that_leaves_the_weights_out_is_an_error_before_the_first_update(tmp_path, cls):
    trainer = trainer_of(
        tmp_path, {**SMALL, "weighting": "loss"}, cls=cls, save_strategy="no", remove_unused_columns=True
    )
    with pytest.raises(TypeError, match="leaves the weights out"):
        trainer.train()
    for one, other in zip(trainer.model.parameters(), tiny_bert().parameters(), strict=True):
        assert torch.equal(one, other)
    trainer_of(tmp_path, cls=cls, save_strategy="no", max_steps=1).train()  # drawn in proportion it may


def test_a_compute_loss_that_calls_super_is_weighted(tmp_path):
    coreset = dict(size=16, strategy=lopsided, weighting="loss", seed=0)
    trainer = trainer_of(tmp_path, coreset, cls=CallsSuper, save_strategy="no", max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(coreset=dict(fraction=0.1, reselect=2)), TypeError, "unknown settings.*'reselect'.*reselect_every"),
        (dict(coreset=0.1), TypeError, "dict of settings"),
        (dict(coreset=dict(fraction=10)), ValueError, "fraction"),
        (dict(data=Stream(), max_steps=3), TypeError, "streaming=True"),
        (dict(train_sampling_strategy="group_by_length"), ValueError, "train_sampling_strategy must stay 'random'"),
        (dict(train_sampling_strategy="sequential"), ValueError, "train_sampling_strategy must stay 'random'"),
        (dict(coreset={**SMALL, "weighting": "loss"}, compute_loss_func=print), ValueError, "compute_loss_func"),
    ],
)
def test_what_cannot_work_is_refused_before_training(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        trainer_of(tmp_path, **options)


def test_a_stream_that_comes_later_is_refused_too(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=3)
    trainer.train_dataset = Stream()
    with pytest.raises(TypeError, match="streaming=True"):
        trainer.train()


class PixelRows(torch.utils.data.Dataset):
    targets = digits().tensors[1]

    def __len__(self):
        return 1797

    def __getitem__(self, index):
        image, label = digits()[int(index)]
        return {"pixel_values": image, "labels": int(label), "file": "a name"}


def test_images_are_trained_on_the_coreset(tmp_path):
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **sizes))
    args = arguments(tmp_path, num_train_epochs=2, save_strategy="no", dataloader_num_workers=1, bf16=True)
    data = PixelRows()
    trainer = CoresetTrainer(model=model, args=args, train_dataset=data, coreset=settings(weighting="loss"))
    trainer.train()
    assert isinstance(trainer.train_dataset, WeightedDataset)
    assert trainer.state.global_step == 2 * -(-SIZE // 4)
    assert trainer.coreset_sampler.stats["selections"] == 2


class DigitsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, pixel_values, labels=None):
        logits = self.net(pixel_values)
        return {"logits": logits} | ({} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)})


def test_digits_give_the_first_coreset_of_the_plain_loop_and_of_every_other_framework(tmp_path):
    args = arguments(tmp_path, num_train_epochs=1, save_strategy="no")
    trainer = CoresetTrainer(model=DigitsNet(), args=args, train_dataset=PixelRows(), coreset=settings())
    trainer.train()
    assert trainer.coreset_sampler.coreset.indices.tolist() == first_coreset()


def test_two_processes_agree_share_out_once_and_resume_exactly():
    first, second = (rank["huggingface"] for rank in two_processes())
    assert first["straight"]["steps"] == second["straight"]["steps"] == 15
    assert first["straight"]["rates"][-1] == pytest.approx(1e-3 / 15)
    assert torch.equal(first["straight"]["weights"], second["straight"]["weights"])
    for rank in (first, second):
        assert rank["straight"]["selections"] == 3
        for at in ("3", "6"):
            assert rank[at]["batches"] == rank["straight"]["batches"][int(at) :]
            assert torch.equal(rank[at]["weights"], rank["straight"]["weights"])
    for epoch in range(3):
        own, other = (
            [i for batch in rank["straight"]["batches"][5 * epoch : 5 * epoch + 5] for i in batch]
            for rank in (first, second)
        )
        assert len(own) == len(other) == 15
        assert len({*own, *other}) > 18  # sharded twice, half of them would never be seen


def test_importing_the_adapters_does_not_import_transformers():
    code = "import sys, coreset_sampler.integrations.huggingface as h; print('transformers' in sys.modules, h.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False ['CoresetTrainer'")


def test_a_callback_alone_would_leave_the_loader_at_the_whole_set(tmp_path):
    """Why there is a mixin: the length that the schedule is planned with is the coreset's from the start."""
    trainer = trainer_of(tmp_path)
    assert isinstance(trainer.get_train_dataloader(), DataLoader)
    assert len(trainer.get_train_dataloader()) == 8


class OddNet(nn.Module):
    """Odd digits against even ones, by one logit or by two."""

    def __init__(self, logits):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.logits = nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), logits

    def forward(self, pixel_values, labels=None):
        one = self.net(pixel_values)
        return {"logits": one if self.logits == 1 else torch.cat([torch.zeros_like(one), one], 1)}


@pytest.mark.parametrize("shape", [(), (1,)])
def test_weights_go_with_one_logit_for_two_classes_and_labels_that_are_floats(tmp_path, shape):
    images = [digits()[index] for index in range(200)]

    def trained(logits, labels):
        data = [{"pixel_values": image, "labels": label} for (image, _), label in zip(images, labels, strict=True)]
        args = arguments(tmp_path, num_train_epochs=1, save_strategy="no", learning_rate=0.1)
        coreset = dict(size=16, strategy=lopsided, weighting="loss", seed=0)
        trainer = CoresetTrainer(model=OddNet(logits), args=args, train_dataset=data, coreset=coreset)
        trainer.train()
        return trainer.model.net[1].weight

    odd = torch.tensor([int(label) % 2 for _, label in images])
    assert torch.allclose(trained(1, odd.float().reshape(-1, *shape)), trained(2, odd), atol=1e-5)
