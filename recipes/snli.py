"""SNLI with wrong labels: any Hugging Face encoder, a tenth of the pairs an epoch, by uniform, CREST or stable sampling.

    python recipes/snli.py run --data stanfordnlp/snli --model FacebookAI/roberta-base --strategy stable --noise 0.3
    torchrun --nproc-per-node 4 recipes/snli.py run --data stanfordnlp/snli --model FacebookAI/roberta-base
    python recipes/snli.py tune --data DIR --model DIR --setting cpu      # every contestant, the same rates
    python recipes/snli.py table --data DIR --model DIR --setting cpu     # what was measured, MiniLM on one core
    python recipes/snli.py time --data DIR --model DIR --setting cpu      # accuracy against time, with full data
    python recipes/snli.py ablation --data DIR --model DIR --setting cpu --noise 0.3   # one thing changed at a time

`CoresetTrainer` is a `Trainer` with one more argument. Noise goes into the LayerNorm weights and biases for stable's look
(the paper's way); `believed` is random but for labels that the model does not believe. Labels are replaced before anything
reads them, so that training and selection both see the wrong ones; validation pairs (others of the training split) and
test pairs stay clean.
Finished runs are kept in --results, line by line, and a run in progress as the trainer's checkpoint beside it: what is
killed goes on where it was (its seconds are then those since it went on).

Measured (`table --setting cpu --clock cpu`: MiniLM, half of it frozen, 4,000 pairs, 2 passes; 3,000 test pairs, n = 3, mean
± standard deviation; one rate for all, chosen for uniform on validation pairs):

    noise   uniform         CREST           stable          believed        selection: CREST, stable, believed
    0.3     0.607 ± 0.028   0.612 ± 0.007   0.613 ± 0.009   0.620 ± 0.003   27 %, 30 %, 28 %
    0       0.726 ± 0.003   0.699 (n = 1)   0.710 (n = 1)   0.715 (n = 1)

So there is no gain that stands out of the spread; an oracle that knows wrong labels gains 6.5.
Why, and the paper's ratio of pools at n = 3, is in recipes/README.md.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from coreset_sampler.integrations.huggingface import CoresetTrainer
from datasets import Dataset, load_dataset
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from coreset_sampler import Coreset, SphericalGaussian, strategies
from coreset_sampler.experiments import CLOCKS, curves, grouped, mean_of, oracle, run_all, spread, with_wrong_labels
from coreset_sampler.picture import time_to_accuracy
from coreset_sampler.types import Strategy, View

FRACTION, CLASSES = 0.1, 3
STRATEGIES = ("uniform", "crest", "stable", "believed", "full")
ABLATION = (
    "uniform", "stable", "no noise", "scale 0.1", "one of twelve", "four of twelve", "four of twelve, each once",
    "first look after a quarter", "doubting", "doubting, no noise", "believed", "half of the wrong labels left out",
    "all wrong labels left out",
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    # Pools of 128 a class and a tenth of the data are the paper's; rate, batch and epochs are ours.
    "paper": dict(
        n=None, n_held_out=None, passes=3, batch_size=32, max_length=128, freeze=0, bf16=False,
        pools=dict(pool_size=384, keep=96), scale=0.01, warm_up=0.05, noises=(0.0, 0.1, 0.3, 0.5), lengths=(0.5, 1, 2, 3),
        rates=(2e-5,), tuned={},
    ),
    # Embeddings and the lower half of the layers stay as they are: twice as many examples a second.
    "cpu": dict(
        n=4_000, n_held_out=3_000, passes=2, batch_size=16, max_length=40, freeze=3, bf16=True,
        pools=dict(pool_size=4, keep=1, reuse=5), scale=0.01, warm_up=0.5, noises=(0.0, 0.3), lengths=(0.5, 1, 2),
        rates=(2e-4, 1e-4), tuned={0.3: 1e-4},  # what was best for uniform sampling
    ),
}  # fmt: skip


def strategy_of(name: str, setting: dict[str, Any], epochs: float, wrong: Tensor) -> Strategy:
    posterior = partial(SphericalGaussian, layers="norm", redraw=1)
    crest = partial(strategies.crest, **setting["pools"])
    look = partial(strategies.stable, posterior=posterior(setting["scale"]), draws=4, **setting["pools"])
    several = partial(look, pool_size=12 * CLASSES, keep=4 * CLASSES)  # the paper's ratio
    chosen = {
        "uniform": strategies.uniform,
        "full": strategies.uniform,
        "crest": crest,
        "no noise": crest,
        "stable": look,
        "scale 0.1": partial(look, posterior=posterior(0.1)),
        "one of twelve": partial(look, pool_size=12, keep=1),
        "four of twelve": several,
        "four of twelve, each once": several,  # the sampler leaves the weights out
        "first look after a quarter": look,
        "doubting": partial(look, doubt=2),
        "doubting, no noise": partial(crest, doubt=2),
        "believed": partial(strategies.believed, reuse=setting["pools"].get("reuse", 1)),
        "half of the wrong labels left out": partial(oracle, wrong[::2]),
        "all wrong labels left out": partial(oracle, wrong),
    }[name]()
    share = 0.25 if name == "first look after a quarter" else setting["warm_up"]
    return strategies.warm_up(chosen, selections=round(share * epochs))  # the head starts at random


def watched(strategy: Strategy, wrong: Tensor, shares: list[float], *, by_weight: bool) -> Strategy:
    """The same, and the share of right labels in each selection goes into `shares`."""

    def select(view: View, size: int, generator: torch.Generator) -> Coreset:
        coreset = strategy(view, size, generator)
        shown = coreset.weights if by_weight else torch.ones_like(coreset.weights)
        shares.append(float((shown * ~torch.isin(coreset.indices, wrong)).sum() / shown.sum()))
        return coreset

    return select


@cache
def pairs(data: str, model: str, split: str, max_length: int) -> Dataset:
    """All pairs, tokenised, in one random order; those on which the annotators did not agree are left out."""
    rows = load_dataset(data, split=split)
    missing = {"premise", "hypothesis", "label"} - set(rows.column_names)
    if missing:
        raise SystemExit(f"--data must have columns premise, hypothesis and label; {data} lacks {sorted(missing)}")
    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokens(batch: dict[str, list]) -> dict[str, list]:
        texts = tokenizer(batch["premise"], batch["hypothesis"], truncation=True, max_length=max_length)
        return {**texts, "labels": batch["label"], "length": [len(ids) for ids in texts["input_ids"]]}

    rows = rows.filter(lambda labels: [label >= 0 for label in labels], input_columns="label", batched=True)
    return rows.shuffle(seed=0).map(tokens, batched=True, remove_columns=rows.column_names)


def data_of(job: dict, args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Pairs to train on, the first of the training split, and to score on: the last of it, or the test split."""
    setting = SETTINGS[job["setting"]]
    rows = pairs(args.data, args.model, "train", setting["max_length"])
    held_out = rows if job["on"] == "validation" else pairs(args.data, args.model, "test", setting["max_length"])
    count = min(setting["n_held_out"] or len(held_out), len(held_out) // (5 if held_out is rows else 1))
    n = len(rows) - count if held_out is rows else len(rows)
    held_out = held_out.select(range(len(held_out) - count, len(held_out))).sort("length")
    return rows.select(range(min(setting["n"] or n, n))), held_out.remove_columns("length")


def model_of(name: str, freeze: int):
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=CLASSES, ignore_mismatched_sizes=True)
    if freeze:
        model.get_input_embeddings().requires_grad_(False)
        layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        for part in (*layers[:freeze], getattr(model.base_model, "embeddings", torch.nn.Identity())):
            part.requires_grad_(False)
    return model


