"""VBPC with several examples in an image, some of the images in a step, bf16 passes, and a teacher's labels."""

import math

import pytest
import torch
from torch.nn import functional

from coreset_sampler import SyntheticCoreset, distill
from coreset_sampler.synthetic.distillers import presets
from coreset_sampler.synthetic.distillers.augment import Moves
from coreset_sampler.synthetic.distillers.beginning import learned_targets
from coreset_sampler.synthetic.distillers.checkpoint import Progress, load, same, save
from coreset_sampler.synthetic.distillers.real_data import RealData
from coreset_sampler.synthetic.distillers.run import start
from coreset_sampler.synthetic.distillers.teacher import Teacher, taught, train_teacher
from coreset_sampler.synthetic.distillers.variational import Variational
from coreset_sampler.synthetic.networks import network
from coreset_sampler.synthetic.tiles import pack, unpack

KINDS = [network(kind, 1, 3, 8) for kind in ("convnet:4", "convnet-batch:4-8")]


def data(n=90):
    labels = torch.arange(n) % 3
    noise = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return RealData(noise + labels[:, None, None, None], labels)


def after(distiller, state, steps):
    for _ in range(steps):
        state, _ = distiller.step(state, data())
    return state


def test_a_run_with_tiles_begins_with_packed_real_images_and_a_target_for_each_example():
    distiller = Variational(KINDS, tiles=2, batch=16, pool=2)
    state = start(distiller, data(), 2, seed=3).state
    inputs, labels = data().per_class(8, torch.Generator().manual_seed(3))
    assert torch.equal(state.inputs, pack(inputs, 2))
    assert state.inputs.shape == (6, 1, 8, 8)
    assert torch.equal(state.targets.argmax(1), labels)
    assert distiller.describe(state)["tiles"] == 2


def test_the_gradient_with_tiles_is_that_of_the_unpacked_examples_pulled_back():
    tiled, plain = (Variational(KINDS[0], batch=16, pool=1, tiles=tiles) for tiles in (2, 1))
    state = start(tiled, data(), 2).state
    examples = unpack(state.inputs, 2)
    whole = plain.init(examples, state.targets.argmax(1), seed=0)
    (gradient, of_targets), _ = tiled._look(state, 0, data(), torch.Generator().manual_seed(5))
    (of_examples, theirs), _ = plain._look(whole, 0, data(), torch.Generator().manual_seed(5))
    inputs = state.inputs.clone().requires_grad_()
    (pulled,) = torch.autograd.grad(unpack(inputs, 2), inputs, of_examples)
    torch.testing.assert_close(gradient, pulled)
    torch.testing.assert_close(of_targets, theirs)


def test_a_step_on_some_images_leaves_the_others_without_gradient_and_takes_every_class():
    distiller = Variational(KINDS, tiles=2, images_per_step=3, batch=16, pool=2)
    state = start(distiller, data(), 4).state  # four images of each class, in order
    for seed in range(5):
        (pixels, targets), _ = distiller._look(state, 0, data(), torch.Generator().manual_seed(seed))
        touched = pixels.flatten(1).any(1)
        assert touched.view(3, 4).sum(1).tolist() == [1, 1, 1]
        assert torch.equal(targets.any(1), touched.repeat_interleave(4))


def test_images_in_a_step_beyond_all_of_them_are_all():
    some, every = (Variational(KINDS, images_per_step=k, batch=16, pool=2) for k in (50, None))
    state = start(every, data(), 2).state
    assert same(after(some, state, 2), after(every, state, 2))


def test_a_run_with_all_of_it_that_was_saved_and_loaded_goes_on_to_the_same_bits(tmp_path):
    distiller = Variational(
        KINDS, tiles=2, images_per_step=3, precision="bf16", batch=16, pool=3, max_age=3, augmentation=Moves(each=True)
    )
    state = start(distiller, data(), 2).state
    save(tmp_path / "run.safetensors", Progress(after(distiller, state, 4)), {})
    resumed, _ = load(tmp_path / "run.safetensors")
    assert same(after(distiller, resumed.state, 5), after(distiller, state, 9))


