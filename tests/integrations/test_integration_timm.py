"""timm's own loaders around a coreset sampler: prefetcher on and off, mixup, two processes, and what is refused."""

import numpy as np
import pytest
import torch
from frameworks import SIZE, epochs_of, settings, two_processes
from PIL import Image
from scenarios import digits
from torch import nn
from torch.utils.data import Dataset, IterableDataset

timm_data = pytest.importorskip("timm.data")
pytestmark = pytest.mark.integration

from coreset_sampler.integrations.timm import with_sampler  # noqa: E402

from coreset_sampler import CoresetSampler, WeightedDataset  # noqa: E402


class Pictures(Dataset):
    """Digits as PIL images under a transform, as timm's own data sets have them; notes what is asked of it."""

    targets = digits().tensors[1]

    def __init__(self):
        self.transform, self.seen = None, []

    def __len__(self):
        return 1797

    def __getitem__(self, index):
        self.seen.append(int(index))
        pixels = (digits().tensors[0][int(index), 0].numpy() * 255).astype(np.uint8)
        image = Image.fromarray(pixels).convert("RGB").resize((16, 16))
        return self.transform(image) if self.transform else image, int(self.targets[index])

    def fixed(self):
        """The same pictures under the transform of evaluation, as bytes, for selection to look at."""
        other = Pictures()
        other.transform = timm_data.create_transform((3, 16, 16), crop_pct=1.0, use_prefetcher=True)
        return other


def picture_net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(392, 10))


def loader_of(data, **options):
    options = dict(is_training=True, no_aug=True, num_workers=0, device=torch.device("cpu")) | options
    return timm_data.create_loader(data, (3, 16, 16), batch_size=10, **options)


def sampler_of(data, **more):
    return CoresetSampler(data, picture_net(), **settings(selection_dataset=data.fixed(), **more))


def test_the_prefetcher_trains_on_the_coreset_and_selection_sees_what_training_sees():
    data = Pictures()
    sampler = sampler_of(data)
    loader = with_sampler(loader_of(data), sampler)
    assert isinstance(loader, timm_data.loader.PrefetchLoader)
    assert len(loader) == SIZE // 10
    batches = [(x, y) for _ in range(2) for x, y in loader]
    epochs = epochs_of(data.seen, 2)
    assert set(epochs[1]) <= set(sampler.coreset.indices.tolist())
    assert set(epochs[0]) != set(epochs[1])
    assert sampler.stats["selections"] == 2
    assert batches[0][0].dtype == torch.float32
    assert torch.equal(torch.cat([y for _, y in batches]), data.targets[torch.tensor(data.seen)])
    image = torch.as_tensor(data.fixed()[data.seen[0]][0])
    expected = (image - loader.mean[0]) / loader.std[0]
    assert torch.allclose(batches[0][0][0], expected, atol=1e-5)


def test_the_first_coreset_is_that_of_a_plain_loop_on_normalised_images():
    data = Pictures()
    sampler = sampler_of(data)
    next(iter(with_sampler(loader_of(data), sampler)))
    plain = Pictures()
    plain.transform = timm_data.create_transform((3, 16, 16), crop_pct=1.0, use_prefetcher=False)
    expected = CoresetSampler(plain, picture_net(), **settings()).select()
    assert np.isin(sampler.coreset.indices, expected.indices).mean() > 0.97  # normalised before or after batching


def test_without_the_prefetcher_and_with_workers_and_epochs_told_the_same_examples_come():
    data, told = Pictures(), Pictures()
    for_plain = dict(crop_pct=1.0, use_prefetcher=False)
    loaders = []
    for own, workers in ((data, 2), (told, 0)):
        fixed = own.fixed()
        fixed.transform = timm_data.create_transform((3, 16, 16), **for_plain)
        sampler = CoresetSampler(own, picture_net(), **settings(selection_dataset=fixed))
        loaders.append(with_sampler(loader_of(own, use_prefetcher=False, num_workers=workers), sampler))
    for epoch in range(2):
        loaders[1].sampler.set_epoch(epoch)
        labels = [torch.cat([y for _, y in loader]) for loader in loaders]
        assert torch.equal(*labels)
    assert loaders[0].persistent_workers
    assert loaders[0].worker_init_fn is not None
    assert loaders[0].drop_last


def test_mixup_goes_on_and_selection_sees_plain_labels():
    data = Pictures()
    mixup = timm_data.FastCollateMixup(mixup_alpha=1.0, cutmix_alpha=1.0, num_classes=10)
    loader = with_sampler(loader_of(data, collate_fn=mixup, re_prob=0.5, no_aug=False), sampler_of(data))
    images, targets = next(iter(loader))
    assert images.shape == (10, 3, 16, 16)
    assert targets.shape == (10, 10)
    assert loader.mixup_enabled
    loader.mixup_enabled = False
    assert not mixup.mixup_enabled
    assert loader.random_erasing is not None


def test_weights_in_the_loss_come_without_the_prefetcher_and_are_refused_with_it():
    data = Pictures()
    plain = data.fixed()
    plain.transform = timm_data.create_transform((3, 16, 16), crop_pct=1.0, use_prefetcher=False)
    sampler = CoresetSampler(
        WeightedDataset(data), picture_net(), **settings(weighting="loss", selection_dataset=plain)
    )
    loader = with_sampler(loader_of(data, use_prefetcher=False), sampler)
    weights = torch.cat([weight for _, _, weight in loader])
    assert float(weights.mean()) == pytest.approx(1, abs=1e-5)
    assert float(weights.std()) > 0
    with pytest.raises(ValueError, match="use_prefetcher=False"):
        with_sampler(loader_of(data), sampler)


class Stream(IterableDataset):
    transform = None

    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_multi_epochs_loader": True}, "use_multi_epochs_loader"),
        ({"is_training": False}, "is_training=True"),
        ({"input_size_choices": [16, 24]}, "input_size_choices"),
        ({"data": Stream()}, "stream"),
    ],
)
def test_loaders_that_cannot_be_right_are_refused(options, message):
    data = options.get("data", Pictures())
    loader = loader_of(data, **{key: value for key, value in options.items() if key != "data"})
    with pytest.raises(TypeError, match=message):
        with_sampler(loader, sampler_of(Pictures()))


def test_a_sampler_of_other_data_is_refused():
    data = Pictures()
    with pytest.raises(ValueError, match="same data set"):
        with_sampler(
            loader_of(data),
            CoresetSampler(torch.utils.data.Subset(data, range(500)), picture_net(), size=50, strategy="stable"),
        )
    with pytest.raises(TypeError, match="CoresetSampler"):
        with_sampler(loader_of(data), torch.utils.data.RandomSampler(data))


def test_two_processes_share_the_coreset_and_an_unsharded_sampler_is_refused():
    first, second = (rank["timm"] for rank in two_processes())
    assert first["coreset"] == second["coreset"]
    assert first["length"] == second["length"] == 4
    for mine, other in zip(epochs_of(first["seen"], 2), epochs_of(second["seen"], 2), strict=True):
        assert len(mine) == len(other)
    assert set(first["seen"][40:]) | set(second["seen"][40:]) <= set(first["coreset"])
    assert "DistributedCoresetSampler" in first["refused"]
