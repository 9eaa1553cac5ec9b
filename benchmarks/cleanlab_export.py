"""Whether cleanlab reads the export of an audit, and what it finds in that of a real run.

    pip install cleanlab
    python benchmarks/cleanlab_export.py --data DIR [--noise 0.3] [--passes 6]

The small network of `cifar10.py` is watched on 10,000 CIFAR-10 images of which some have a wrong label. `coreset-sampler
audit --cleanlab` writes what `cleanlab.filter.find_label_issues` reads. Printed: how many labels cleanlab doubts, how many
of these are wrong, and the same for as many suspects of our own. Measured figures: docs/audit.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from cifar10 import SETTINGS
from image_training import Images, as_it_is, load
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from coreset_sampler import CoresetSampler
from coreset_sampler.cli.main import main as coreset_sampler
from coreset_sampler.selection.testing import inject_label_noise

N, FRACTION = 10_000, 0.1


def trained(images: Images, labels: torch.Tensor, passes: int, seed: int) -> CoresetSampler:
    """A sampler that has watched a network train."""
    torch.manual_seed(seed)
    model = SETTINGS["cpu"].network()
    sampler = CoresetSampler(images, model, fraction=FRACTION, labels=labels, seed=seed, progress=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9, nesterov=True, weight_decay=5e-4)
    for _ in range(round(passes / FRACTION)):
        for x, y in DataLoader(images, 128, sampler=sampler, collate_fn=as_it_is):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return sampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder or hub id of CIFAR-10 for datasets.load_dataset")
    parser.add_argument("--noise", type=float, default=0.3, help="share of wrong labels (default: %(default)s)")
    parser.add_argument("--passes", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    import cleanlab

    torch.set_num_threads(1)
    pixels, clean = load(args.data, "train", "RGB")
    clean = clean[:N]
    labels = inject_label_noise(clean, args.noise, seed=args.seed)
    wrong = (labels != clean).numpy()
    sampler = trained(Images(pixels[:N], labels, SETTINGS["cpu"], shift=2), labels, args.passes, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        sampler.save_scores(Path(folder) / "scores.safetensors")
        coreset_sampler(["audit", f"{folder}/scores.safetensors", "--cleanlab", folder])
        pred_probs, given, indices = (np.load(f"{folder}/{name}.npy") for name in ("pred_probs", "labels", "indices"))
    from cleanlab.filter import find_label_issues

    issues = find_label_issues(given, pred_probs, return_indices_ranked_by="self_confidence", n_jobs=1)
    doubted = indices[issues]
    ours = np.array([suspect.index for suspect in sampler.suspects(len(doubted))])
    print(f"cleanlab {cleanlab.__version__} read {pred_probs.shape}; {len(doubted)} doubted, {wrong.sum()} wrong")
    print(f"wrong among them: cleanlab {wrong[doubted].mean():.3f}, ours {wrong[ours].mean():.3f}", end="; ")
    print(f"both doubt {len(np.intersect1d(doubted, ours)) / len(ours):.3f}")
    for k in (100, 500, 1000):
        print(f"first {k}: cleanlab {wrong[doubted[:k]].mean():.3f}, ours {wrong[ours[:k]].mean():.3f}")


if __name__ == "__main__":
    main()
