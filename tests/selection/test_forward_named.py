"""Where a model cannot be run on a batch as it comes, the error names `forward_fn=`."""

import pytest
from scenarios import digits
from torch import nn
from torch.utils.data import Dataset

from coreset_sampler import CoresetSampler, strategies


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.Linear(16, 10))


class Named(Dataset):
    targets = digits().tensors[1][:200]

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return {"image": digits().tensors[0][index], "label": int(self.targets[index])}


class Numbered(Named):
    def __getitem__(self, index):
        return index, digits().tensors[0][index], int(self.targets[index])


def sampler_of(data, model, **settings):
    settings = dict(size=20, strategy=strategies.Crest(pool_size=20, keep=10), progress=False) | settings
    return CoresetSampler(data, model, **settings)


def test_a_dict_whose_names_the_model_does_not_take():
    with pytest.raises(TypeError, match=r"(?s)'image', 'label'.*forward_fn="):
        sampler_of(Named(), net()).select()
    found = sampler_of(Named(), net(), forward_fn=lambda model, batch: (model(batch["image"]), batch["label"])).select()
    assert len(found) == 20


class Margin(nn.Module):
    """As ArcFace: its logits depend on the labels."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x, y=None):
        return self.inner(x) - nn.functional.one_hot(y, 10)


class NeedsBoth(Margin):
    def forward(self, x, y):
        return super().forward(x, y)


def test_a_model_that_takes_more_than_the_inputs():
    with pytest.raises(TypeError, match=r"takes \(x, y\) and cannot be given the first field.*'y'.*forward_fn="):
        sampler_of(digits(), NeedsBoth()).select()
    found = sampler_of(digits(), NeedsBoth(), forward_fn=lambda model, batch: (model(*batch), batch[1])).select()
    assert len(found) == 20


def test_an_error_inside_the_model_stays_as_it_is():
    with pytest.raises(TypeError, match="one_hot"):
        sampler_of(digits(), Margin()).select()


def test_examples_that_begin_with_their_index():
    with pytest.raises(ValueError, match=r"(?s)3 fields.*forward_fn="):
        sampler_of(Numbered(), net()).select()
    found = sampler_of(Numbered(), net(), forward_fn=lambda model, batch: (model(batch[1]), batch[2])).select()
    assert len(found) == 20
