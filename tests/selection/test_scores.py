"""The store of scores against means over all visits in float64."""

import numpy as np
import pytest
import torch

from coreset_sampler.selection.scores import PROJECTED, ScoreStore, _projection


def visits(n, classes, batches, size, seed=0):
    """Random batches `(indices, logits, epoch)`, in which an index may come more than once; the last two never come."""
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(batches):
        at = torch.randint(n - 2, (size,), generator=generator)
        yield at, 3 * torch.randn(size, classes, generator=generator), epoch


def labels_for(n, classes, seed=1):
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))


def filled(n, classes, batches, size):
    store = ScoreStore(labels_for(n, classes), classes)
    seen = {}
    for at, logits, epoch in visits(n, classes, batches, size):
        store.observe(at, logits, epoch)
        for index, row in zip(at.tolist(), logits.double(), strict=True):
            seen.setdefault(index, []).append((row, epoch))
    return store, seen


@pytest.mark.parametrize(("n", "classes"), [(40, 5), (40, 2), (40, 64), (40, 65), (30, 200)])
def test_everything_is_the_mean_over_all_visits(n, classes):
    store, seen = filled(n, classes, batches=25, size=6)
    assert any(len(rows) > 3 for rows in seen.values())
    assert len(seen) < n, "some must be unseen for the test to say something"
    for index in range(n):
        y, rows = int(store.labels[index]), seen.get(index, [])
        assert int(store.counts[index]) == len(rows)
        assert int(store.last_seen[index]) == (rows[-1][1] if rows else -1)
        if not rows:
            assert torch.isnan(store.gradients(torch.tensor([index]))).all()
            assert torch.isnan(
                torch.stack([store.label_probability, store.margin, store.predicted_probability])[:, index]
            ).all()
            assert int(store.predicted[index]) == -1
            continue
        logits = torch.stack([row for row, _ in rows])
        p = logits.softmax(1)
        others = logits.clone()
        others[:, y] = -torch.inf
        gradient = p.mean(0)
        gradient[y] -= 1
        if store.projected:
            gradient = gradient @ _projection(classes).double()
            assert float(store.predicted_probability[index]) == pytest.approx(float(p.amax(1).mean()), abs=1e-5)
        else:
            torch.testing.assert_close(
                store.probabilities(torch.tensor([index]))[0].double(), p.mean(0), atol=1e-5, rtol=0
            )
            counted = torch.tensor([min(k, 3) ** 2 for k in range(1, len(p) + 1)], dtype=p.dtype)
            later = (counted[:, None] * p.log()).sum(0) / counted.sum()
            torch.testing.assert_close(store.log_probabilities[index].double(), later, atol=1e-4, rtol=0)
            assert int(store.predicted[index]) == int(p.mean(0).argmax())
            assert float(store.predicted_probability[index]) == pytest.approx(float(p.mean(0).max()), abs=1e-5)
        torch.testing.assert_close(store.gradients(torch.tensor([index]))[0].double(), gradient, atol=1e-5, rtol=0)
        assert float(store.label_probability[index]) == pytest.approx(float(p[:, y].mean()), abs=1e-5)
        assert float(store.margin[index]) == pytest.approx(float((logits[:, y] - others.amax(1)).mean()), abs=1e-4)


def test_coverage_and_age_count_what_was_seen():
    store = ScoreStore(torch.zeros(10, dtype=torch.int64), 2)
    assert store.coverage == 0
    assert np.isnan(store.age(4))
    store.observe(torch.tensor([1, 2]), torch.zeros(2, 2), 1)
    store.observe(torch.tensor([2, 5]), torch.zeros(2, 2), 3)
    assert store.coverage == pytest.approx(0.3)
    assert store.age(4) == pytest.approx((3 + 1 + 1) / 3)


def test_a_batch_with_an_example_twice_is_two_visits_one_after_the_other():
    labels = labels_for(9, 70)
    at = torch.tensor([3, 3, 8, 3, 0])
    logits = torch.randn(5, 70, generator=torch.Generator().manual_seed(2))
    at_once, by_row = ScoreStore(labels, 70), ScoreStore(labels, 70)
    at_once.observe(at, logits, 0)
    for row in range(5):
        by_row.observe(at[row : row + 1], logits[row : row + 1], 0)
    first, second = at_once.state_dict(), by_row.state_dict()
    for key in ("counts", "label_probability", "margin", "vote", "votes", "largest"):
        torch.testing.assert_close(first[key], second[key], equal_nan=True)
    torch.testing.assert_close(first["gradient"], second["gradient"], equal_nan=True)


def test_a_class_that_leads_in_most_visits_is_the_predicted_one_where_projected():
    store = ScoreStore(torch.zeros(3, dtype=torch.int64), 100)
    for epoch, likeliest in enumerate([7, 9, 7, 7, 12, 7, 9]):
        logits = torch.zeros(1, 100)
        logits[0, likeliest] = 5.0
        store.observe(torch.tensor([1]), logits, epoch)
    assert store.predicted.tolist() == [-1, 7, -1]


def test_projected_gradients_keep_squared_distances_on_average():
    generator = torch.Generator().manual_seed(0)
    p = (4 * torch.randn(400, 1000, generator=generator)).softmax(1)
    other = (4 * torch.randn(400, 1000, generator=generator)).softmax(1)
    ratio = ((p - other) @ _projection(1000)).pow(2).sum(1) / (p - other).pow(2).sum(1)
    spread = (2 / PROJECTED) ** 0.5  # at most, of one pair
    assert ratio.mean() == pytest.approx(1, abs=4 * spread / 400**0.5)
    assert ratio.std() < 1.3 * spread


