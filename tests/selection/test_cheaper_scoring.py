"""Scoring passes that cost less say the same: candidates sorted by length, and the training's precision."""

import pytest
import torch
from scenarios import digits, trained_net
from test_probe import assert_same, everything, unusual_state
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from coreset_sampler import CoresetSampler, DistributedCoresetSampler, SphericalGaussian, strategies
from coreset_sampler.selection.batch import in_order
from coreset_sampler.selection.scoring import ScoringView

N, CLASSES = 600, 4


class Sentences(Dataset):
    """Examples as tokenizers give them, of 1 to 60 tokens."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(1, 61, (N,), generator=generator)
        self.ids = [torch.randint(1, 50, (int(length),), generator=generator) for length in self.lengths]
        self.labels = torch.randint(CLASSES, (N,), generator=generator)

    def __len__(self):
        return N

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


class Reader(nn.Module):
    """A recurrent network whose last state at each sentence's end makes the logits."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding, self.mix = nn.Embedding(50, 8, padding_idx=0), nn.GRU(8, 8, batch_first=True)
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, input_ids):
        last = (input_ids != 0).sum(1) - 1
        states = self.mix(self.embedding(input_ids))[0]
        return self.head(self.norm(states[torch.arange(len(last)), last]))


def padded(items):
    ids = pad_sequence([item["input_ids"] for item in items], batch_first=True)
    return {"input_ids": ids, "labels": torch.stack([item["labels"] for item in items])}


def view_of(data, model, **settings):
    options = dict(forward_fn=None, collate_fn=padded, batch_size=32, num_workers=0, progress=False, seed=0)
    return ScoringView(data, model, data.labels, **{**options, **settings})


GROUPS = [torch.arange(0, 300, 3), torch.tensor([599]), torch.arange(100).flip(0) + 450]


@pytest.mark.parametrize("what", ["gradients", "embeddings"])
@pytest.mark.parametrize("stretch", [50, 4096])  # 50 cuts through groups and batches, so that it spares next to nothing
def test_candidates_sorted_by_length_give_the_same_rows_in_the_order_asked_for(what, stretch, monkeypatch):
    monkeypatch.setattr("coreset_sampler.selection.batch._STRETCH", stretch)
    data, found, tokens = Sentences(), [], []
    for lengths in (None, data.lengths):
        shapes = []

        def noted(items, shapes=shapes):
            batch = padded(items)
            shapes.append(batch["input_ids"].shape)
            return batch

        view = view_of(data, Reader(), lengths=lengths, collate_fn=noted)
        draws = [{}, {"norm.weight": torch.ones(8) * 2}] if what == "gradients" else None
        asked = view.gradients(GROUPS, draws) if draws else view.embeddings(GROUPS)
        with torch.no_grad():
            found.append(list(asked))
        tokens.append(sum(rows * width for rows, width in shapes))
        assert view.forward_examples == 201 * (2 if draws else 1)
    assert [rows.shape for rows in found[0]] == [rows.shape for rows in found[1]]
    for plain, sorted_rows in zip(*found, strict=True):
        assert torch.allclose(plain, sorted_rows, atol=1e-5)
        assert plain.std() > 0.01  # so that rows out of place would be seen
    assert tokens[1] < (0.75 if stretch == 4096 else 1) * tokens[0]


def test_rows_come_back_to_their_places():
    lengths = torch.tensor([0, 0, 0, 9, 0, 4, 0, 2])
    ran = []

    def run(groups):
        ran.append(torch.cat(groups).tolist())
        return iter([torch.cat(groups).view(1, -1, 1)])

    (rows,) = in_order(run, [torch.tensor([7, 3]), torch.tensor([5])], lengths)
    assert (ran, rows.flatten().tolist()) == ([[3, 5, 7]], [7, 3, 5])


def test_a_sampler_with_lengths_selects_what_it_would_without():
    data, kept = Sentences(), []
    for lengths in (None, [len(ids) for ids in data.ids]):
        sampler = CoresetSampler(
            data, Reader(), size=60, lengths=lengths, collate_fn=padded, progress=False, strategy="stable"
        )
        kept.append(sampler.select())
    assert set(kept[0].indices.tolist()) == set(kept[1].indices.tolist())


def test_scoring_in_half_precision_leaves_the_model_alone():
    model, seen = unusual_state(trained_net()), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    strategy = strategies.Stable(posterior=SphericalGaussian(0.1, redraw=1))
    sampler = CoresetSampler(digits(), model, size=100, strategy=strategy, scoring_dtype=torch.bfloat16, progress=False)
    before = everything(model)
    sampler.select()
    assert set(seen) == {torch.bfloat16}
    assert_same(before, everything(model))


def test_scoring_in_half_precision_stays_close():
    data, gradients = digits(), []
    for dtype in (None, torch.bfloat16):
        settings = dict(collate_fn=None, dtype=dtype, batch_size=128, num_workers=0, progress=False, seed=0)
        view = ScoringView(data, trained_net().eval(), data.tensors[1], forward_fn=None, **settings)
        with torch.no_grad():
            gradients += view.gradients([torch.arange(500)])
    difference = (gradients[0] - gradients[1]).abs()
    assert gradients[1].dtype == torch.float32
    assert 0 < difference.max() < 0.1
    assert difference.mean() < 2e-3


def test_draws_in_half_precision_are_those_of_separate_runs_also_within_the_users_autocast():
    data, model = digits(), trained_net().eval()
    names = [name for name, _ in model[4].named_parameters(prefix="4")]
    generator = torch.Generator().manual_seed(0)
    own = dict(model.named_parameters())
    draws = [{n: own[n].detach() + torch.randn(own[n].shape, generator=generator) for n in names} for _ in range(3)]
    settings = dict(collate_fn=None, dtype=torch.bfloat16, batch_size=64, num_workers=0, progress=False, seed=0)
    view = ScoringView(data, model, data.tensors[1], forward_fn=None, **settings)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        (together,) = view.gradients([torch.arange(64)], draws)
        apart = [next(iter(view.gradients([torch.arange(64)], [draw])))[0] for draw in draws]
    assert torch.equal(together, torch.stack(apart))
    assert not torch.equal(together[0], together[1])


def test_the_fisher_is_in_full_precision():
    data, found = digits(), []
    for dtype in (None, torch.float16):
        settings = dict(collate_fn=None, dtype=dtype, batch_size=64, num_workers=0, progress=False, seed=0)
        view = ScoringView(data, trained_net().eval(), data.tensors[1], forward_fn=None, **settings)
        found.append(view.fisher(["1.weight"], 64, torch.Generator().manual_seed(0))["1.weight"])
    assert torch.equal(*found)


@pytest.mark.parametrize("cls", [CoresetSampler, DistributedCoresetSampler])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(lengths=[1, 2]), r"lengths must have one entry for each of the 1797 examples, got shape \(2,\)"),
        (dict(lengths=3), "got shape"),
        (dict(lengths=["a"] * 1797), "lengths must be one number per example, such as"),
        (dict(lengths=[float("nan")] * 1797), "lengths must be finite"),
        (dict(scoring_dtype="bf16"), "scoring_dtype must be torch.bfloat16 or torch.float16.*got 'bf16'"),
        (dict(scoring_dtype=torch.int8), "scoring_dtype must be torch.bfloat16 or torch.float16.*got torch.int8"),
    ],
)
def test_bad_settings_are_told_at_the_door(cls, settings, message):
    with pytest.raises(ValueError, match=message):
        cls(digits(), trained_net(), size=10, **settings)
