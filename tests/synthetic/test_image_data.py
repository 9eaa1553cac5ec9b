"""Folders of images as people have them: grey and colour together, 16 bits, labels that are text."""

import numpy as np
import pytest

datasets = pytest.importorskip("datasets")
Image = pytest.importorskip("PIL.Image")

from coreset_sampler.synthetic.image_data import open_images  # noqa: E402


def folder(path, pictures):
    """Two classes, `pictures(split, class)` of each."""
    for split in ("train", "test"):
        for name in ("a", "b"):
            (path / split / name).mkdir(parents=True)
            for number, array in enumerate(pictures(split, name)):
                Image.fromarray(array).save(path / split / name / f"{number:03}.png")
    return str(path)


def grey(count, seed=0):
    return list(np.random.default_rng(seed).integers(0, 256, (count, 6, 6), dtype=np.uint8))


def colour(count):
    return list(np.random.default_rng(1).integers(0, 256, (count, 6, 6, 3), dtype=np.uint8))


def test_colour_is_kept_where_more_than_a_hundred_grey_images_come_first(tmp_path):
    data = open_images(folder(tmp_path, lambda split, name: grey(101) if name == "a" else colour(2)))
    assert data.train[0].shape == (103, 3, 6, 6)
    assert (data.train[0][-2:].numpy() == np.stack(colour(2)).transpose(0, 3, 1, 2)).all()
    assert (data.train[0][:101].numpy() == np.stack(grey(101))[:, None]).all()


def test_training_images_in_colour_go_with_grey_test_images(tmp_path):
    data = open_images(folder(tmp_path, lambda split, name: colour(2) if split == "train" else grey(2)))
    assert data.train[0].shape == data.test[0].shape == (4, 3, 6, 6)
    assert (data.test[0][:2].numpy() == np.stack(grey(2))[:, None]).all()


@pytest.mark.parametrize("image_size", [None, 6])
def test_sixteen_bits_are_scaled_to_eight_and_not_clipped(tmp_path, image_size):
    wide = folder(tmp_path, lambda split, name: [each.astype(np.uint16) * 257 for each in grey(3)])
    data = open_images(wide, image_size=image_size)
    assert (data.train[0][:3, 0].numpy() == np.stack(grey(3))).all()


def test_float_pictures_are_refused_because_their_range_is_not_known(tmp_path):
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.fromarray(np.ones((6, 6), np.float32)).save(tmp_path / split / name / "0.tiff")
    with pytest.raises(ValueError, match="image 0 of .* is refused: float pixels have no range"):
        open_images(str(tmp_path))


@pytest.mark.parametrize(
    ("labels", "said"), [(["x", "y"], "row 0 has 'x'"), ([0, None], "row 1 has None"), ([0.0, 0.7], "row 0 has 0.0")]
)
def test_labels_that_are_no_class_numbers_are_refused_with_what_to_do(tmp_path, labels, said):
    for split in ("train", "test"):
        images = [Image.fromarray(each) for each in grey(2)]
        columns = datasets.Dataset.from_dict({"image": images, "label": labels})
        columns.cast_column("image", datasets.Image()).to_parquet(tmp_path / f"{split}.parquet")
    with pytest.raises(ValueError, match=rf"column 'label' .* class numbers, {said}; .*class_encode_column"):
        open_images(str(tmp_path))
