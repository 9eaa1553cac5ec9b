import pytest
import torch

from coreset_sampler.selection.testing import inject_label_noise


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_exactly_the_share_of_labels_is_wrong_and_each_other_class_is_as_likely(share):
    labels = torch.arange(9_000) % 3
    wrong = inject_label_noise(labels, share, seed=1)
    assert int((wrong != labels).sum()) == int(share * 9_000)
    assert wrong.dtype == labels.dtype
    offsets = torch.bincount((wrong - labels) % 3, minlength=3)[1:].double()
    assert float((offsets - offsets.mean()).abs().max()) < 4 * (offsets.sum().item() / 4) ** 0.5 + 1e-9
    assert torch.equal(wrong, inject_label_noise(labels, share, seed=1))


def test_labels_of_a_class_that_is_absent_may_be_put():
    wrong = inject_label_noise(torch.zeros(300, dtype=torch.int64), 0.5, seed=0, num_classes=4)
    assert wrong.unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("share", "classes", "message"), [(30, None, "pass 0.3"), (0.5, 1, "at least 2")])
def test_a_share_or_number_of_classes_that_makes_no_sense_is_refused(share, classes, message):
    with pytest.raises(ValueError, match=message):
        inject_label_noise(torch.zeros(10, dtype=torch.int64), share, seed=0, num_classes=classes)
