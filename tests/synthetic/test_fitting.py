"""recipe_for and fit: which recipe, what training does with it, and what it says when it cannot."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from coreset_sampler import Raw, SyntheticCoreset, TrainingRecipe, fit, load_coreset, recipe_for
from coreset_sampler.synthetic.fitting import accuracy_on, logits_of
from coreset_sampler.synthetic.networks import NORMS, alexnet, convnet, resnet, vgg
from coreset_sampler.synthetic.per_image import changed, cutout, flip, mixed, one_hot, pasted, scale, shift
from coreset_sampler.synthetic.targets import targets_as
from coreset_sampler.synthetic.training import at_home, kind_of

LEARNED, REAL = load_coreset("digits/vbpc-1"), load_coreset("digits/k-center-1")


def small(norm="instance", seed=0):
    torch.manual_seed(seed)
    return convnet(1, 10, 8, widths=(4, 8), norm=NORMS[norm])


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (lambda: convnet(1, 10, 8, widths=(4,)), "instance norm"),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4)), "instance norm"),
        (lambda: convnet(1, 10, 8, widths=(4,), norm=nn.BatchNorm2d), "batch norm"),
        (lambda: resnet(1, 10, 8, widths=(16, 16), norm=NORMS["group"]), "group norm"),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(1, 4)), "group norm"),
        (lambda: alexnet(1, 10, 8, widths=(4, 4, 4, 4, 4)), "no norm"),
        (lambda: nn.TransformerEncoderLayer(8, 2), "transformer"),
    ],
)
def test_a_network_is_known_by_what_it_normalises_with(model, kind):
    assert kind_of(model()) == kind


def test_only_a_shallow_instance_norm_network_is_at_home_with_learned_targets():
    deep = vgg(1, 10, 8, widths=(4, 4, 4, 4, 4))
    assert at_home(LEARNED, small())
    assert not at_home(LEARNED, small("batch"))
    assert not at_home(LEARNED, deep)
    assert not at_home(REAL, small())
    home, away, real = (recipe_for(c, m) for c, m in ((LEARNED, small()), (LEARNED, deep), (REAL, small())))
    assert (home.loss, home.labels, home.augmentation) == ("squared-error", "own", ())
    assert (away.loss, away.labels) == ("cross-entropy", "soft")
    assert (real.loss, real.labels) == ("cross-entropy", "hard")


def test_real_and_learned_images_get_the_same_training_away_from_home():
    one, other = (recipe_for(coreset, small("batch")) for coreset in (LEARNED, REAL))
    assert replace(one, labels="hard") == other


def test_digits_are_not_flipped_and_clothes_are():
    clothes = load_coreset("fashion-mnist/herding-1")
    assert recipe_for(REAL, small("batch")).augmentation == ("shift",)
    assert recipe_for(clothes, small("batch")).augmentation == ("shift", "flip")


@pytest.mark.parametrize(("norm", "steps"), [("batch", 900), ("group", 900), ("instance", 1800)])
def test_networks_that_learn_slowly_get_more_steps_away_from_home(norm, steps):
    assert recipe_for(REAL, small(norm)).steps == steps


@pytest.mark.parametrize(("norm", "optimizer"), [("batch", "adamw"), ("group", "adamw"), ("instance", "muon")])
def test_instance_norm_networks_are_trained_by_muon_on_probabilities_away_from_home(norm, optimizer):
    assert recipe_for(LEARNED, small(norm), labels="soft").optimizer == optimizer
    assert recipe_for(load_coreset("digits/views-10"), small(norm)).optimizer == optimizer
    assert recipe_for(LEARNED, small()).optimizer == "adamw"
    assert recipe_for(LEARNED, small(norm), labels="hard").optimizer == "adamw"
    assert recipe_for(REAL, small(norm)).optimizer == "adamw"  # class numbers are learned by heart


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "hinge"}, "loss must be one of cross-entropy, squared-error, got 'hinge'"),
        ({"labels": "raw"}, "labels must be one of hard, soft, own, got 'raw'"),
        ({"optimizer": "lion"}, "optimizer must be one of adamw, sgd, muon, got 'lion'"),
        ({"lr": 0}, "lr must be positive, got 0"),
        ({"steps": -1}, "steps must be positive, got -1"),
        ({"mixing": -0.1}, "mixing must be at least 0, got -0.1"),
        ({"cutmix": -1}, "cutmix must be at least 0, got -1"),
        (
            {"augmentation": "shift"},
            "augmentation must be a tuple of shift, flip, scale, cutout, or empty, got 'shift'",
        ),
        ({"augmentation": ("rotate",)}, r"augmentation must be .*, got \('rotate',\)"),
        ({"loss": "squared-error", "labels": "soft"}, "squared-error needs .*labels='own', got 'soft'"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TrainingRecipe("any", **change)


def test_a_loss_that_the_targets_are_not_meant_for_is_refused():
    with pytest.raises(ValueError, match="loss must be 'cross-entropy' for labels='own' of hard targets"):
        fit(small(), REAL, TrainingRecipe("any", "squared-error", "own"))
    with pytest.raises(ValueError, match="loss must be 'squared-error' for labels='own' of regression targets"):
        fit(small(), LEARNED, TrainingRecipe("any", "cross-entropy", "own"))


@pytest.mark.parametrize("labels", ["own", "soft", "hard"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_fit_learns_the_set_by_every_kind_of_label_and_leaves_the_world_as_it_was(labels, optimizer):
    recipe = replace(recipe_for(LEARNED, small(), labels=labels), steps=60, optimizer=optimizer, augmentation=())
    recipe = replace(recipe, lr=0.02)
    torch.manual_seed(0)
    model, before = convnet(1, 10, 8, widths=(16, 32)), torch.get_rng_state()
    result = fit(model, LEARNED, recipe)
    assert torch.equal(torch.get_rng_state(), before)
    assert result.model is model
    assert not model.training
    assert result.test_accuracy is None
    fit(model, LEARNED, replace(recipe, steps=1), test=LEARNED)
    assert torch.equal(torch.get_rng_state(), before)
    assert result.train_accuracy == 1
    assert accuracy_on(model, (LEARNED.inputs, LEARNED.targets.argmax(1))) == result.train_accuracy


def test_the_same_seed_gives_the_same_weights_and_another_one_others():
    recipe = replace(recipe_for(REAL, small("batch")), steps=3, mixing=0.4, batch_size=4)
    models = [fit(small("batch"), REAL, recipe, seed=seed).model for seed in (0, 0, 1)]
    first, again, other = (torch.cat([p.flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_training_is_adamw_along_one_cycle_written_out():
    recipe = replace(recipe_for(LEARNED, small("group"), labels="soft"), steps=4, batch_size=10, augmentation=())
    model, by_hand = small(), small()
    fit(model, LEARNED, recipe)
    optimizer = torch.optim.AdamW(by_hand.parameters(), recipe.lr, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=4)
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(by_hand(LEARNED.inputs), LEARNED.targets.softmax(-1)).backward()
        optimizer.step()
        schedule.step()
    # outputs, not weights: Adam blows rounding errors in zero gradients (biases before a norm) up to whole steps
    assert torch.allclose(model(REAL.inputs / 255), by_hand(REAL.inputs / 255), atol=1e-3)
    assert not torch.allclose(model(REAL.inputs / 255), small()(REAL.inputs / 255), atol=1e-2)


def test_a_divergence_is_named_with_what_to_lower():
    recipe = replace(recipe_for(LEARNED, small()), optimizer="sgd", lr=1e9, steps=30)
    with pytest.raises(
        ValueError, match=r"became (nan|inf) at step \d+ of 30 \(squared-error, lr 1e\+09\); lower lr.*3e\+08"
    ):
        fit(small(), LEARNED, recipe)


def test_accuracy_is_the_same_from_tensors_a_data_set_and_a_loader():
    x, y = torch.rand(30, 1, 8, 8), torch.randint(10, (30,))
    model = small("batch")
    expected = (model.eval()(x).argmax(1) == y).double().mean().item()
    sets = (
        (x, y),
        TensorDataset(x, y),
        DataLoader(TensorDataset(x, y), 7),
        SyntheticCoreset(x, y, preprocessing=Raw()),
    )
    assert [accuracy_on(model, each) for each in sets] == [pytest.approx(expected)] * 4
    with pytest.raises(TypeError, match="test must be .* got a Tensor"):
        accuracy_on(model, x)
    with pytest.raises(ValueError, match="at least one example"):
        accuracy_on(model, TensorDataset(x[:0], y[:0]))


def test_data_that_are_no_coreset_are_refused():
    with pytest.raises(TypeError, match="train_set must be a SyntheticCoreset .* got a TensorDataset"):
        fit(small(), TensorDataset(REAL.inputs))


def test_logits_are_found_in_what_models_return():
    logits = torch.rand(2, 3)
    named = type("Output", (), {"logits": logits})()
    assert all(logits_of(each) is logits for each in (logits, (logits, None), named))


def test_soft_targets_are_probabilities_in_the_order_of_the_learned_ones():
    soft = targets_as(LEARNED, "soft")
    assert torch.allclose(soft.sum(1), torch.ones(10))
    assert torch.equal(soft.argsort(1), LEARNED.targets.argsort(1))


def test_shifts_move_each_image_by_itself_and_repeat_its_border():
    images = torch.rand(40, 2, 8, 8)
    moved = shift(images, torch.Generator().manual_seed(0))
    found = set()
    for before, after in zip(images, moved, strict=True):
        padded = nn.functional.pad(before[None], (1, 1, 1, 1), mode="replicate")[0]  # an eighth of 8 is 1
        places = [(r, c) for r in range(3) for c in range(3) if torch.equal(padded[:, r : r + 8, c : c + 8], after)]
        assert len(places) == 1
        found |= set(places)
    assert len(found) == 9


def test_flips_turn_about_half_of_the_images():
    images = torch.rand(200, 1, 4, 4)
    turned = flip(images, torch.Generator().manual_seed(0))
    flipped = [torch.equal(after, before.flip(-1)) for before, after in zip(images, turned, strict=True)]
    same = [torch.equal(after, before) for before, after in zip(images, turned, strict=True)]
    assert all(f != s for f, s in zip(flipped, same, strict=True))
    assert 70 < sum(flipped) < 130
    assert torch.equal(changed(images, (), torch.Generator()), images)


def test_mixing_blends_images_and_targets_by_the_same_shares():
    targets = one_hot(torch.arange(6), 6)
    images = targets[:, :, None, None].expand(6, 6, 2, 2)  # an image that says its own target
    x, y = mixed(images, targets, 0.4, torch.Generator().manual_seed(0))
    assert torch.allclose(x[:, :, 0, 0], y)
    assert torch.allclose(y.sum(1), torch.ones(6))
    assert len({round(float(row.max()), 4) for row in y}) > 3  # a share for each image, not one for all


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_cutmix_pastes_one_box_of_a_partner_and_mixes_targets_by_its_area():
    images = torch.arange(1.0, 9)[:, None, None, None].expand(8, 2, 12, 10)  # every image is its own number
    targets = torch.eye(8)
    seen, labels = pasted(images, targets, 1.0, generator())
    partner = torch.randperm(8, generator=generator())
    for i in range(8):
        other = seen[i, 0] != i + 1
        assert torch.equal(seen[i, 0], seen[i, 1])
        assert set(seen[i].unique().tolist()) <= {i + 1.0, float(partner[i]) + 1.0}
        rows, columns = other.any(1).nonzero().flatten(), other.any(0).nonzero().flatten()
        if partner[i] != i and len(rows):  # one box, without holes
            assert other.sum() == len(rows) * len(columns) == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
        if partner[i] != i:
            area = float(other.float().mean())
            expected = (1 - area) * targets[i] + area * targets[partner[i]]
            assert torch.allclose(labels[i], expected, atol=1e-6)


def test_cutout_takes_a_square_of_at_most_half_a_side_and_gives_it_the_mean():
    images = torch.rand(30, 3, 12, 12, generator=generator(1))
    seen = cutout(images, generator())
    gone = (seen != images).any(1)
    assert int(gone.flatten(1).sum(1).min()) >= 1
    assert int(gone.flatten(1).sum(1).max()) <= 36
    assert int(gone.flatten(1).sum(1).float().median()) > 15
    means = images.mean((2, 3))
    for image, mean, where in zip(seen, means, gone, strict=True):
        assert torch.allclose(image[:, where], mean[:, None].expand(-1, int(where.sum())))


def test_scaling_is_about_the_centre_and_by_no_more_than_a_quarter():
    ramp = torch.linspace(-1, 1, 41)
    images = ramp[None, None, None].expand(50, 1, 41, 41).contiguous()
    seen = scale(images, generator())
    slopes = (seen[:, 0, 20, 22] - seen[:, 0, 20, 18]) / (ramp[22] - ramp[18])
    assert 0.8 <= float(slopes.min()) < 0.85
    assert 1.2 < float(slopes.max()) <= 1.2501
    assert torch.allclose(seen[:, 0, 20, 20], torch.zeros(50), atol=1e-6)
    assert torch.allclose(seen[:, 0, 3], seen[:, 0, 37], atol=1e-6)  # rows of the ramp are alike


def test_mixup_and_cutmix_take_turns():
    recipe = replace(recipe_for(REAL, small("batch")), steps=6, mixing=0.4, cutmix=1.0, batch_size=5)
    models = [fit(small("batch"), REAL, change).model for change in (recipe, replace(recipe, mixing=0.0), recipe)]
    first, other, again = (torch.cat([p.flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_bf16_training_is_close_keeps_weights_in_float32_and_is_under_autocast():
    recipe = replace(recipe_for(LEARNED, small(), labels="soft"), steps=3, augmentation=())
    seen = []
    results = []
    for bf16 in (False, True):
        model = small()
        model[0].register_forward_hook(lambda *args: seen.append(args[2].dtype))
        results.append(fit(model, LEARNED, recipe, bf16=bf16).model)
    assert set(seen[:3]) == {torch.float32}
    assert torch.bfloat16 in seen
    assert seen[-1] == torch.float32  # accuracy is measured without it
    for one, other in zip(*(model.parameters() for model in results), strict=True):
        assert other.dtype == torch.float32
        assert torch.allclose(one, other, atol=0.02)
    assert not torch.equal(results[0][0].weight, results[1][0].weight)


def flat(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(dtype)


def test_class_numbers_in_a_column_are_class_numbers():
    model, x, y = flat(), REAL.inputs.float() / 255, REAL.targets
    expected = accuracy_on(model, (x, y))
    one_hot_bytes = torch.nn.functional.one_hot(y.long(), 10)
    shapes = (y[:, None], y[:, None].float(), one_hot_bytes, one_hot_bytes.float())
    assert [accuracy_on(model, (x, each)) for each in shapes] == [expected] * 4
    with pytest.raises(ValueError, match=r"a class number for each input, got targets \(10, 1, 1\)"):
        accuracy_on(model, (x, y[:, None, None]))


def test_a_model_without_parameters_is_measured():
    assert accuracy_on(nn.Flatten(), (torch.eye(4)[:, None], torch.arange(4))) == 1


@pytest.mark.parametrize("of_model", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("of_set", [torch.float16, torch.bfloat16, torch.float64, torch.float32])
def test_a_set_of_any_precision_trains_a_model_of_any_other(of_set, of_model):
    coreset = SyntheticCoreset(REAL.inputs.to(of_set), REAL.targets, preprocessing=Raw())
    every = ("shift", "flip", "scale", "cutout")
    recipe = replace(recipe_for(coreset, flat()), steps=2, batch_size=5, augmentation=every, mixing=0.4)
    result = fit(flat(of_model), coreset, recipe, test=coreset)
    assert result.test_accuracy is not None
    assert result.model[1].weight.dtype == of_model


def test_integer_inputs_stay_integers():
    tokens = SyntheticCoreset(torch.arange(8).view(4, 2), torch.arange(4) % 2, preprocessing=Raw())
    model = nn.Sequential(nn.Embedding(8, 3), nn.Flatten(), nn.Linear(6, 2))
    assert accuracy_on(model, tokens) <= 1


@pytest.mark.parametrize(("labels", "classes"), [("hard", 9), ("soft", 9), ("soft", 11)])
def test_a_model_for_other_classes_is_told_how_many_there_are(labels, classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    coreset = load_coreset("digits/k-center-1")
    with pytest.raises(ValueError, match=f"each of the coreset's 10 classes, it gives {classes}"):
        fit(model, coreset, recipe_for(coreset, model, labels=labels))


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="model must have parameters to train, .*unfreeze its head"):
        fit(small().requires_grad_(False), LEARNED)
