"""What ships: every coreset is there, is what the index says, and is worth what it says."""

from pathlib import Path

import pytest
import torch

from coreset_sampler.synthetic import zoo
from coreset_sampler.synthetic.dataset import load_coreset
from coreset_sampler.synthetic.preprocessing import Raw

NAMES = sorted(zoo.index())


def test_digits_and_fashion_mnist_ship_at_1_and_10_images_per_class():
    shipped = {(entry["data"], entry["images_per_class"]) for entry in zoo.index().values()}
    assert {(data, count) for data in ("digits", "fashion-mnist") for count in (1, 10)} <= shipped


def test_sets_for_networks_of_any_kind_ship_for_fashion_mnist_at_1_10_and_50_images_per_class():
    shipped = {
        entry["images_per_class"] for name, entry in zoo.index().items() if name.startswith("fashion-mnist/views-")
    }
    assert shipped == {1, 10, 50}


def test_all_that_ships_is_under_15_megabytes_and_in_the_index():
    folder = Path(zoo.__file__).parent
    files = list(folder.glob("*.safetensors"))
    assert {file.name for file in files} == {entry["file"] for entry in zoo.index().values()}
    assert sum(file.stat().st_size for file in files) < 15_000_000


@pytest.mark.parametrize("name", NAMES)
def test_a_coreset_is_what_the_index_says(name):
    entry, coreset = zoo.index()[name], load_coreset(name)
    assert name == f"{entry['data']}/{entry['method']}-{entry['images_per_class']}"
    assert coreset.method == entry["method"]
    assert coreset.images_per_class == entry["images_per_class"]
    assert len(coreset.stored) == 10 * entry["images_per_class"]
    assert len(coreset.class_names) == 10
    assert coreset.provenance["accuracy"] == entry["accuracy"]
    assert coreset.provenance["licence"] == entry["licence"]


@pytest.mark.parametrize("name", NAMES)
def test_every_coreset_says_how_it_was_made_and_measured(name):
    provenance = load_coreset(name).provenance
    assert {"data", "licence", "made", "settings", "command", "commit", "accuracy"} <= provenance.keys()
    assert provenance["accuracy"]["n"] >= 3
    assert provenance["accuracy"]["test_images"] >= 500
    assert 0.3 < provenance["accuracy"]["mean"] < 1


def test_picks_are_real_images_of_the_training_part_and_not_of_the_test_part():
    pytest.importorskip("sklearn")
    from make_zoo import digits

    data = digits()
    coreset = load_coreset("digits/k-center-10")
    assert torch.equal(coreset.inputs, data.train[0][coreset.provenance["train_indices"]])
    assert torch.equal(coreset.targets, data.train[1][coreset.provenance["train_indices"]])
    assert coreset.preprocessing == Raw()
    test_images = {image.numpy().tobytes() for image in data.test[0]}
    assert not any(image.numpy().tobytes() in test_images for image in coreset.inputs)


def test_making_a_coreset_again_picks_the_same_images_and_scores_as_recorded():
    pytest.importorskip("sklearn")
    from make_zoo import accuracy, digits, pick

    data, coreset = digits(), load_coreset("digits/k-center-1")
    assert pick(data, "k-center", 1) == coreset.provenance["train_indices"]
    recorded = coreset.provenance["accuracy"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are far slower on several
    again = accuracy(coreset, data.test, seed=0)
    torch.set_num_threads(threads)
    assert again == pytest.approx(recorded["mean"], abs=4 * recorded["std"])


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(KeyError, match=r"no coreset called '\.\./secret'.*known: .*digits/"):
        zoo.path("../secret")


def test_the_index_cannot_be_changed_by_its_readers():
    zoo.index().clear()
    assert zoo.index()


VBPC = [name for name in NAMES if zoo.index()[name]["method"] == "vbpc"]


@pytest.mark.parametrize("name", VBPC)
def test_a_set_learned_by_vbpc_can_be_solved_in_closed_form_and_beats_real_images_of_its_size(name):
    entry, coreset = zoo.index()[name], load_coreset(name)
    assert coreset.target_kind == "regression"
    assert {"rho", "gamma", "beta", "steps", "learning_rate"} == coreset.last_layer.keys()
    assert f"--only {name}" in entry["command"]
    assert entry["accuracy"]["by"]["last-layer"]["nll"]["mean"] > 0
    assert 0.3 < entry["accuracy"]["by"]["sgd"]["accuracy"]["mean"] < 1
    same = {"data": entry["data"], "images_per_class": entry["images_per_class"]}
    learned = ("vbpc", "views")
    picks = [each for each in zoo.index().values() if same.items() <= each.items() and each["method"] not in learned]
    best = max(figures["accuracy"]["mean"] for figures in entry["accuracy"]["by"].values())
    assert all(best > pick["accuracy"]["mean"] for pick in picks)


VIEWS = [name for name in NAMES if zoo.index()[name]["method"] == "views"]


@pytest.mark.parametrize("name", VIEWS)
def test_a_set_with_labelled_views_is_ahead_of_real_images_on_every_network_that_is_recorded(name):
    entry, coreset = zoo.index()[name], load_coreset(name)
    assert coreset.views is not None
    assert coreset.target_kind == "soft"
    assert coreset.provenance["teacher"]["network"].startswith("convnet-batch")
    networks = entry["accuracy"]["networks"]
    assert len(networks) >= 3
    for figures in networks.values():
        assert figures["the coreset"]["n"] >= 3
        assert figures["random"]["n"] >= 3
        assert figures["the coreset"]["mean"] > max(figures["random"]["mean"], figures["herding"]["mean"])


def test_a_network_trained_on_views_scores_as_recorded():
    pytest.importorskip("sklearn")
    from make_zoo import digits

    from coreset_sampler import fit
    from coreset_sampler.synthetic.networks import network

    data, coreset = digits(), load_coreset("digits/views-10")
    recorded = coreset.provenance["accuracy"]["networks"]["convnet:32-64"]["the coreset"]
    torch.manual_seed(0)
    model = network("convnet:32-64", 1, 10, 8)()
    right = fit(model, coreset, test=(coreset.preprocessing(data.test[0].float() / 255), data.test[1])).test_accuracy
    assert right == pytest.approx(recorded["mean"], abs=max(0.02, 4 * recorded["std"]))


def test_a_fresh_network_scores_in_closed_form_as_recorded():
    pytest.importorskip("sklearn")
    from make_zoo import digits

    from coreset_sampler.synthetic.distillers.presets import VBPC
    from coreset_sampler.synthetic.inference.predict import by_last_layer
    from coreset_sampler.synthetic.networks import network

    data, coreset = digits(), load_coreset("digits/vbpc-1")
    make = network("convnet", 1, 10, 8, widths=VBPC["digits", 1].widths)
    probabilities = by_last_layer()(coreset, make, 0)(coreset.preprocessing(data.test[0].float() / 255))
    recorded = coreset.provenance["accuracy"]
    again = (probabilities.argmax(1) == data.test[1]).double().mean().item()
    assert again == pytest.approx(recorded["mean"], abs=max(0.02, 4 * recorded["std"]))