def train(job: dict, args: argparse.Namespace) -> dict[str, float]:
    """One run: accuracy, seconds without the test, selection's share of them, share of clean labels in the second half."""
    torch.set_num_threads(args.threads)
    setting, (train_set, held_out) = SETTINGS[job["setting"]], data_of(job, args)
    clean = torch.tensor(train_set["labels"][:])
    noisy = with_wrong_labels(clean, job["noise"], seed=job["seed"], classes=CLASSES)
    train_set = train_set.remove_columns(["labels", "length"]).add_column("labels", noisy.tolist())
    folder = args.results.parent / ("snli-" + "-".join(str(value) for value in job.values()))
    fraction = 1.0 if job["strategy"] == "full" else FRACTION
    epochs = job["passes"] / fraction
    wrong = (noisy != clean).nonzero().flatten()
    weights = "none" if job["strategy"].endswith("each once") else "draw"
    strategy, shares = strategy_of(job["strategy"], setting, epochs, wrong), list[float]()
    set_seed(job["seed"])
    trainer = CoresetTrainer(
        model=model_of(args.model, setting["freeze"]),
        args=TrainingArguments(
            output_dir=str(folder), seed=job["seed"], num_train_epochs=epochs, learning_rate=job["lr"],
            per_device_train_batch_size=setting["batch_size"], per_device_eval_batch_size=100, weight_decay=0.01,
            warmup_steps=0.1, lr_scheduler_type="linear", fp16=torch.cuda.is_available() and not setting["bf16"],
            bf16=setting["bf16"], use_cpu=setting["bf16"] and not torch.cuda.is_available(), save_steps=args.save_steps,
            save_total_limit=1, logging_steps=20, report_to=[], disable_tqdm=args.quiet,
        ),
        train_dataset=train_set,
        data_collator=DataCollatorWithPadding(AutoTokenizer.from_pretrained(args.model)),
        coreset=dict(
            fraction=fraction, weights=weights, strategy=watched(strategy, wrong, shares, by_weight=weights == "draw")
        ),
    )  # fmt: skip
    began = {kind: clock() for kind, clock in CLOCKS.items()}
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.exists() else None)
    spent = {kind: clock() - began[kind] for kind, clock in CLOCKS.items()}
    found = trainer.predict(held_out)
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "accuracy": float((found.predictions.argmax(1) == found.label_ids).mean()),
        **spent,
        "share": trainer.coreset_sampler.stats["seconds"] / spent["wall"],
        "clean": fmean(shares[len(shares) // 2 :] or [math.nan]),  # none if it went on after the last selection
    }


def jobs_of(args: argparse.Namespace) -> list[dict]:
    setting = SETTINGS[args.setting]
    noises, names, seeds = args.noise or setting["noises"], args.strategy or STRATEGIES, range(args.seeds)
    passes = [args.passes or setting["passes"]]
    if args.command == "run":
        noises, names, seeds = args.noise or [0.0], args.strategy or ["stable"], [args.seed]
    elif args.command == "tune":
        seeds = [100]
    elif args.command == "time":
        passes = setting["lengths"]
    elif args.command == "ablation":
        names, seeds = args.strategy or ABLATION, range(200, 200 + args.seeds)

    def rates(noise: float, name: str) -> tuple[float, ...]:
        tuned = setting["tuned"].get(noise, setting["rates"][0])
        return setting["rates"] if args.command == "tune" else (args.lr or tuned,)

    on = "validation" if args.command in ("tune", "ablation") or args.validation else "test"
    return [
        dict(setting=args.setting, on=on, noise=noise, strategy=name, lr=lr, passes=float(length), seed=seed)
        for seed in seeds for noise in noises for length in passes for name in names for lr in rates(noise, name)
    ]  # fmt: skip


def report(rows: list[dict], args: argparse.Namespace) -> None:
    print("| noise | strategy | rate | passes | accuracy | seconds | selection | clean labels |\n" + "|---" * 8 + "|")
    for (noise, name, lr, passes), found in grouped(rows, "noise", "strategy", "lr", "passes").items():
        costs = f"{mean_of(found, args.clock):.0f} | {mean_of(found, 'share'):.0%} | {mean_of(found, 'clean'):.2f}"
        score = spread([row["accuracy"] for row in found])
        print(f"| {noise} | {name} | {lr:g} | {passes:g} | {score} | {costs} |")
    print(f"\n{rows[0]['on']} pairs, n = {len(found)} seeds, mean ± standard deviation; {args.clock} seconds")
    for (noise,), some in grouped(rows, "noise").items() if args.command == "time" else ():
        picture = args.picture.with_stem(f"{args.picture.stem}-{noise:g}")
        print(
            *time_to_accuracy(curves(some, args.clock), picture, title=f"SNLI, {noise:.0%} of the labels wrong"),
            sep="\n",
        )
        print(f"picture: {picture}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", choices=["run", "tune", "table", "time", "ablation"])
    add("--data", required=True, help="folder or hub id of SNLI for datasets.load_dataset")
    add("--model", required=True, help="folder or hub id of an encoder with its tokenizer")
    add("--setting", choices=SETTINGS, default="paper", help="default: %(default)s")
    add(
        "--strategy",
        choices=dict.fromkeys((*STRATEGIES, *ABLATION)),
        nargs="+",
        help="default: stable for run, all for the others",
    )
    add("--noise", type=float, nargs="+", help="shares of wrong labels (default: the setting's; 0 for run)")
    add("--lr", type=float, help="default: as tuned, or the setting's first")
    add("--passes", type=float, help="over the pairs; ten epochs of a tenth are one (default: the setting's)")
    add("--validation", action="store_true", help="score on pairs of the training split set aside, not on test")
    add("--seed", type=int, default=0, help="for run (default: %(default)s)")
    add("--seeds", type=int, default=3, help="for table, time and ablation (default: %(default)s)")
    add("--clock", choices=CLOCKS, default="wall", help="to report; cpu where others use the machine")
    add("--threads", type=int, default=1, help="of the CPU (default: %(default)s)")
    add("--save-steps", type=int, default=500, help="steps between checkpoints (default: %(default)s)")
    add("--quiet", action="store_true", help="no progress bars")
    add("--results", type=Path, default=Path("runs/snli.jsonl"), help="default: %(default)s")
    add("--picture", type=Path, default=Path("runs/snli_time.png"), help="of time (default: %(default)s)")
    args = parser.parse_args()
    rows = run_all(jobs_of(args), partial(train, args=args), args.results)
    if int(os.environ.get("RANK", 0)) == 0:
        report(rows, args)


if __name__ == "__main__":
    main()
