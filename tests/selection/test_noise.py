"""The noise model on simulated predictions: what is true of each label is known."""

import math

import pytest
import torch
from simulated import area_under_curve, labelled, observed, pairs, predictions, symmetric

from coreset_sampler.selection import noise
from coreset_sampler.selection.noise import NoiseModel, label_odds, lowered, noise_model, quality_of
from coreset_sampler.selection.strategies.due import label_chance


def label_quality(log_probabilities, labels, model):
    return label_odds(log_probabilities, labels, model).sigmoid().float()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("matrix", [symmetric(0.5, 10), symmetric(0.1, 10), pairs(0.4, 10), pairs(0.15, 10)])
def test_rate_matrix_and_temperature_are_found(matrix, temperature):
    truth, logits = predictions(6000, 10, temperature=temperature)
    labels = labelled(truth, matrix)
    model = noise_model(logits, labels)
    assert model.competent
    assert model.rate == pytest.approx(float((labels != truth).double().mean()), abs=0.02)
    assert (model.matrix - matrix).abs().max() < 0.06
    assert model.matrix.sum(1).allclose(torch.ones(10, dtype=torch.float64))


def test_classes_of_different_noise_have_different_rates():
    matrix = torch.eye(4, dtype=torch.float64)
    matrix[2] = torch.tensor([0.0, 0.6, 0.4, 0.0])
    truth, logits = predictions(4000, 4)
    model = noise_model(logits, labelled(truth, matrix))
    assert (model.matrix - matrix).abs().max() < 0.06
    assert model.rate == pytest.approx(0.15, abs=0.02)


@pytest.mark.parametrize("signal", [0.7, 1.5, 4.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("classes", [2, 10, 30])
def test_clean_labels_are_not_doubted_by_weak_nor_by_overconfident_networks(classes, signal, temperature):
    truth, logits = predictions(50 * classes + 1000, classes, signal=signal, temperature=temperature)
    model = noise_model(logits, truth)
    assert model.rate == 0
    assert model.matrix.equal(torch.eye(classes, dtype=torch.float64))
    assert label_quality(logits, truth, model).equal(torch.ones(len(truth)))


def test_a_network_that_knows_nothing_doubts_nothing():
    truth, logits = predictions(3000, 10, signal=0.0)
    noisy = labelled(truth, symmetric(0.5, 10))
    for said in (torch.randn(3000, 10, generator=torch.Generator().manual_seed(3)), logits + torch.eye(10)[4] * 9):
        model = noise_model(said, noisy)
        assert (model.competent, model.rate) == (False, 0.0)
        assert label_quality(said, noisy, model).equal(torch.ones(3000))


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5])
def test_few_examples_of_many_classes_share_one_rate(rate):
    truth, logits = predictions(4000, 200, signal=4.0)
    labels = labelled(truth, symmetric(rate, 200))
    model = noise_model(logits, labels)
    assert model.rate == pytest.approx(rate, abs=0.03)
    assert float(model.matrix.diag().max() - model.matrix.diag().min()) < 0.01  # but for how common a class is
    if rate:
        wrong = labels != truth
        assert area_under_curve(label_quality(logits, labels, model), wrong) > 0.95


def test_one_rate_is_found_where_a_rate_for_each_pair_of_classes_says_no_more_than_luck():
    truth, logits = predictions(5000, 100, signal=4.0)
    labels = labelled(truth, symmetric(0.1, 100))
    model = noise_model(logits, labels)
    assert model.rate == pytest.approx(0.1, abs=0.02)
    assert float(model.matrix.diag().max() - model.matrix.diag().min()) < 0.01


def test_a_rare_class_of_few_examples_is_not_doubted_by_accident():
    truth, logits = predictions(5000, 10)
    keep = (truth != 9) | (torch.arange(5000) < 80)  # about eight of class 9, and the network knows that they are rare
    truth, logits = truth[keep], logits[keep]
    logits[:, 9] += math.log(8 / 500)
    labels = truth.where(truth == 9, labelled(truth, symmetric(0.2, 10)))
    quality = label_quality(logits, labels, noise_model(logits, labels))
    assert quality[truth == 9].median() > 0.5


