"""Several examples in one stored image."""

import pytest
import torch
from torch.nn import functional

from coreset_sampler.synthetic.tiles import pack, unpack


def by_hand(images, tiles):
    """Tile by tile, in loops."""
    n, _, h, w = images.shape
    high, wide = h // tiles, w // tiles
    examples = []
    for i in range(n):
        for row in range(tiles):
            for column in range(tiles):
                tile = images[i, :, row * high : (row + 1) * high, column * wide : (column + 1) * wide]
                examples.append(functional.interpolate(tile[None], (h, w), mode="bilinear", align_corners=False)[0])
    return torch.stack(examples)


@pytest.mark.parametrize(("shape", "tiles"), [((2, 1, 28, 28), 2), ((3, 3, 32, 32), 3), ((1, 2, 7, 10), 3)])
def test_examples_are_the_tiles_of_each_image_row_by_row(shape, tiles):
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    found = unpack(images, tiles)
    assert found.shape == (shape[0] * tiles**2, *shape[1:])
    assert torch.equal(found, by_hand(images, tiles))


@pytest.mark.parametrize("size", [28, 29])
def test_packed_images_unpack_to_themselves_where_shrinking_loses_nothing(size):
    flat = torch.rand(8, 3, 1, 1, generator=torch.Generator().manual_seed(1)).expand(8, 3, size, size)
    stored = pack(flat, 2)
    assert stored.shape == (2, 3, size, size)
    torch.testing.assert_close(unpack(stored, 2), flat)


def test_packing_shrinks_by_weights_that_sum_to_one_over_nearby_pixels():
    """A half by antialiased bilinear weights: 1, 3, 3, 1 eighths; at the edge those that are there, rescaled."""
    image = torch.rand(8, 8, generator=torch.Generator().manual_seed(2))
    stored = pack(image.expand(4, 1, 8, 8), 2)
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0])
    rows = torch.zeros(4, 8)
    for i in range(4):
        for k, weight in enumerate(taps):
            if 0 <= 2 * i - 1 + k < 8:
                rows[i, 2 * i - 1 + k] = weight
    rows /= rows.sum(1, keepdim=True)
    weights = rows @ image @ rows.T
    for tile in (stored[0, 0, :4, :4], stored[0, 0, :4, 4:], stored[0, 0, 4:, :4], stored[0, 0, 4:, 4:]):
        torch.testing.assert_close(tile, weights)


def test_one_tile_changes_nothing():
    images = torch.rand(3, 1, 5, 5)
    assert torch.equal(unpack(images, 1), images)
    assert torch.equal(pack(images, 1), images)


def test_the_gradient_reaches_every_pixel_that_is_used_and_no_other():
    images = torch.rand(1, 1, 7, 7, requires_grad=True)
    unpack(images, 2).sum().backward()
    used = torch.zeros(7, 7)
    used[:6, :6] = 1
    assert torch.equal((images.grad[0, 0] != 0).float(), used)
    # each tile's weights sum to the pixels of an example
    assert float(images.grad.sum()) == pytest.approx(4 * 49, rel=1e-5)
    assert torch.autograd.gradcheck(lambda x: unpack(x, 2), torch.rand(1, 1, 5, 4, dtype=torch.double).requires_grad_())


def test_what_cannot_be_cut_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"tiles must be an integer from 1 to 4, the pixels of a side, got 5"):
        unpack(torch.rand(1, 1, 4, 6), 5)
    with pytest.raises(ValueError, match="tiles must be an integer"):
        unpack(torch.rand(1, 1, 4, 4), 0)
    with pytest.raises(ValueError, match="only float images"):
        unpack(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), 2)
    with pytest.raises(ValueError, match=r"multiple of tiles\*\*2 = 4"):
        pack(torch.rand(3, 1, 4, 4), 2)
