"""Every example's class, as people's data sets hold them: in lists and arrays, in parts of others, changed on the way."""

import re

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from coreset_sampler.selection.labels import check_labels, labels_of
from coreset_sampler.selection.score_file import class_names

NUMBERS = [0, 1, 2, 1, 2, 0]


class Stored(Dataset):
    """As torchvision's data sets: `targets`, and what is done to them on the way."""

    classes = ("cat", "dog", "emu")

    def __init__(self, targets, target_transform=None):
        self.targets, self.target_transform = targets, target_transform

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        label = self.targets[i]
        return torch.zeros(2), label if self.target_transform is None else self.target_transform(label)


WORDS = ["cat", "dog", "emu"] * 2
PARTS = {
    "whole": lambda data: data,
    "subset": lambda data: Subset(data, range(1, 5)),
    "subset of a subset": lambda data: Subset(Subset(data, torch.arange(5)), np.array([4, 0, 3])),
    "both": lambda data: ConcatDataset([data, Subset(data, [2, 1])]),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("targets", [WORDS, np.array(WORDS), [None, None, 1] * 2, [[0], [1, 2]] * 3], ids=repr)
def test_labels_that_are_no_numbers_are_refused_in_the_same_words_in_any_part_of_the_data(part, targets):
    with pytest.raises(ValueError, match="one whole number per example, got .*(cat|dog|emu|None|\\[).* pass labels="):
        labels_of(part(Stored(targets)), progress=False)


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize(
    "targets",
    [
        NUMBERS,
        tuple(NUMBERS),
        torch.tensor(NUMBERS),
        list(map(np.int64, NUMBERS)),
        np.array(NUMBERS, "u2"),
        np.array(NUMBERS, object),
        np.array(NUMBERS[::-1])[::-1],
    ],
    ids=repr,
)
def test_labels_of_any_kind_of_number_are_read_without_the_examples(part, targets):
    data = part(Stored(targets))
    expected = [int(data[i][1]) for i in range(len(data))]
    Stored.__getitem__, kept = None, Stored.__getitem__
    try:
        assert labels_of(data).tolist() == expected
    finally:
        Stored.__getitem__ = kept


def test_labels_in_arrays_that_torch_does_not_take_are_copied(recwarn):
    frozen = np.array(NUMBERS)
    frozen.setflags(write=False)
    assert check_labels(frozen, 6).tolist() == check_labels(np.array(NUMBERS[::-1])[::-1], 6).tolist() == NUMBERS
    assert not recwarn.list


@pytest.mark.parametrize("labels", [dict(enumerate(NUMBERS)), (i for i in NUMBERS)], ids=["dict", "generator"])
def test_labels_that_are_no_list_are_named(labels):
    with pytest.raises(ValueError, match=f"got {re.escape(type(labels).__name__)} such as "):
        check_labels(labels, 6)


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize(
    "change", [lambda y: 2 - int(y), lambda y: int(y) == 0, lambda y: torch.tensor(int(y) // 2)], ids=range(3)
)
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_labels_are_those_that_a_target_transform_makes_of_them(part, change, kind):
    data = part(Stored(kind(NUMBERS), change))
    assert labels_of(data).tolist() == [int(data[i][1]) for i in range(len(data))]


def test_a_target_transform_may_make_numbers_of_words():
    assert labels_of(Stored(WORDS, WORDS.index)).tolist() == [0, 1, 2] * 2


def test_a_target_transform_that_makes_vectors_leaves_the_classes_as_they_are():
    data = Stored(NUMBERS, lambda y: one_hot(torch.tensor(y), 3).float())
    assert labels_of(data).tolist() == NUMBERS


def test_names_of_classes_that_a_target_transform_has_changed_are_not_kept():
    assert class_names(Stored(NUMBERS)) == class_names(Stored(NUMBERS, int)) == ["cat", "dog", "emu"]
    assert class_names(Subset(Stored(NUMBERS, lambda y: 2 - y), [0])) is None


def test_columns_of_several_tensor_sets_are_put_together():
    parts = [TensorDataset(torch.zeros(3, 2), torch.tensor(NUMBERS[:3])), Stored(NUMBERS[3:])]
    assert labels_of(ConcatDataset(parts)).tolist() == NUMBERS
    assert labels_of(ConcatDataset(parts[:1] * 2)).tolist() == NUMBERS[:3] * 2


class Fields(Dataset):
    """Examples of these fields, whose labels are not stored."""

    def __init__(self, *fields):
        self.fields = fields

    def __len__(self):
        return len(NUMBERS)

    def __getitem__(self, i):
        return torch.zeros(2), *(field[i] for field in self.fields)


@pytest.mark.parametrize(
    "data",
    [
        Fields([0, 0, 0, 1, 1, 1], NUMBERS),
        Fields(NUMBERS, np.array([5, 0, 1, 2, 3, 4])),
        TensorDataset(torch.zeros(6, 2), torch.tensor([3, 4, 5, 3, 4, 5]), torch.tensor(NUMBERS)),
        Subset(TensorDataset(torch.zeros(6, 2), torch.tensor([3, 4, 5, 3, 4, 5]), torch.tensor(NUMBERS)), [1, 2]),
    ],
    ids=["domain", "group", "lengths", "part"],
)
def test_a_label_that_may_be_in_another_field_than_the_second_is_told(data):
    with pytest.warns(
        UserWarning, match="have 3 fields, of which the second was read as the label.*labels= alone says so"
    ):
        labels_of(data, progress=False)


@pytest.mark.parametrize(
    "data",
    [
        Fields(NUMBERS),
        Fields(NUMBERS, range(6)),
        Fields(NUMBERS, torch.ones(6)),
        Fields(NUMBERS, [True, False] * 3),
        Fields(NUMBERS, torch.zeros(6, 2).long()),
        Fields(NUMBERS, "abcdef"),
        TensorDataset(torch.zeros(6, 2), torch.tensor(NUMBERS), torch.arange(6)),
    ],
    ids=["pair", "index", "weight", "flag", "mask", "name", "tensors"],
)
def test_an_index_a_weight_or_a_mask_behind_the_label_is_no_other_label(data, recwarn):
    assert labels_of(data, progress=False).tolist() == NUMBERS
    assert not recwarn.list