def loglik(logits, labels, temperature, matrix):
    """The likelihood in plain Python."""
    total, matrix = 0.0, matrix.tolist()
    for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
        weights = [math.exp((value - max(z)) / temperature) for value in z]
        total += math.log(sum(w * matrix[k][y] for k, w in enumerate(weights)) / sum(weights))
    return total


def test_the_fit_is_the_maximum_that_a_search_over_all_models_finds(monkeypatch):
    monkeypatch.setattr(noise, "_PRIOR", 0.0)
    monkeypatch.setattr(noise, "_LEAST_MORE", 0.0)
    monkeypatch.setattr(noise, "_ERRORS_ABOVE_CLEAN", 0.0)
    monkeypatch.setattr(noise, "_TIMES_AS_MUCH", 0.0)
    truth, logits = predictions(800, 2, signal=2.0)
    labels = labelled(truth, torch.tensor([[0.8, 0.2], [0.4, 0.6]], dtype=torch.float64))
    model = noise_model(logits, labels)
    found = max(loglik(logits, labels, temperature, model.matrix) for temperature in (0.8, 0.9, 1.0, 1.1, 1.2))
    steps = torch.arange(0.05, 0.6, 0.1)
    grid = [
        loglik(logits, labels, temperature, torch.tensor([[1 - a, a], [b, 1 - b]]))
        for temperature in (0.5, 1.0, 2.0) for a in steps for b in steps
    ]  # fmt: skip
    assert found >= max(grid) - 0.05
    assert found >= loglik(logits, labels, 1.0, torch.tensor([[0.8, 0.2], [0.4, 0.6]])) - 0.05


def test_quality_is_bayes_rule():
    matrix = pairs(0.3, 5)
    truth, logits = predictions(300, 5, signal=2.0)
    labels = labelled(truth, matrix)
    model = NoiseModel(matrix, 0.3, competent=True)
    quality = label_quality(logits, labels, model)

    def by_hand(temperature):
        found = []
        for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
            weights = [math.exp((value - max(z)) / temperature) for value in z]
            found.append(weights[y] * 0.7 / (weights[y] * 0.7 + weights[y - 1] * 0.3))
        return torch.tensor(found)

    assert min(float((by_hand(temperature) - quality).abs().max()) for temperature in noise._TEMPERATURES) < 1e-5


def test_of_labels_with_quality_three_tenths_three_in_ten_are_right():
    truth, logits = predictions(6000, 5, signal=2.0)
    labels = labelled(truth, pairs(0.3, 5))
    quality = label_quality(logits, labels, noise_model(logits, labels))
    right = (labels == truth).double()
    assert float(quality.mean()) == pytest.approx(float(right.mean()), abs=0.02)
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        inside = (quality >= low) & (quality <= low + 0.2)
        assert float(right[inside].mean()) == pytest.approx(float(quality[inside].mean()), abs=0.08)


@pytest.mark.parametrize(("matrix", "ahead"), [(pairs(0.4, 10), 0.02), (symmetric(0.5, 10), -0.005)])
def test_quality_ranks_wrong_labels_better_than_the_probability_of_the_label(matrix, ahead):
    matrix = matrix.clone()
    truth, logits = predictions(5000, 10, signal=1.5)
    if ahead > 0:
        matrix[5:] = torch.eye(10, dtype=torch.float64)[5:]  # half of the classes are clean
    labels = labelled(truth, matrix)
    wrong, p = labels != truth, logits.softmax(1)
    quality = label_quality(logits, labels, noise_model(logits, labels))
    assert area_under_curve(quality, wrong) > area_under_curve(p.gather(1, labels[:, None])[:, 0], wrong) + ahead


