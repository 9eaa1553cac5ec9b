import pytest
import torch

from coreset_sampler import Coreset


def test_merge_adds_up_the_weights_of_an_example_kept_twice():
    merged = Coreset.merge([Coreset([3, 1], [2.0, 5.0]), Coreset([7, 3], [1.0, 4.0])])
    assert merged.indices.tolist() == [1, 3, 7]
    assert merged.weights.tolist() == [5.0, 6.0, 1.0]


def test_overlap_is_the_share_of_examples_in_common():
    assert Coreset([1, 2, 3, 4], torch.ones(4)).overlap(Coreset([4, 2, 9], torch.ones(3))) == 0.5


def test_a_coreset_keeps_its_own_examples_and_not_what_they_were_cut_from():
    order = torch.randperm(10_000)
    coreset = Coreset(order[:10], torch.ones(10_000, dtype=torch.float64)[:10])
    assert coreset.indices.untyped_storage().nbytes() == coreset.weights.untyped_storage().nbytes() == 80
    assert torch.equal(coreset.indices, order[:10])


@pytest.mark.parametrize(
    ("indices", "weights", "message"),
    [
        ([1, 1], [1.0, 1.0], "distinct"),
        ([-1, 2], [1.0, 1.0], "non-negative"),
        ([1, 2], [1.0], "one length"),
        ([1, 2], [1.0, float("nan")], "finite"),
        ([1, 2], [1.0, -1.0], "non-negative"),
    ],
)
def test_what_is_not_a_coreset_is_refused(indices, weights, message):
    with pytest.raises(ValueError, match=message):
        Coreset(indices, weights)
