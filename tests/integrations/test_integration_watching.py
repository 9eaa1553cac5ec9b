"""Watching in two real processes: DDP and FSDP2 on the CPU."""

import pytest
import torch
from frameworks import two_processes
from torch.nn.functional import cross_entropy
from watched import N, ReadsScores, digit_set, linear_net

from coreset_sampler import CoresetSampler

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def ranks():
    return two_processes("two_watched.py")


def alone(given):
    """The scores of one process that trains on what the two had, batch by batch together."""
    model = linear_net()
    sampler = CoresetSampler(digit_set(), model, size=160, strategy=ReadsScores(), weighting="none", progress=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    x, y = digit_set().tensors
    for parts in zip(*given, strict=True):
        index = torch.tensor([i for part in parts for i in part])
        logits = model(x[index])
        sampler.observe(index, logits)
        cross_entropy(logits, y[index]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sampler.scores.state_dict()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_both_processes_have_the_same_scores_and_those_of_one_process(ranks, kind):
    first, second = (rank[kind] for rank in ranks)
    for key, value in first["scores"].items():
        assert torch.equal(
            torch.as_tensor(value).nan_to_num(-9), torch.as_tensor(second["scores"][key]).nan_to_num(-9)
        ), key
    expected = alone([first["given"], second["given"]])
    for key in ("counts", "gradient", "label_probability", "margin"):
        torch.testing.assert_close(first["scores"][key], expected[key], atol=1e-4, rtol=0, equal_nan=True)
    assert first["scores"]["counts"].sum() == 3 * 160


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_nothing_extra_is_run_and_scores_are_put_together_at_selections(ranks, kind):
    for rank in ranks:
        assert rank[kind]["stats"]["forward_examples"] == 0
        assert rank[kind]["stats"]["seen"] == 480
        assert rank[kind]["pending"] == 320, "the last pass waits for the next selection"
        assert rank[kind]["hooks"] == 0
        assert len({i for part in rank[kind]["given"] for i in part}) < N


def test_a_state_saved_in_mid_epoch_after_sync_scores_goes_on_with_the_same_indices_and_scores(ranks):
    for rank in ranks:
        through, after = rank["resumed"]
        assert after["given"] == through["given"]
        assert through["scores"]["counts"].sum() == 3 * 160
        for key, value in through["scores"].items():
            found = torch.as_tensor(after["scores"][key])
            assert torch.equal(torch.as_tensor(value).nan_to_num(-9), found.nan_to_num(-9)), key