def test_rows_not_seen_are_left_out_and_have_quality_one():
    truth, logits = predictions(3000, 10)
    labels = labelled(truth, symmetric(0.3, 10))
    more = torch.cat([logits, torch.full((500, 10), math.nan, dtype=torch.float64)])
    all_labels = torch.cat([labels, torch.zeros(500, dtype=torch.int64)])
    model, same = noise_model(logits, labels), noise_model(more, all_labels)
    assert same.rate == model.rate
    assert same.matrix.equal(model.matrix)
    quality = label_quality(more, all_labels, model)
    assert quality[3000:].equal(torch.ones(500))
    assert quality[:3000].equal(label_quality(logits, labels, model))
    none = torch.full((20, 10), math.nan)
    assert not noise_model(none, torch.zeros(20, dtype=torch.int64)).competent
    assert label_quality(none, torch.zeros(20, dtype=torch.int64), model).equal(torch.ones(20))


def test_half_precision_gives_nearly_the_same_model():
    truth, logits = predictions(3000, 10)
    labels = labelled(truth, symmetric(0.3, 10))
    assert noise_model(logits.half(), labels).rate == pytest.approx(noise_model(logits, labels).rate, abs=0.005)


def test_many_rows_are_sampled_and_done_in_chunks_whatever_the_random_state(monkeypatch):
    truth, logits = predictions(6000, 10)
    labels = labelled(truth, symmetric(0.3, 10))
    monkeypatch.setattr(noise, "_ROWS", 2000)
    torch.manual_seed(5)
    model = noise_model(logits, labels)
    whole = label_quality(logits, labels, model)
    assert model.rate == pytest.approx(0.3, abs=0.04)
    state = torch.manual_seed(6).get_state()
    monkeypatch.setattr(noise, "_CHUNK", 70)
    again = noise_model(logits, labels)
    assert again.matrix.equal(model.matrix)
    assert label_quality(logits, labels, again).allclose(whole, atol=1e-6)
    assert torch.get_rng_state().equal(state)


def test_the_chance_is_a_power_of_the_quality_and_leaves_each_class_its_share():
    quality, labels = torch.tensor([0.8, 0.4, 0.6, 0.6, 0.0]), torch.tensor([0, 0, 1, 1, 1])
    assert label_chance(quality, labels, exponent=1).allclose(quality / 0.8)
    expected = torch.tensor([0.64 * 1.2 / 0.8, 0.16 * 1.2 / 0.8, 0.6, 0.6, 0.0])  # both classes sum to 1.2
    assert label_chance(quality, labels, exponent=2).allclose(expected / 0.96)
    assert label_chance(quality, labels, exponent=0).allclose(torch.tensor([0.6, 0.6, 0.4, 0.4, 0.4]) / 0.6)
    ones = torch.ones(5)
    assert label_chance(ones, labels, exponent=4).equal(ones)
    assert label_chance(torch.zeros(5), labels).equal(torch.zeros(5))
    assert len(label_chance(quality[:0], labels[:0])) == 0


def test_chances_keep_the_order_of_the_qualities_of_a_class():
    """Cut off at 1, as they were, the three surest labels of eight had the same chance."""
    quality = torch.tensor([1.0, 0.97, 0.94, 0.91, 0.3, 0.2, 0.1, 0.0])
    chance = label_chance(quality, torch.zeros(8, dtype=torch.int64))
    assert float(chance[0]) == 1.0
    assert bool((chance.diff() < 0).all())
    assert float((quality**2 * (quality.sum() / quality.square().sum())).sort().values[-3]) > 1


def test_one_sure_label_in_a_class_of_doubted_ones_does_not_take_the_time_of_all_others():
    quality, labels = torch.full((1001,), 0.01), torch.zeros(2001, dtype=torch.int64)
    labels[1001:] = 1
    quality[0] = 1.0  # to its class's share of 11 it would be shown ten times as often as anything else
    chance = label_chance(torch.cat([quality, torch.ones(1000)]), labels)
    assert float(chance[0]) == 1.0
    assert float(chance[1001:].min()) == pytest.approx(0.5)


@pytest.mark.parametrize("exponent", [-1.0, math.nan, math.inf])
def test_an_exponent_that_is_none_is_refused(exponent):
    with pytest.raises(ValueError, match="exponent must be 0 or more and finite, got .* pass 0"):
        label_chance(torch.ones(4), LABELS, exponent=exponent)


