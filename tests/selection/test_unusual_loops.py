"""Loops, models and labels as outside users have them: what is watched, and what is refused with a reason."""

import copy
import pickle

import pytest
import torch
from scenarios import conv_net
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset
from watched import N, ReadsScores
from watched import digit_set as data

from coreset_sampler import CoresetSampler, IndexedDataset, strategies
from coreset_sampler.selection.forward import logits_of

BATCH = 32
REASON = "the model cannot be watched any longer: {}"


class Reversed(BatchSampler):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class Named(BatchSampler):
    """Keeps the order of torch's."""


class EveryOther(Sampler):
    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return (index for place, index in enumerate(self.inner) if place % 2)


class Features(nn.Module):
    """A backbone and a head, both of which are given."""

    def __init__(self, first):
        super().__init__()
        self.body, self.head, self.first = (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU()),
            nn.Linear(32, 10),
            first,
        )

    def forward(self, x):
        features = self.body(x)
        both = features, self.head(features)
        return both if self.first else both[::-1]


def sampler_of(model, train_set=None, **more):
    settings = {"size": 160, "strategy": ReadsScores(), "progress": False, "weighting": "none"}
    return CoresetSampler(data() if train_set is None else train_set, model, **settings | more)


def loop(sampler, loader, epochs=2, logits_of=lambda output: output, each=lambda: None):
    """A plain loop; gives the indices and the logits of all steps."""
    optimizer, seen = torch.optim.SGD(sampler.model.parameters(), lr=0.05), []
    sampler.model.train()
    for _ in range(epochs):
        for x, y, index in loader:
            logits = logits_of(sampler.model(x))
            cross_entropy(logits, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append((index, logits.detach().clone()))
        each()
    return seen


def of_these(seen):
    """The scores of visits that were noted by hand."""
    sampler = sampler_of(conv_net())
    for index, logits in seen:
        sampler.observe(index, logits)
    return sampler.scores


def same(one, other):
    assert torch.equal(one.counts, other.counts)
    torch.testing.assert_close(one.log_probabilities, other.log_probabilities, equal_nan=True)
    torch.testing.assert_close(one.margin, other.margin, equal_nan=True)


@pytest.mark.parametrize(
    ("through", "reason"),
    [
        (lambda s: {"batch_sampler": Reversed(s, BATCH, False)}, "through a Reversed, which may change their order"),
        (
            lambda s: {"batch_size": BATCH, "sampler": EveryOther(s)},
            "through a EveryOther, which may change their order",
        ),
        (lambda s: {"batch_size": BATCH, "sampler": s, "num_workers": 2, "in_order": False}, "in_order=False"),
    ],
)
def test_where_something_between_may_reorder_nothing_is_matched(through, reason):
    sampler = sampler_of(conv_net())
    with pytest.warns(UserWarning, match=REASON.format(f".*{reason}")):
        next(iter(DataLoader(IndexedDataset(data()), **through(sampler))))
    assert reason in sampler._observing.off
    with pytest.raises(RuntimeError, match="nothing has been observed"):
        _ = sampler.scores


@pytest.mark.parametrize(
    "through",
    [
        lambda s: {"batch_sampler": BatchSampler(s, BATCH, False)},
        lambda s: {"batch_sampler": Named(s, BATCH, False)},
        lambda s: {"batch_size": BATCH, "sampler": s, "num_workers": 1, "in_order": False},
        lambda s: {"batch_size": BATCH, "sampler": s, "num_workers": 2, "persistent_workers": True},
    ],
)
def test_batch_samplers_and_workers_that_keep_the_order_are_watched(through):
    sampler = sampler_of(conv_net())
    seen = loop(sampler, DataLoader(IndexedDataset(data()), **through(sampler)))
    same(sampler.scores, of_these(seen))


def test_of_a_tuple_the_first_is_not_taken_for_logits_where_another_looks_like_them():
    sampler = sampler_of(Features(first=True))
    loader = DataLoader(IndexedDataset(data()), BATCH, sampler=sampler)
    with pytest.warns(UserWarning, match=REASON.format("its output has no logits")):
        loop(sampler, loader, 1, lambda output: output[1])
    with pytest.raises(ValueError, match="tensors of 32, 10 columns.*first.*logits of 10 classes.*forward_fn"):
        sampler.select()


def test_of_a_tuple_with_the_logits_first_they_are_taken():
    sampler = sampler_of(Features(first=False))
    loader = DataLoader(IndexedDataset(data()), BATCH, sampler=sampler)
    seen = loop(sampler, loader, 2, lambda output: output[0])
    same(sampler.scores, of_these(seen))


def test_a_loss_before_the_logits_is_skipped():
    class WithLoss(nn.Module):
        """As Hugging Face models with `return_dict=False`."""

        def __init__(self):
            super().__init__()
            self.net = conv_net()

        def forward(self, x, y=None):
            logits = self.net(x)
            return (logits,) if y is None else (cross_entropy(logits, y), logits)

    sampler, seen = sampler_of(WithLoss()), []
    for x, y, index in DataLoader(IndexedDataset(data()), BATCH, sampler=sampler):
        loss, logits = sampler.model(x, y)
        loss.backward()
        seen.append((index, logits.detach()))
    same(sampler.scores, of_these(seen))


@pytest.mark.parametrize("output", [(), [], (torch.tensor(1.0),), (None, torch.zeros(2, 3)), {"x": torch.zeros(2, 3)}])
def test_outputs_without_logits_are_named(output):
    with pytest.raises(ValueError, match="must give logits of shape"):
        logits_of(output)


@pytest.mark.parametrize("strategy", strategies.available())
def test_figures_may_be_read_and_coresets_selected_in_inference_mode(strategy):
    sampler = sampler_of(conv_net(), strategy=strategy, watch=True)

    @torch.inference_mode()
    def evaluate():
        sampler.model.eval()(data().tensors[0])
        assert sampler.stats["coverage"] > 0
        sampler.select()
        sampler.model.train()

    loader = DataLoader(IndexedDataset(data()), BATCH, sampler=sampler)
    loop(sampler, loader, 1, each=evaluate)
    loop(sampler, loader, 2)
    assert sampler.scores.counts.sum() == 3 * 160


@pytest.mark.parametrize("strategy", strategies.available())
def test_everything_runs_where_floats_are_float64_by_default(strategy):
    torch.set_default_dtype(torch.float64)
    try:
        train_set = TensorDataset(data().tensors[0].double(), data().tensors[1], torch.arange(N))
        sampler = sampler_of(conv_net().double(), train_set, strategy=strategy, watch=True)
        seen = loop(sampler, DataLoader(train_set, BATCH, sampler=sampler), 3)
    finally:
        torch.set_default_dtype(torch.float32)
    same(sampler.scores, of_these(seen))


def test_labels_corrected_in_place_in_mid_run_do_not_spoil_the_scores():
    x, y = data().tensors
    train_set = TensorDataset(x, y.clone(), torch.arange(N))
    sampler = sampler_of(conv_net(), train_set)
    loop(sampler, DataLoader(train_set, BATCH, sampler=sampler), 1)
    before = sampler.scores.probabilities().clone()
    train_set.tensors[1][:] = (y + 1) % 10
    assert torch.equal(sampler.scores.probabilities().nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
def test_a_copy_made_in_mid_epoch_has_the_scores_and_does_not_watch(copied):
    sampler = sampler_of(conv_net())
    loader = DataLoader(IndexedDataset(data()), BATCH, sampler=sampler)
    batches = iter(loader)
    x, _, index = next(batches)
    logits = sampler.model.train()(x)
    other = copied(sampler)
    other.model(x)
    same(other.scores, of_these([(index, logits.detach())]))
    same(sampler.scores, other.scores)
    assert len(list(other)) == len(list(sampler)) == 160


def test_a_model_that_was_compiled_and_run_later_is_told_what_to_do():
    torch.compiler.reset()  # what other tests compiled makes torch look at the hooks again
    sampler, (x, y) = sampler_of(conv_net()), data().tensors
    compiled = torch.compile(sampler.model, backend="eager")
    compiled.train()(x[:BATCH])  # what is compiled now has no hooks in it
    loader = DataLoader(data(), BATCH, sampler=sampler)
    for _ in range(2):
        for x, y in loader:
            cross_entropy(compiled(x), y).backward()
    with pytest.warns(UserWarning, match="not seen in training mode.*pass the compiled model"):
        next(iter(loader))


def test_another_default_device_is_refused_in_words():
    sampler = sampler_of(conv_net())
    torch.set_default_device("meta")
    try:
        for call in (sampler.select, lambda: next(iter(sampler))):
            with pytest.raises(RuntimeError, match="needs the CPU as default device, got meta"):
                call()
    finally:
        torch.set_default_device(None)
    assert len(list(sampler)) == 160
