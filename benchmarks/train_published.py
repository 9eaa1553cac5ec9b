"""A published condensed CIFAR-10 set trains a ConvNet to the accuracy that its makers recorded.

    python benchmarks/train_published.py res_DC_CIFAR10_ConvNet_10ipc.pt --data data/cifar10

`--data` is a folder that `datasets.load_dataset` opens, with columns img and label. Network and schedule are
those of gradient matching (Zhao et al. 2021): 3 blocks of convolution, instance norm, relu, average pooling,
width 128; SGD at 0.01, momentum 0.9, weight decay 5e-4, batch 256, 300 epochs, a tenth of the rate from the
middle on, no augmentation.

Measured: accuracy 0.426 +- 0.007 (n=5) on all 10,000 test images, for the set of 10 images per class whose
makers recorded 0.422 +- 0.005 (n=10): 0.4 points apart. 7 to 18 minutes a seed on one core of a busy machine.
The set of 1 image per class: 0.273 +- 0.006 (n=3), recorded 0.265 +- 0.007 (n=10).
"""

from __future__ import annotations

import argparse
import time

import datasets
import numpy as np
import torch
from harness import spread
from torch import Tensor, nn
from torch.utils.data import DataLoader

from coreset_sampler import SyntheticCoreset, read_published

EPOCHS = 300
WIDTH = 128


def convnet(channels: int, num_classes: int) -> nn.Sequential:
    """For images of 32 x 32."""
    layers: list[nn.Module] = []
    for inputs in (channels, WIDTH, WIDTH):
        norm = nn.GroupNorm(WIDTH, WIDTH)  # one group a channel: instance norm with scale and shift
        layers += [nn.Conv2d(inputs, WIDTH, 3, padding=1), norm, nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(WIDTH * 4 * 4, num_classes))


def train(coreset: SyntheticCoreset, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = convnet(coreset.inputs.shape[1], coreset.num_classes)
    loader = DataLoader(coreset, batch_size=256, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [EPOCHS // 2 + 2], gamma=0.1)
    for _ in range(EPOCHS + 1):  # their loop runs one more
        for inputs, targets in loader:
            optimizer.zero_grad()
            coreset.loss(model(inputs), targets).backward()
            optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    model.eval()
    right = [(model(x).argmax(1) == y).sum() for x, y in zip(inputs.split(500), labels.split(500), strict=True)]
    return float(sum(right)) / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--data", required=True, help="folder of CIFAR-10 for datasets.load_dataset")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    coreset = read_published(arguments.file)
    test = datasets.load_dataset(arguments.data, split="test")
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in test["img"]])).permute(0, 3, 1, 2) / 255
    inputs, labels = coreset.preprocessing(pixels), torch.tensor(test["label"][:])
    print(coreset, coreset.preprocessing, f"{len(labels)} test images", sep="\n")

    results = []
    for seed in range(arguments.seeds):
        start = time.perf_counter()
        results.append(accuracy(train(coreset, seed), inputs, labels))
        print(f"seed {seed}: accuracy {results[-1]:.4f}, {time.perf_counter() - start:.0f} s", flush=True)
    recorded = coreset.provenance["recorded_accuracy"]["ConvNet"]
    print(f"here     {spread(results)} (n = {len(results)})")
    print(f"recorded {recorded['mean']:.3f} ± {recorded['std']:.3f} (n = {recorded['n']})")


if __name__ == "__main__":
    main()