def test_chances_of_other_examples_are_refused():
    with pytest.raises(ValueError, match=r"one entry for each label, got shapes \(3,\) and \(4,\)"):
        label_chance(torch.ones(3), LABELS)


LABELS = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("values", "labels", "message"),
    [
        (torch.zeros(4), LABELS, r"first_logits must be a floating-point tensor \(n, classes\), got shape \(4,\)"),
        (torch.zeros(4, 3, dtype=torch.int64), LABELS, r"floating-point.*torch.int64"),
        (torch.zeros(4, 3), LABELS[:2], r"labels must be int64 of shape \(4,\).*got shape \(2,\).*labels.long\(\)"),
        (torch.zeros(4, 3), LABELS.float(), r"labels must be int64.*torch.float32"),
        (torch.zeros(4, 3), LABELS + 3, r"labels must be below the 3 columns of first_logits.*got 3"),
        (torch.zeros(4, 3), LABELS - 1, r"not negative, got -1"),
    ],
)
def test_what_is_not_logits_and_labels_is_refused(values, labels, message):
    with pytest.raises(ValueError, match=message):
        noise_model(values, labels)


def test_a_model_of_other_classes_is_refused():
    model = NoiseModel(torch.eye(5, dtype=torch.float64), 0.1, competent=True)
    with pytest.raises(ValueError, match="model's 5 classes, got 3"):
        label_quality(torch.zeros(4, 3), LABELS, model)


@pytest.mark.parametrize("matrix", [symmetric(0.4, 10), pairs(0.3, 10)])
def test_the_quality_of_a_store_is_that_of_its_log_probabilities(matrix):
    truth, logits = predictions(2000, 10)
    store = observed(logits, labelled(truth, matrix), visits=3, seen=1900)
    at, first = store.first_visits()
    model = noise_model(first, store.labels[at])
    quality = quality_of(store, model)
    found = label_odds(store.log_probabilities, store.labels, model)[:1900]
    assert quality[:1900].equal(lowered(found, 1 - model.rate).sigmoid().float())
    assert quality[1900:].equal(torch.ones(100))


@pytest.mark.parametrize("passes", [13, 50])
@pytest.mark.parametrize("classes", [10, 100])
def test_labels_learned_by_heart_keep_their_order_and_their_number(classes, passes):
    """The network was right about 40 % wrong labels at first and then gave every label, the wrong ones later."""
    truth, logits = predictions(3000, classes, signal=4.0)
    labels = labelled(truth, symmetric(0.4, classes))
    wrong, store = labels != truth, observed(logits, labels)
    at, first = store.first_visits()
    model = noise_model(first, store.labels[at])
    by_heart = 12.0 * torch.nn.functional.one_hot(labels, classes)
    for epoch in range(1, passes):
        store.observe(torch.arange(3000), torch.where((wrong & (epoch < 4))[:, None], logits, by_heart).float(), epoch)
    quality = quality_of(store, model)
    assert float(quality.mean()) == pytest.approx(1 - model.rate, abs=1e-3)
    assert area_under_curve(quality, wrong) > 0.95
    assert float(quality[~wrong].mean()) > 0.85 > 0.3 > float(quality[wrong].mean())


def test_lowered_odds_have_the_wanted_mean_and_lower_means_stay():
    odds = torch.tensor([0.9, 0.8]).double().logit()
    assert lowered(odds, 0.5).sigmoid().float().allclose(torch.tensor([0.6, 0.4]), atol=1e-5)  # odds 9 and 4 times 1/6
    assert lowered(odds, 0.85).sigmoid().float().allclose(torch.tensor([0.9, 0.8]))
    assert lowered(odds, 0.9) is odds
    for value, most in ((0.5, 0.05), (0.6, 0.1), (0.999, 1e-4), (0.5, 0.0)):
        found = lowered(torch.full((10,), value, dtype=torch.float64).logit(), most).sigmoid()
        assert float(found.mean()) == pytest.approx(most, abs=1e-6)
    assert len(lowered(odds[:0], 0.5)) == 0