def test_imagenet_takes_less_than_300_megabytes():
    store = ScoreStore(torch.zeros(1_281_167, dtype=torch.int64), 1000)
    held = [value for value in vars(store).values() if isinstance(value, torch.Tensor)]
    assert sum(value.numel() * value.element_size() for value in held) < 300e6


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_skipped_and_counted(bad):
    store, clean = (ScoreStore(torch.tensor([0, 1, 0, 1]), 2) for _ in range(2))
    logits = torch.randn(3, 2)
    clean.observe(torch.tensor([0, 3]), logits[[0, 2]], 0)
    logits[1, 0] = bad
    store.observe(torch.tensor([0, 1, 3]), logits, 0)
    assert store.skipped == 1
    assert store.counts.tolist() == [1, 0, 0, 1]
    torch.testing.assert_close(store.probabilities(), clean.probabilities(), equal_nan=True, rtol=0, atol=0)


def test_first_visits_are_those_of_the_second_half_and_only_the_first_time():
    n, classes = 50, 3
    labels, order = labels_for(n, classes), torch.randperm(n, generator=torch.Generator().manual_seed(3))
    logits = torch.randn(n, classes)
    store = ScoreStore(labels, classes)
    for at in order.split(7):
        store.observe(at, logits[at], 0)
        store.observe(at, -logits[at], 0)  # a second visit
    at, kept = store.first_visits()
    assert at.tolist() == order[25:].tolist()
    torch.testing.assert_close(kept, logits[at], atol=5e-3, rtol=0)
    assert kept.dtype == torch.float32


def test_first_visits_are_a_fair_sample_where_there_are_too_many():
    n = 60_000
    store = ScoreStore(torch.zeros(n, dtype=torch.int64), 2)
    for at in torch.arange(n).split(500):
        store.observe(at, torch.zeros(len(at), 2), 0)
    at, _ = store.first_visits()
    assert len(at) == len(at.unique()) == 20_000
    assert at.min() >= n // 2
    parts = torch.histc(at.float(), 6, n // 2, n)
    assert (parts - 20_000 / 6).abs().max() < 5 * (20_000 / 6 * 5 / 6) ** 0.5


def test_batches_cut_elsewhere_give_the_same_first_visits():
    n = 50_000
    stores = [ScoreStore(torch.zeros(n, dtype=torch.int64), 2) for _ in range(2)]
    for store, size in zip(stores, (64, 1000), strict=True):
        for at in torch.arange(n).split(size):
            store.observe(at, torch.zeros(len(at), 2), 0)
    assert torch.equal(stores[0].first_visits()[0], stores[1].first_visits()[0])


def test_half_precision_and_other_integers_are_taken():
    store = ScoreStore(torch.tensor([0, 1]), 3)
    store.observe(torch.tensor([1], dtype=torch.int32), torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.bfloat16), 0)
    assert store.label_probability[1] == pytest.approx(float(torch.tensor([1.0, 2.0, 0.0]).softmax(0)[1]))


@pytest.mark.parametrize("classes", [4, 80])
def test_a_saved_store_goes_on_as_if_nothing_had_happened(classes):
    labels = labels_for(30, classes)
    whole, saved = ScoreStore(labels, classes), ScoreStore(labels, classes)
    for number, (at, logits, epoch) in enumerate(visits(30, classes, 12, 8)):
        whole.observe(at, logits, epoch)
        saved.observe(at, logits, epoch)
        if number == 5:
            state = saved.state_dict()
            saved.observe(torch.arange(30), torch.zeros(30, classes), 9)  # must not reach the state
            saved = ScoreStore(labels, classes)
            saved.load_state_dict(state)
    first, second = whole.state_dict(), saved.state_dict()
    for key, value in first.items():
        assert torch.equal(torch.as_tensor(value).nan_to_num(-9), torch.as_tensor(second[key]).nan_to_num(-9)), key


def test_a_state_of_other_data_or_a_damaged_one_changes_nothing():
    store = ScoreStore(torch.tensor([0, 1, 1]), 2)
    store.observe(torch.tensor([0]), torch.zeros(1, 2), 0)
    with pytest.raises(ValueError, match="n=2, here it is 3"):
        store.load_state_dict(ScoreStore(torch.tensor([0, 1]), 2).state_dict())
    with pytest.raises(ValueError, match="damaged"):
        store.load_state_dict({"n": 3})
    with pytest.raises(ValueError, match="margin"):
        store.load_state_dict({**store.state_dict(), "counts": torch.ones(3).int(), "margin": torch.zeros(2)})
    assert store.counts.tolist() == [1, 0, 0]


def test_labels_beyond_the_classes_are_refused():
    with pytest.raises(ValueError, match="above the highest label, 4, got 4"):
        ScoreStore(torch.tensor([0, 4]), 4)
    with pytest.raises(ValueError, match="labels must be whole numbers"):
        ScoreStore(torch.zeros(3), 4)


def test_probabilities_of_a_projected_store_are_refused_with_what_to_read_instead():
    with pytest.raises(ValueError, match="label_probability"):
        ScoreStore(torch.zeros(3, dtype=torch.int64), 65).probabilities()


def test_gradients_that_are_given_take_the_place_of_the_logits_own():
    store = ScoreStore(torch.tensor([0, 1]), 3)
    given = torch.tensor([[-0.5, 0.25, 0.25]])
    store.observe(torch.tensor([0]), torch.zeros(1, 3), 0, given)
    torch.testing.assert_close(store.gradients(torch.tensor([0])), given)
    assert store.label_probability[0] == pytest.approx(1 / 3)