def test_a_state_of_another_number_of_tiles_is_refused():
    state = start(Variational(KINDS, pool=2), data(), 4).state
    with pytest.raises(ValueError, match=r"tiles must be what the run began with.*12 images and 12 targets"):
        Variational(KINDS, pool=2, tiles=2).step(state, data())


@pytest.mark.parametrize("kind", ["convnet:16-32", "convnet-batch:16-32", "vit:32-32"])
def test_bf16_passes_give_nearly_the_gradient_of_float32(kind):
    full, half = (Variational(network(kind, 1, 3, 8), batch=64, pool=1, precision=p) for p in ("float32", "bf16"))
    state = start(full, data(), 4).state
    one, other = (d._look(state, 0, data(), torch.Generator().manual_seed(1))[0] for d in (full, half))
    for exact, rounded in zip(one, other, strict=True):
        assert exact.dtype == rounded.dtype == torch.float32
        assert not torch.equal(exact, rounded)
        assert functional.cosine_similarity(exact.flatten(), rounded.flatten(), 0) > 0.98


def test_a_precision_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="precision must be one of float32, bf16, got 'half'"):
        Variational(KINDS, precision="half")


def test_first_targets_have_the_smoothed_label_for_softmax_and_class_numbers_are_the_limit():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0]])
    targets = learned_targets(p, 3, 5.0)
    lowest = 1 / (math.exp(5) + 2)
    torch.testing.assert_close(targets.softmax(1), (1 - 3 * lowest) * p + lowest)
    torch.testing.assert_close(targets.sum(1), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(targets[1:], learned_targets(torch.tensor([1]), 3, 5.0))


def test_a_teacher_learns_and_labels_what_it_is_given_the_same_for_the_same_seed():
    plan, make = Teacher("convnet-batch:4-8", epochs=25, lr=0.02, batch=30, mirror=False), KINDS[1]
    lines = []
    model = train_teacher(plan, make, data(), seed=1, report=lines.append)
    inputs, labels = data().rows(torch.arange(90))
    labelled = taught(plan, model, inputs)
    assert len(lines) == 25
    assert not model.training
    torch.testing.assert_close(labelled.sum(1), torch.ones(90))
    assert float((labelled.argmax(1) == labels).float().mean()) > 0.8
    assert torch.equal(labelled, taught(plan, train_teacher(plan, make, data(), seed=1), inputs))
    mirrored = Teacher(mirror=True)
    assert torch.equal(taught(mirrored, model, inputs), taught(mirrored, model, inputs.flip(-1)))


def test_distill_for_several_networks_begins_with_a_teacher_says_so_and_resumes_to_the_same_bits(tmp_path, monkeypatch):
    # a name decides on preset and teacher; the digits are small enough to train one here
    asked = {"networks": ["convnet:4", "convnet-batch:4"], "name": "mnist", "images_per_class": 1, "progress": False}
    asked |= {"settings": {"tiles": 2, "pool": 2, "batch": 16}, "evaluate_every": 4}
    whole = distill("digits", steps=4, **asked)
    distill("digits", steps=2, resume=tmp_path / "run", **asked | {"settings": asked["settings"] | {"decay": 4}})
    again = distill("digits", steps=4, resume=tmp_path / "run", **asked)
    assert torch.equal(again.stored, whole.stored)
    assert whole.provenance["teacher"]["network"] == "convnet-batch:32-64-128"
    assert (whole.tiles, len(whole.stored), len(whole)) == (2, 10, 40)
    whole.save(tmp_path / "set.safetensors")
    assert SyntheticCoreset.load(tmp_path / "set.safetensors").equal(whole)
    monkeypatch.setattr(presets, "TEACHERS", {})
    with pytest.raises(ValueError, match=r"the run to resume has teacher \{.*asked for None"):
        distill("digits", steps=4, resume=tmp_path / "run", **asked)