def test_odds_keep_their_order_where_probabilities_have_none_left():
    """Of networks that are sure of everything all probabilities are 1, and some labels are wrong all the same."""
    odds = torch.cat([torch.linspace(200, 300, 60), torch.linspace(50, 150, 40)]).double()
    assert odds.sigmoid().eq(1).all()
    right = lowered(odds, 0.6).sigmoid()
    assert float(right.mean()) == pytest.approx(0.6, abs=0.01)
    assert right[:60].gt(0.5).all()
    assert right[60:].lt(0.5).all()
    few = torch.cat([torch.linspace(20, 300, 30), torch.linspace(-3, 3, 70)]).double()
    right = lowered(few, 0.4).sigmoid()  # as many as are certain may be right: they count alike
    assert right[:30].eq(right[0]).all()
    assert float(right.mean()) == pytest.approx(0.4, abs=1e-3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("classes", "rate"), [(3, 0.3), (10, 0.5), (10, 0.3)])
def test_a_weak_network_finds_one_rate_and_no_classes_that_are_taken_for_others(classes, rate, seed):
    """It is right in about half of the cases, so that a gain of 0.01 an example, once asked for, is never reached."""
    truth, logits = predictions(10_000, classes, signal=1.2, seed=seed)
    model = noise_model(logits, labelled(truth, symmetric(rate, classes), seed=seed + 10))
    assert 0.5 * rate < model.rate < 1.3 * rate
    assert float(model.matrix.diag().max() - model.matrix.diag().min()) < 0.01  # but for how common a class is


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("rate", "spread"), [(0.0, 0.8), (0.5, 1.5)])
def test_classes_that_a_network_confuses_do_not_pass_for_classes_labelled_as_others(rate, spread, seed):
    """It is too sure of one of each two classes that are alike, whatever the label."""
    truth, logits = predictions(10_000, 10, signal=1.2, seed=seed)
    sure = spread * torch.randn(10_000, 5, generator=torch.Generator().manual_seed(seed + 5), dtype=torch.float64)
    logits += torch.stack([sure, -sure], 2).flatten(1)
    model = noise_model(logits, labelled(truth, symmetric(rate, 10), seed=seed + 10))
    assert model.rate == pytest.approx(rate, abs=0.1)
    assert float(model.matrix.diag().max() - model.matrix.diag().min()) < 0.01  # one rate


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5])
def test_of_projected_scores_the_label_s_own_probability_says_how_likely_it_is_right(rate):
    """Against Bayes' rule with all probabilities, which the store does not keep above 64 classes."""
    truth, logits = predictions(4000, 100, signal=4.0)
    store = observed(logits, labelled(truth, symmetric(rate, 100)), visits=2, seen=3900)
    assert store.projected
    at, first = store.first_visits()
    model = noise_model(first, store.labels[at])
    quality = quality_of(store, model)
    assert quality[3900:].equal(torch.ones(100))
    if not rate:
        assert quality.equal(torch.ones(4000))
        return
    wrong = (store.labels != truth)[:3900]
    assert float(1 - quality[:3900].mean()) == pytest.approx(rate, abs=0.04)
    exact = label_quality(logits, store.labels, model)[:3900]
    assert float((quality[:3900] - exact).abs().mean()) < 0.03
    assert area_under_curve(quality[:3900], wrong) > area_under_curve(exact, wrong) - 0.01


