"""Differentiable siamese augmentation."""

import pytest
import torch
from torch import Generator

from coreset_sampler.synthetic.distillers import augment as augment_images
from coreset_sampler.synthetic.distillers.augment import ALL, augment, crop, cutout, flip, rotate, scale

SHAPES = [(3, 1, 28, 28), (2, 3, 7, 11), (4, 1, 8, 8), (1, 3, 5, 3)]


def seeded(seed: int) -> Generator:
    return Generator().manual_seed(seed)


@pytest.mark.parametrize("way", ALL, ids=lambda way: way.__name__)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_way_keeps_the_shape_of_grey_and_coloured_images_of_any_size(way, shape):
    images = torch.randn(shape, generator=seeded(0))
    for seed in range(5):
        changed = way(images, seeded(seed))
        assert changed.shape == images.shape
        assert changed.dtype == images.dtype


@pytest.mark.parametrize("way", ALL, ids=lambda way: way.__name__)
def test_every_way_is_differentiable(way):
    images = torch.randn(2, 3, 4, 5, generator=seeded(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: way(x, seeded(1)), images)


@pytest.mark.parametrize("way", ALL, ids=lambda way: way.__name__)
def test_all_images_are_changed_alike(way):
    image = torch.randn(1, 3, 8, 8, generator=seeded(0))
    changed = way(image.repeat(4, 1, 1, 1), seeded(2))
    assert torch.allclose(changed, changed[:1].expand(4, -1, -1, -1))
    assert torch.allclose(changed[:1], way(image, seeded(2)))


def test_the_draw_is_the_generators_alone_and_all_ways_come_up():
    images = torch.randn(2, 1, 8, 8, generator=seeded(0))
    before = torch.random.get_rng_state()
    assert torch.equal(augment(images, seeded(4)), augment_images(images, seeded(4)))
    assert torch.equal(torch.random.get_rng_state(), before)
    called = []
    ways = [lambda x, g, i=i: called.append(i) or x for i in range(3)]
    generator = seeded(0)
    for _ in range(60):
        augment(images, generator, ways=ways)
    assert set(called) == {0, 1, 2}


def test_crop_moves_by_an_eighth_at_most_and_reaches_both_ends():
    image = torch.zeros(1, 1, 16, 16)
    image[0, 0, 8, 8] = 1
    places = {tuple(crop(image, seeded(seed))[0, 0].nonzero()[0].tolist()) for seed in range(300)}
    assert {row for row, _ in places} == {column for _, column in places} == set(range(6, 11))


def test_cutout_clears_a_quarter_in_the_middle_and_less_at_the_edge():
    image = torch.ones(1, 1, 16, 16)
    cleared = [int((cutout(image, seeded(seed)) == 0).sum()) for seed in range(200)]
    assert max(cleared) == 64
    assert min(cleared) >= 16


def test_flips_happen_every_other_time_and_turns_of_a_disc_change_little():
    image = torch.arange(4.0).expand(1, 1, 4, 4)
    flips = sum(not torch.equal(flip(image, seeded(seed)), image) for seed in range(200))
    assert 70 < flips < 130
    y, x = torch.meshgrid(torch.linspace(-1, 1, 33), torch.linspace(-1, 1, 33), indexing="ij")
    disc = torch.exp(-4 * (x**2 + y**2))[None, None]
    assert float((rotate(disc, seeded(1)) - disc).abs().max()) < 0.05
    assert float((scale(disc, seeded(1)) - disc).abs().max()) > 0.01


def test_what_is_no_image_is_refused():
    with pytest.raises(ValueError, match="augmentation=None"):
        augment(torch.zeros(3, 10), seeded(0))
    with pytest.raises(ValueError, match="float images"):
        augment(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), seeded(0))
    with pytest.raises(ValueError, match="at least one"):
        augment(torch.zeros(3, 1, 8, 8), seeded(0), ways=[])
