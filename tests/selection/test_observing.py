"""Scores from training's own forward passes: the explicit way, the automatic one, and every way in which it can go wrong."""

import copy
import gc
import json
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from scenarios import conv_net
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from watched import N, ReadsScores
from watched import digit_set as data

from coreset_sampler import Coreset, CoresetSampler, IndexedDataset, SphericalGaussian, WeightedDataset, strategies
from coreset_sampler.randomness import HEAD, mixed_seed
from coreset_sampler.selection.arguments import check_observed
from coreset_sampler.selection.evidence import Evidence
from coreset_sampler.selection.weighted import plain

BATCH = 32


def net():
    model = conv_net()
    model[8].p = 0.0
    return model


def sampler_of(model, **more):
    return CoresetSampler(
        data(), model, **{"size": 160, "strategy": ReadsScores(), "progress": False, "weighting": "none"} | more
    )


def call(sampler, *functions):
    """A pass in which each of these is called with the inputs of every batch."""
    for x, _ in DataLoader(data(), BATCH, sampler=sampler):
        for function in functions:
            function(x)


def step(model, optimizer, x, y):
    logits = model(x)
    cross_entropy(logits, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return logits


def loop(sampler, model, epochs=3, each=None, train_set=None, **loader):
    """A plain training loop; `each(batch number)` is called after every step."""
    optimizer = torch.optim.SGD(innermost(model).parameters(), lr=0.05, momentum=0.9)
    batches = DataLoader(train_set or data(), BATCH, sampler=sampler, **loader)
    model.train()
    for _ in range(epochs):
        for number, (x, y) in enumerate(batches):
            step(model, optimizer, x, y)
            if each is not None:
                each(number)
    return sampler


def innermost(model):
    return getattr(model, "_orig_mod", model)


def explicit(epochs=3, **loader):
    model = net()
    sampler = sampler_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for _ in range(epochs):
        for x, y, index in DataLoader(IndexedDataset(data()), BATCH, sampler=sampler, **loader):
            sampler.observe(index, step(model, optimizer, x, y))
    return sampler


def same(first, second, atol=None):
    one, two = first.state_dict(), second.state_dict()
    for key, value in one.items():
        if atol is None:
            assert torch.equal(torch.as_tensor(value).nan_to_num(-9), torch.as_tensor(two[key]).nan_to_num(-9)), key
        else:
            torch.testing.assert_close(
                torch.as_tensor(value), torch.as_tensor(two[key]), atol=atol, rtol=0, equal_nan=True
            )


@pytest.fixture(scope="module")
def told():
    torch.set_num_threads(1)
    return explicit().scores


@pytest.mark.parametrize("workers", [0, 2])
def test_watching_gives_what_observing_gives_to_the_bit(told, workers):
    model = net()
    sampler = loop(sampler_of(model), model, num_workers=workers)
    same(sampler.scores, told)
    assert sampler.scores.counts.sum() == 3 * 160
    assert sampler.stats["forward_examples"] == 0
    assert sampler.stats["coverage"] == pytest.approx(1.0)
    assert 0 < sampler.stats["score_age"] < 2
    assert sampler.stats["seen"] == 320, "the third selection saw two passes"
    assert not sampler._observing.off


def test_observing_with_workers_gives_the_same_too(told):
    same(explicit(num_workers=2, persistent_workers=True).scores, told)


def test_scores_are_those_of_the_logits_by_a_loop_of_ones_own():
    model, counts, total = net(), torch.zeros(N), torch.zeros(N, 10)
    sampler = sampler_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for _ in range(3):
        for x, y, index in DataLoader(IndexedDataset(data()), BATCH, sampler=sampler):
            p = step(model, optimizer, x, y).detach().softmax(1)
            counts[index] += 1
            total[index] += p
    assert torch.equal(sampler.scores.counts, counts.int())
    seen = counts > 0
    torch.testing.assert_close(
        sampler.scores.probabilities()[seen], total[seen] / counts[seen, None], atol=1e-6, rtol=0
    )


def test_evaluation_and_calls_without_gradients_in_mid_epoch_do_not_count(told):
    model = net()
    x = data().tensors[0]
    running = {}

    def evaluate(_):
        running.update({k: v.clone() for k, v in model.state_dict().items()})
        model.eval()
        model(x)
        model.train()
        with torch.no_grad():
            model(x[:7])
        model.load_state_dict(running)  # BatchNorm in training mode has changed its statistics

    same(loop(sampler_of(model), model, each=evaluate).scores, told)


def test_accumulated_gradients_are_as_many_forward_passes():
    model = net()
    sampler = sampler_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for number, (x, y) in enumerate(DataLoader(data(), BATCH, sampler=sampler)):
        cross_entropy(model(x), y).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert sampler.scores.counts.sum() == 160


def test_bf16_autocast_is_taken_in_float32():
    model = net()
    with torch.autocast("cpu", torch.bfloat16):
        sampler = loop(sampler_of(model), model)
    assert sampler.scores.counts.sum() == 480
    assert sampler.scores.label_probability.dtype == torch.float32


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.net, self.reentrant = net(), reentrant

    def forward(self, x):
        x = self.net[:4](x)
        return self.net[7:](checkpoint(self.net[4:7], x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_the_model_are_computed_twice_and_counted_once(reentrant):
    model = Checkpointed(reentrant)
    assert loop(sampler_of(model), model).scores.counts.sum() == 480


class Whole(nn.Module):
    """Calls a model through a checkpoint, as a training loop may."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, x):
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=False)


def test_a_model_inside_a_checkpoint_is_counted_once():
    model = net()
    assert loop(sampler_of(model), Whole(model)).scores.counts.sum() == 480


@pytest.mark.parametrize("given", ["compiled", "plain"])
def test_a_compiled_model_is_watched(given):
    torch._dynamo.reset()
    model = net()
    if given == "compiled":
        compiled = torch.compile(model, backend="eager")
        compiled.eval()(data().tensors[0][:2])  # compiled before there is a sampler
        sampler = sampler_of(compiled)
    else:
        sampler = sampler_of(model)
        compiled = torch.compile(model, backend="eager")
    assert loop(sampler, compiled).scores.counts.sum() == 480


def test_an_early_break_is_no_mismatch():
    model = net()
    sampler = sampler_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    seen = []
    for _ in range(3):
        for number, (x, y, index) in enumerate(
            DataLoader(IndexedDataset(data()), BATCH, sampler=sampler, num_workers=2)
        ):
            step(model, optimizer, x, y)
            seen += index.tolist()
            if number == 2:
                break
    assert torch.equal(sampler.scores.counts, torch.bincount(torch.tensor(seen), minlength=N).int())
    assert not sampler._observing.off


def test_a_last_batch_that_is_dropped_is_no_mismatch():
    model = net()
    sampler = loop(sampler_of(model, size=150), model, drop_last=True)
    assert sampler.scores.counts.sum() == 3 * 128
    assert not sampler._observing.off


def test_two_samplers_watch_one_model_for_each_its_own_pass():
    model = net()
    first, second = sampler_of(model), sampler_of(model, seed=1)
    loop(first, model, epochs=1)
    loop(second, model, epochs=1)
    assert first.scores.counts.sum() == second.scores.counts.sum() == 160
    assert not torch.equal(first.scores.counts, second.scores.counts)


def test_after_the_run_the_model_is_as_it_was():
    model = net()
    keys = list(model.state_dict())
    loop(sampler_of(model), model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert list(model.state_dict()) == keys


def test_hooks_go_with_a_sampler_that_was_left_in_mid_epoch():
    model = net()
    sampler = sampler_of(model)
    next(iter(DataLoader(data(), BATCH, sampler=sampler)))
    assert model._forward_hooks
    del sampler
    gc.collect()
    assert not model._forward_hooks


@pytest.mark.parametrize("loader", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_hooks_go_after_a_last_pass_whose_last_batch_is_dropped(loader):
    model = net()
    sampler = loop(sampler_of(model, size=150), model, epochs=2, drop_last=True, **loader)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert sampler.scores.counts.sum() == 2 * 128


@pytest.mark.parametrize("workers", [0, 2])
def test_hooks_go_when_the_last_pass_is_left_early(workers):
    model = net()
    sampler, optimizer = sampler_of(model), torch.optim.SGD(model.parameters(), lr=0.05)
    for number, (x, y) in enumerate(DataLoader(data(), BATCH, sampler=sampler, num_workers=workers)):
        step(model.train(), optimizer, x, y)
        if number == 2:
            break
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert sampler.scores.counts.sum() == 3 * BATCH


def test_batches_that_a_loop_holds_back_are_seen_after_it_has_let_go_of_its_loader():
    model = net().train()
    sampler = sampler_of(model)
    waiting = []
    for x, _ in DataLoader(data(), BATCH, sampler=sampler):
        waiting.append(x)
        if len(waiting) > 1:
            model(waiting.pop(0))
    model(waiting.pop(0))
    assert sampler.scores.counts.sum() == 160
    assert not model._forward_hooks


def test_copies_made_in_mid_epoch_are_not_watched(told):
    model = net()
    x = data().tensors[0][:5]

    def copied(number):
        if number == 1:
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                other.train()(x)

    same(loop(sampler_of(model), model, each=copied).scores, told)


def test_an_error_in_a_forward_pass_is_not_counted():
    model = net()
    sampler = sampler_of(model)

    def fail(number):
        if number == 1:
            with pytest.raises(RuntimeError):
                model(torch.zeros(3, 3))

    assert loop(sampler, model, each=fail).scores.counts.sum() == 480


def test_a_run_resumed_in_mid_epoch_has_the_same_scores_and_indices(told):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first, at = sampler_of(model), 0
    model.train()
    for number, (x, y) in enumerate(DataLoader(data(), BATCH, sampler=first)):
        step(model, optimizer, x, y)
        if number == 2:
            state, at = copy.deepcopy(first.state_dict(position=3 * BATCH)), number
            break
    assert at == 2
    del first  # as in a new process
    gc.collect()
    second = sampler_of(model)
    second.load_state_dict(state)
    model.train()
    for _ in range(3):
        for x, y in DataLoader(data(), BATCH, sampler=second):
            step(model, optimizer, x, y)
    same(second.scores, told)


def test_a_framework_that_skips_batches_itself_is_followed():
    model = net()
    first = sampler_of(model)
    batches = list(DataLoader(data(), BATCH, sampler=first))
    model.train()
    for x, _ in batches[:2]:
        model(x)
    state = first.state_dict(position=0)
    second = sampler_of(model)
    second.load_state_dict(state)
    for x, _ in list(DataLoader(data(), BATCH, sampler=second))[2:]:
        model(x)
    assert second.scores.counts.sum() == 160
    assert second.scores.counts.max() == 1


def test_the_whole_data_set_is_watched_unless_it_is_said_not_to():
    for watch, hooked in ((None, True), (False, False)):
        model = net()
        sampler = CoresetSampler(data(), model, fraction=1.0, strategy="uniform", watch=watch, progress=False)
        loop(sampler, model, epochs=1)
        if hooked:
            assert sampler.scores.coverage == pytest.approx(len(set(sampler._order()[0])) / N)
        else:
            with pytest.raises(RuntimeError, match="pass watch=True"):
                _ = sampler.scores


def test_watch_true_watches_under_any_strategy():
    model = net()
    sampler = loop(sampler_of(model, strategy=strategies.Uniform(), watch=True), model, epochs=2)
    assert sampler.scores.counts.sum() == 320


def test_other_strategies_are_given_no_scores_and_no_hooks():
    model, given = net(), []

    def select(view, size, generator):
        given.append(view.scores)
        return Coreset(torch.arange(size), torch.ones(size))

    sampler = sampler_of(model, strategy=select)
    iterator = iter(sampler)
    next(iterator)
    assert given == [None]
    assert not model._forward_hooks


def labelled(model):
    """A model that is told the labels, as those of Hugging Face are."""

    class Told(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, labels=None):
            return {"logits": self.inner(x)}

    return Told()


def run_labelled(shift):
    model = labelled(net())
    sampler = sampler_of(model)
    model.train()
    for x, y in DataLoader(data(), BATCH, sampler=sampler):
        model(x.roll(shift, 0), labels=y.roll(shift, 0))
    return sampler


def test_labels_that_the_model_is_given_must_be_those_of_the_matched_examples():
    assert run_labelled(0).scores.counts.sum() == 160
    with pytest.warns(UserWarning, match=r"labels that it was given.*IndexedDataset"):
        sampler = run_labelled(1)
    with pytest.raises(RuntimeError, match="nothing has been observed"):
        _ = sampler.scores
    assert not sampler.model._forward_hooks


def test_mixed_examples_with_soft_labels_are_left_out_and_others_counted():
    model = labelled(net())
    sampler = sampler_of(model)
    model.train()
    for number, (x, y) in enumerate(DataLoader(data(), BATCH, sampler=sampler)):
        model(x, labels=nn.functional.one_hot(y, 10).float() if number % 2 else y)
    assert sampler.scores.counts.sum() == 3 * BATCH
    assert not sampler._observing.off


def test_more_rows_than_were_given_out_are_a_mismatch():
    model = net()
    sampler = sampler_of(model)
    model.train()
    with pytest.warns(UserWarning, match="given 32 rows where"):
        call(sampler, model, lambda x: model(x.flip(3)))  # two views


@pytest.mark.parametrize("loader", [{}, {"num_workers": 2, "prefetch_factor": 9}], ids=["plain", "read_ahead"])
def test_a_second_pass_over_a_batch_is_a_mismatch_also_where_workers_have_read_all_of_the_epoch(loader):
    model = net()
    model.train()
    batches = DataLoader(data(), BATCH, sampler=sampler_of(model), **loader)
    with pytest.warns(UserWarning, match="given 32 rows where 0"):
        [(model(x), model(x)) for x, _ in batches]  # as SAM does


def test_a_row_that_was_not_given_out_yet_is_a_mismatch():
    model = net()
    sampler = sampler_of(model)
    model.train()
    next(iter(DataLoader(data(), BATCH, sampler=sampler)))
    with pytest.warns(UserWarning, match="given 33 rows where 32"):
        model(data().tensors[0][:33])


@pytest.mark.parametrize(
    "output", [lambda z: z.sum(), lambda z: z[:0], lambda z: z[:, :4], lambda z: {"loss": z.sum()}]
)
def test_an_output_without_a_row_of_logits_for_each_example_is_a_mismatch(output):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            return output(self.inner(x))

    model = Odd()
    sampler = sampler_of(model)
    model.train()
    with pytest.warns(UserWarning, match="cannot be watched"):
        call(sampler, model)


def shifted_loop(sampler, model, epochs, order):
    """A loop that trains on its batches in another order than they were given out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for _ in range(epochs):
        batches = list(DataLoader(data(), BATCH, sampler=sampler))
        for number in order(len(batches)):
            step(model, optimizer, *batches[number])


def by_one(count):
    return [*range(1, count), 0]


def backwards(count):
    return [*range(count - 1, -1, -1)]


@pytest.mark.parametrize("order", [by_one, backwards])
def test_batches_in_another_order_are_found_by_their_loss(order):
    model = net()
    sampler = sampler_of(model, size=N, strategy=ReadsScores())
    with pytest.warns(UserWarning, match=r"fit.*predictions"):
        shifted_loop(sampler, model, 20, order)
    assert sampler._observing.off
    assert sampler.stats["forward_examples"] > 0, "scoring passes took over"
    assert not model._forward_hooks


def test_batches_in_order_are_confirmed_and_a_network_that_knows_nothing_is_not_judged(recwarn):
    model = net()
    sampler = loop(sampler_of(model, size=N), model, epochs=12)
    assert sampler._observing._evidence.confirmed
    still = net()
    sampler = sampler_of(still, size=N)
    still.train()
    for _ in range(12):
        call(sampler, still)
    assert not sampler._observing._evidence.confirmed
    assert not sampler._observing.off
    assert not [w for w in recwarn if "watched" in str(w.message)]


def mixing_loop(sampler, model, epochs, partner, chance=1.0):
    """A loop that mixes each of its batches with `partner(batch)`, in a share of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(epochs):
        for x, y in DataLoader(data(), BATCH, sampler=sampler):
            share, draw = torch.rand(2, generator=generator)
            share = share if draw < chance else 1.0
            logits = model(share * x + (1 - share) * partner(x))
            (share * cross_entropy(logits, y) + (1 - share) * cross_entropy(logits, partner(y))).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(("partner", "chance"), [("flip", 1.0), ("roll", 1.0), ("flip", 0.5)])
def test_mixtures_as_timm_and_torchvision_make_them_are_found_by_their_partners(partner, chance):
    model = net()
    sampler = sampler_of(model, size=N)
    partners = {"flip": lambda rows: rows.flip(0), "roll": lambda rows: rows.roll(1, 0)}
    with pytest.warns(UserWarning, match="mixtures, as of mixup"):
        mixing_loop(sampler, model, 40, partners[partner], chance)
    assert sampler._observing.off


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_rows_of_one_example_each_are_not_taken_for_mixtures(batch):
    """Also with labels that are often wrong, where rows fit those of others nearly as well."""
    generator = torch.Generator().manual_seed(batch)
    for signal in (0.5, 3.0):
        evidence = Evidence(torch.arange(10))
        for _ in range(1500):
            logits = torch.randn(batch, 10, generator=generator)
            labels, *others = torch.randint(10, (3, batch), generator=generator)
            logits[torch.arange(batch), labels] += signal
            wrong = torch.rand(batch, generator=generator) < 0.4
            labels = torch.where(wrong, torch.randint(10, (batch,), generator=generator), labels)
            assert evidence.add(logits, labels, others) is None
        assert evidence.confirmed or batch == 1


def test_after_a_mismatch_a_scoring_pass_fills_the_scores_once_for_every_n_examples():
    model = net()
    sampler = sampler_of(model)
    model.train()
    with pytest.warns(UserWarning, match="Scoring passes take over"):
        call(sampler, lambda x: model(x.repeat(2, 1, 1, 1)))
    costs = []
    for _ in range(5):
        list(sampler)
        costs.append(sampler.stats["forward_examples"])
    assert costs == [N, N, 2 * N, 2 * N, 3 * N]
    assert sampler.scores.coverage == 1


def test_scores_of_a_scoring_pass_are_the_models_own():
    model = net()
    sampler = sampler_of(model, watch=False)
    sampler.select()
    x, y = data().tensors
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(x)
    torch.testing.assert_close(sampler.scores.probabilities(), logits.softmax(1), atol=1e-5, rtol=0)
    others = logits.scatter(1, y[:, None], -torch.inf).amax(1)
    torch.testing.assert_close(sampler.scores.margin, logits.gather(1, y[:, None])[:, 0] - others, atol=1e-4, rtol=0)


def test_a_pass_of_which_the_model_saw_only_a_part_is_a_mismatch():
    model = net()
    sampler = sampler_of(model, size=N)
    model.train()
    for x, _ in list(DataLoader(data(), BATCH, sampler=sampler))[:5]:
        model(x)
    with pytest.warns(UserWarning, match="given 160 rows in a pass over 320"):
        next(iter(sampler))


def test_a_model_that_is_never_seen_leaves_it_to_scoring_passes():
    sampler = sampler_of(net())
    list(sampler)
    list(sampler)
    with pytest.warns(UserWarning, match="two epochs"):
        list(sampler)
    assert sampler.stats["forward_examples"] == N


def test_a_sampler_of_everything_that_is_only_listed_says_nothing(recwarn):
    sampler = CoresetSampler(data(), net(), fraction=1.0, strategy="uniform")
    for _ in range(4):
        list(sampler)
    assert not [w for w in recwarn if "watched" in str(w.message)]


def test_what_did_not_match_leaves_nothing_in_the_scores():
    model = net()
    sampler = sampler_of(model)
    loop(sampler, model, epochs=1)
    before = sampler.scores.state_dict()
    with pytest.warns(UserWarning, match="rows where"):
        call(sampler, model, model)
    assert torch.equal(sampler._observing.store.state_dict()["counts"], before["counts"])


@pytest.mark.parametrize(
    ("indices", "logits", "message"),
    [
        (torch.tensor([0, 400]), torch.zeros(2, 10), r"\[0, 320\), got 0 to 400"),
        (torch.tensor([-1, 4]), torch.zeros(2, 10), r"got -1 to 4"),
        (torch.tensor([0.0, 1.0]), torch.zeros(2, 10), "whole numbers"),
        (torch.tensor([[0], [1]]), torch.zeros(2, 10), "shape"),
        (torch.tensor([0]), torch.zeros(2, 10), "as many rows, got 1 and 2"),
        (torch.tensor([0, 1]), torch.zeros(2, 9), "at least 10"),
        (torch.tensor([0, 1]), torch.zeros(2), r"\(b, classes\)"),
        (torch.tensor([0, 1]), {"logits": 1}, r"pass \.logits"),
        (torch.tensor([0, 1]), torch.zeros(2, 10).long(), "floats"),
    ],
)
def test_observing_says_what_does_not_fit(indices, logits, message):
    sampler = sampler_of(net())
    with pytest.raises(ValueError, match=message):
        sampler.observe(indices, logits)
    sampler.observe([3, 4], torch.zeros(2, 12, dtype=torch.bfloat16, requires_grad=True))
    with pytest.raises(ValueError, match="12 as before, got 10"):
        sampler.observe([3, 4], torch.zeros(2, 10))
    assert sampler.scores.counts.sum() == 2


def test_labels_are_not_gone_through_at_each_batch_once_the_classes_are_known():
    """At ImageNet's size that took as long as a small training step."""
    labels = None  # so that looking at them is an error
    at, _ = check_observed([3, 4], torch.zeros(2, 12), 5, labels, 12)
    assert at.tolist() == [3, 4]
    with pytest.raises(AttributeError):
        check_observed([3, 4], torch.zeros(2, 12), 5, labels, None)


def test_watch_must_be_a_choice():
    with pytest.raises(ValueError, match="watch must be"):
        sampler_of(net(), watch="yes")


def test_indexed_examples_end_in_their_index():
    indexed = IndexedDataset(data())
    assert len(indexed) == N
    assert indexed[7][2] == 7
    assert indexed[-1][2] == N - 1
    x, y, index = next(iter(DataLoader(indexed, 4, sampler=[5, 2, 9, 9])))
    assert index.tolist() == [5, 2, 9, 9]
    assert torch.equal(y, data().tensors[1][index])
    assert torch.equal(x, data().tensors[0][index])
    assert indexed.tensors is indexed.dataset.tensors
    assert len(pickle.loads(pickle.dumps(indexed))) == N


def test_indexed_dicts_have_an_index_and_refuse_a_second():
    assert IndexedDataset([{"x": 1}])[0] == {"x": 1, "index": 0}
    with pytest.raises(ValueError, match="have one already"):
        IndexedDataset([{"index": 1}])[0]
    with pytest.raises(TypeError, match="tuples or dicts"):
        IndexedDataset([1])[0]


@pytest.mark.parametrize(
    "wrap", [lambda d: IndexedDataset(WeightedDataset(d)), lambda d: WeightedDataset(IndexedDataset(d))]
)
def test_indices_and_weights_go_together(wrap):
    both = wrap(data())

    def rising(view, size, generator):
        return Coreset(torch.arange(size), torch.arange(1.0, size + 1))

    sampler = CoresetSampler(both, net(), size=40, strategy=rising, weighting="loss", progress=False)
    batch = next(iter(DataLoader(both, 40, sampler=sampler)))
    weight, index = (batch[2], batch[3]) if isinstance(both, IndexedDataset) else (batch[3], batch[2])
    assert torch.equal(batch[1], data().tensors[1][index])
    torch.testing.assert_close(weight, (index + 1) / 20.5)
    with pytest.raises(TypeError, match="would be dropped"):
        next(iter(DataLoader(IndexedDataset(plain(both)), 8, sampler=sampler)))


@dataclass(frozen=True)
class Around:
    """Stands for `Trajectory(noise)`."""

    noise: object


@dataclass(frozen=True)
class ReadsNoise(ReadsScores):
    posterior: Around = Around(SphericalGaussian(0.3, "head"))
    draws: int = 4


def test_noise_in_the_head_is_averaged_as_whole_networks_would_be():
    model = net()
    sampler = sampler_of(model, strategy=ReadsNoise(draws=3))
    model.train()
    x, _, index = next(iter(DataLoader(IndexedDataset(data()), BATCH, sampler=sampler)))
    logits = model(x).detach()
    generator = torch.Generator().manual_seed(mixed_seed(0, 0, HEAD, 0))
    draws = SphericalGaussian(0.3, "head").draw(SimpleNamespace(model=model), 3, generator)
    with torch.no_grad():
        p = torch.stack([torch.func.functional_call(model, draw, (x,)).softmax(1) for draw in draws]).mean(0)
    torch.testing.assert_close(sampler.scores.probabilities(index), p, atol=1e-6, rtol=0)
    assert (p - logits.softmax(1)).abs().max() > 0.05, "the noise is seen"
    own = logits.softmax(1).gather(1, data().tensors[1][index][:, None])[:, 0]
    torch.testing.assert_close(sampler.scores.label_probability[index], own, atol=1e-6, rtol=0)


def test_noise_in_the_head_repeats_itself_and_leaves_no_hooks():
    stores = []
    for _ in range(2):
        model = net()
        stores.append(loop(sampler_of(model, strategy=ReadsNoise()), model, epochs=2).scores)
        assert not any(module._forward_hooks for module in model.modules())
    same(*stores)


def test_noise_in_the_head_cannot_be_observed_from_logits_alone():
    sampler = sampler_of(net(), strategy=ReadsNoise())
    with pytest.raises(ValueError, match="noise=None"):
        sampler.observe([1], torch.zeros(1, 10))


def test_noise_in_a_head_whose_output_is_changed_is_a_mismatch():
    model = nn.Sequential(net(), nn.Hardtanh())
    sampler = sampler_of(model, strategy=ReadsNoise())
    model.train()
    with pytest.warns(UserWarning, match="not the output of its last layer"):
        call(sampler, model)
    assert not any(module._forward_hooks for module in model.modules())
    sampler.select()
    assert sampler.stats["forward_examples"] == 4 * N


@pytest.fixture(scope="module")
def trained():
    pytest.importorskip("coreset_sampler.selection.suspects")
    wrong = data().tensors[1].clone()
    wrong[::16] = (wrong[::16] + 3) % 10
    noisy = TensorDataset(data().tensors[0], wrong)
    noisy.classes = [f"the {digit}" for digit in range(10)]
    model = net()
    sampler = CoresetSampler(noisy, model, fraction=1.0, strategy="uniform", weighting="none", progress=False)
    loop(sampler, model, epochs=8, train_set=noisy)
    return sampler


def test_suspects_are_the_labels_that_were_changed(trained):
    found = trained.suspects(10)
    assert len(found) == 10
    assert sum(suspect.index % 16 == 0 for suspect in found) >= 8
    assert all(trained.read_labels()[s.index] == s.label for s in found)
    with pytest.raises(ValueError, match="k must be a whole number"):
        trained.suspects(0)


def test_saved_scores_hold_what_an_audit_reads(trained, tmp_path):
    path = tmp_path / "scores.safetensors"
    path.write_text("old")
    trained.save_scores(path)
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata == {
        "format": "coreset_sampler.scores",
        "version": "1",
        "classes": "10",
        "class_names": json.dumps([f"the {digit}" for digit in range(10)]),
        "estimated_noise_rate": "",
    }
    torch.testing.assert_close(tensors["pred_probs"].sum(1), torch.ones(N))
    assert torch.equal(tensors["labels"], trained.read_labels())
    assert torch.equal(tensors["counts"], torch.full((N,), 8, dtype=torch.int32))
    assert torch.equal(tensors["predicted"], tensors["pred_probs"].argmax(1))
    assert {*tensors} == {
        *("pred_probs", "labels", "counts", "label_probability", "margin", "predicted", "predicted_probability"),
        "chance_right",
    }
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(OSError, match="nowhere"):
        trained.save_scores(tmp_path / "nowhere" / "scores.safetensors")


def test_a_head_that_is_replaced_in_mid_run_does_not_disturb_the_check():
    evidence = Evidence(torch.arange(10) % 4)
    for classes in (4, 6) * 15:
        logits = torch.randn(8, classes)
        assert evidence.add(logits, torch.zeros(8, dtype=torch.int64), [torch.ones(8, dtype=torch.int64)] * 2) is None


@pytest.mark.parametrize("watch", [True, False])
def test_scores_of_a_head_with_more_classes_than_before_are_refused_in_words(watch):
    model = net()
    sampler = loop(sampler_of(model, watch=watch), model, epochs=2)
    model[-1] = nn.Linear(model[-1].in_features, 12)
    with pytest.raises(ValueError, match="10 as before, got 12.* make a new sampler"):
        loop(sampler, model, epochs=3)


def fitting(batch, labels, classes=4, signal=3.0):
    """Logits of a network that fits these labels."""
    logits = torch.randn(len(labels), classes, generator=torch.Generator().manual_seed(batch))
    logits[torch.arange(len(labels)), labels] += signal
    return logits


def first_verdict(evidence, logits_of=fitting, rows=32, most=100):
    """At which batch, from 1, rows that fit the labels of the batch before are noticed."""
    generator = torch.Generator().manual_seed(0)
    for batch in range(1, most + 1):
        labels, *others = torch.randint(4, (3, rows), generator=generator)
        if evidence.add(logits_of(batch, others[0]), labels, others) is not None:
            return batch
    return None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_are_judged_whatever_the_default_dtype_is(dtype):
    torch.set_default_dtype(dtype)
    try:
        verdict = first_verdict(Evidence(torch.arange(4)), lambda batch, labels: fitting(batch, labels).float())
    finally:
        torch.set_default_dtype(torch.float32)
    assert verdict == 20


def test_batches_with_nan_do_not_put_the_verdict_off_by_more_than_themselves():
    def damaged(batch, labels):
        return fitting(batch, labels) * (torch.nan if batch in (3, 9) else 1)

    assert first_verdict(Evidence(torch.arange(4)), damaged) == 22


def test_large_logits_wait_up_to_a_limit_and_the_verdict_is_as_early(monkeypatch):
    monkeypatch.setattr("coreset_sampler.selection.evidence._MOST_WAITING", 3 * 32 * 4 * 4)
    evidence, held = Evidence(torch.arange(4)), []

    def noted(batch, labels):
        held.append(len(evidence._waiting))
        return fitting(batch, labels)

    assert first_verdict(evidence, noted) == 20
    assert max(held) == 2


def test_no_logits_are_held_once_watching_is_off_or_in_a_copy():
    model = net()
    sampler = sampler_of(model, size=N)
    loop(sampler, model, epochs=1)
    assert sampler._observing._evidence._waiting
    assert copy.deepcopy(sampler)._observing._evidence is None
    sampler.observe([0], torch.zeros(1, 10))  # from now on the loop does it itself
    assert sampler._observing._evidence is None
