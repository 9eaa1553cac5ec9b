"""What to know of a coreset before training on it: its pixels, the networks it was made for, how far it carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .dataset import SyntheticCoreset
from .untrusted import printable


def remarks(coreset: SyntheticCoreset) -> list[str]:
    """A line each on examples per image, on pixels that no camera makes, on the networks that it was made for."""
    return [line for line in (several_examples(coreset), outside_pixels(coreset), made_for(coreset)) if line]


def several_examples(coreset: SyntheticCoreset) -> str | None:
    """How many examples each stored image gives; None if it is one."""
    if coreset.views is not None:
        made = (
            f"each image gives {coreset.views.count} views, moved and mixed with other images, each with its own label"
        )
        return f"{coreset.size}: {made}"
    if coreset.tiles == 1:
        return None
    cut = f"each image is cut into {coreset.tiles} x {coreset.tiles} examples, enlarged to the full size for training"
    return f"{coreset.size}: {cut}"


def outside_pixels(coreset: SyntheticCoreset) -> str | None:
    """How many pixels lie outside [0, 1] and how far; None if none do, or where there are no pixels."""
    try:
        pixels = coreset.exact_pixels(stored=True)  # enlarging only averages them
    except ValueError:  # no images, or whitened in a way that loses them
        return None
    slack = 0.5 / 255  # half floats and whitening round
    share = float(((pixels < -slack) | (pixels > 1 + slack)).double().mean())
    if not share:
        return None
    low, high = float(pixels.min()), float(pixels.max())
    return (
        f"{share:.0%} of its pixels lie outside [0, 1] (from {low:.2f} to {high:.2f}): networks with BatchNorm do badly on "
        "such images; shown clamped"
    )


def made_for(coreset: SyntheticCoreset) -> str | None:
    """The networks that a learned set was made with; None for real images."""
    recorded = coreset.provenance
    if coreset.target_kind == "hard" and "train_indices" in recorded:
        return None
    if coreset.views is not None and coreset.method == "views":
        return "made for networks of any kind: the images are real, the labels of their views a trained network's"
    several, one = recorded.get("networks"), recorded.get("network")
    if isinstance(several, list) and several:
        return printable(f"made for {len(several)} kind(s) of networks: {', '.join(map(str, several))}")
    if isinstance(one, dict) and one.get("net"):
        norm = f" with {str(one['norm']).replace('_', ' ')}" if one.get("norm") else ""
        return printable(
            f"made for one kind of network: {one['net']}{norm}; others may learn less from it than from real images"
        )
    return "which networks it was made for is not recorded; to compare: coreset-sampler evaluate ... --against random"


def accuracy_range(measured: Mapping[str, Any]) -> str:
    """Accuracy as the zoo lists it: from the worst network to the best one, beside real images where these were measured.

    `measured` is an index entry's `accuracy`; under `networks` it has what `Results.per_network` gives.
    """
    networks = measured.get("networks")
    if not measured:
        return "not measured"
    if not networks:
        return f"{measured['mean']:.1%} ± {measured['std']:.1%} (n={measured['n']}), ConvNet only"
    own = [each["the coreset"]["mean"] for each in networks.values()]
    text = f"{min(own):.1%} to {max(own):.1%} over {len(own)} networks"
    random = [each["random"]["mean"] for each in networks.values() if "random" in each]
    return f"{text} (random real images {min(random):.1%} to {max(random):.1%})" if random else text