@pytest.mark.parametrize("seed", range(3))
def test_the_rows_used_are_not_those_that_somebody_else_drew_with_a_small_seed(seed):
    n, classes = 24_000, 4
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))  # as inject_label_noise draws
    truth = torch.arange(n) % classes
    labels = truth.clone()
    labels[order[: n // 2]] = (truth[order[: n // 2]] + 1) % classes
    known = torch.nn.functional.one_hot(truth, classes) * 0.85 + 0.15 / classes
    matrix = torch.eye(classes, dtype=torch.float64) * 0.5 + 0.5 * torch.eye(classes, dtype=torch.float64).roll(1, 1)
    quality = label_quality(known.log(), labels, NoiseModel(matrix, 0.5, competent=True))
    assert float(quality[labels == truth].min()) > 0.8
    assert float(quality[labels != truth].max()) < 0.2


def test_the_quality_of_a_store_is_the_same_where_floats_are_float64_by_default():
    truth, logits = predictions(600, 5)
    store = observed(logits, labelled(truth, symmetric(0.4, 5)))
    model = noise_model(logits, store.labels)
    assert model.rate > 0.2
    quality = quality_of(store, model)
    torch.set_default_dtype(torch.float64)
    try:
        again = quality_of(store, model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert again.dtype == torch.float32
    assert again.equal(quality)


def distorted(truth, logits, seed=0):
    """What a network says that favours some classes and mixes up others, more than `calibration` takes for likely."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.eye(10) + 0.1 * torch.randn(10, 10, generator=generator)
    return truth, logits @ turn.double() + 0.3 * torch.randn(10, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5])
def test_a_weak_network_that_favours_classes_finds_the_rate(rate):
    truth, logits = distorted(*predictions(5000, 10, signal=1.2))
    model = noise_model(logits, labelled(truth, symmetric(rate, 10)))
    assert model.rate == pytest.approx(rate, abs=0.04)


def test_classes_taken_for_others_have_one_rate_where_their_own_say_no_more():
    truth, logits = distorted(*predictions(5000, 10, signal=2.0))
    model = noise_model(logits, labelled(truth, pairs(0.4, 10)))
    assert model.matrix.diag().std() < 1e-9
    assert (model.matrix - pairs(0.4, 10)).abs().max() < 0.04


@pytest.mark.parametrize(
    ("matrix", "coherence"),
    [(pairs(0.3, 10), 1.0), (symmetric(0.3, 10), 1 / 9), (symmetric(0.2, 2), 1.0), (torch.eye(4).double(), 0.0)],
)
def test_coherence_is_the_share_of_the_most_frequent_wrong_label(matrix, coherence):
    assert NoiseModel(matrix, 0.3, competent=True).coherence == pytest.approx(coherence)


def test_a_network_that_has_not_learned_some_classes_yet_doubts_nothing(monkeypatch):
    """It takes these for others, always: as if they were labelled so."""
    truth, logits = predictions(3000, 10)
    for unknown in (1, 4):
        logits[:, unknown] = logits[:, unknown - 1] - 1
        logits[truth == unknown, unknown - 1] += 9
    assert not noise_model(logits, truth).competent
    monkeypatch.setattr(noise, "_MOST_UNKNOWN", 1.0)
    assert noise_model(logits, truth).rate > 0.1, "or the test says nothing"


def test_rare_classes_that_are_never_predicted_do_not_keep_a_network_from_doubting():
    truth, logits = predictions(4000, 10)
    keep = (truth < 9) | (torch.arange(4000) < 300)
    truth, logits = truth[keep], logits[keep]
    logits[:, 9] -= 50
    model = noise_model(logits, labelled(truth, symmetric(0.3, 10)))
    assert model.rate == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("classes", [20, 40, 64])
def test_many_pairs_of_classes_are_not_told_apart_by_few_examples(classes):
    truth, logits = predictions(6000, classes, signal=3.0)
    model = noise_model(logits, labelled(truth, symmetric(0.3, classes)))
    assert model.rate == pytest.approx(0.3, abs=0.02)
    assert float(model.matrix.diag().max() - model.matrix.diag().min()) < 0.01


@pytest.mark.parametrize("seed", range(3))
def test_confusions_of_a_weak_network_are_no_noise_by_class_where_labels_of_any_class_are_wrong(seed):
    """It is too sure of one of each two classes that are alike. That passed for labels of similar classes."""
    truth, logits = predictions(5000, 10, signal=2.0, seed=seed)
    sure = 3 * torch.randn(5000, 5, generator=torch.Generator().manual_seed(seed + 5), dtype=torch.float64)
    logits += torch.stack([sure, -sure], 2).flatten(1)
    model = noise_model(logits, labelled(truth, symmetric(0.3, 10), seed=seed + 10))
    assert model.coherence < 0.2
    assert model.rate == pytest.approx(0.3, abs=0.06)
