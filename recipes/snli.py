"""SNLI with wrong labels: any Hugging Face encoder, a tenth of the pairs an epoch, by uniform, CREST or stable sampling.

    python recipes/snli.py run --data stanfordnlp/snli --model FacebookAI/roberta-base --strategy stable --noise 0.3
    torchrun --nproc-per-node 4 recipes/snli.py run --data stanfordnlp/snli --model FacebookAI/roberta-base
    python recipes/snli.py table --data DIR --model DIR --setting cpu     # what was measured, MiniLM on one core
    python recipes/snli.py time --data DIR --model DIR --setting cpu      # accuracy against time, with full data

`CoresetTrainer` is a `Trainer` with one more argument. Noise goes into the LayerNorm weights and biases for stable's look
(the paper's way). Labels are replaced before anything reads them, so that training and selection both see the wrong
ones; the test labels stay clean. Finished runs are kept in --results, line by line, and a run in progress as the trainer's
checkpoint beside it: what is killed goes on where it was (its seconds are then those since it went on).

Measured: nothing but that it runs. The table of the CPU setting (n = 3) has still to be made, on a machine with a free core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from coreset_sampler.integrations.huggingface import CoresetTrainer
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from coreset_sampler import SphericalGaussian, strategies
from coreset_sampler.picture import time_to_accuracy

FRACTION, CLASSES = 0.1, 3
SETTINGS: dict[str, dict[str, Any]] = {
    # Pools of 128 a class and a tenth of the data are the paper's; rate, batch and epochs are ours.
    "paper": dict(
        n=None, n_test=None, epochs=30, full_epochs=3, batch_size=32, lr=2e-5, max_length=128, freeze=0,
        pools=dict(pool_size=384, keep=96), scale=0.01, noises=(0.0, 0.1, 0.3, 0.5), lengths=(5, 10, 20),
    ),
    # Embeddings and the lower half of the layers stay as they are: twice as many examples a second.
    "cpu": dict(
        n=4_000, n_test=1_000, epochs=6, full_epochs=1, batch_size=16, lr=2e-4, max_length=40, freeze=3,
        pools=dict(pool_size=48, keep=24), scale=0.01, noises=(0.0, 0.3), lengths=(3, 6),
    ),
}  # fmt: skip
FIRST = int(os.environ.get("RANK", 0)) == 0  # among the processes of torchrun
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
KEYS = ("setting", "noise", "strategy", "epochs", "seed")


def strategy_of(name: str, setting: dict[str, Any]):
    posterior = SphericalGaussian(setting["scale"], "norm", redraw=1)
    return {
        "uniform": strategies.uniform(),
        "full": strategies.uniform(),
        "crest": strategies.crest(**setting["pools"]),
        "stable": strategies.stable(posterior=posterior, draws=4, **setting["pools"]),
    }[name]


def with_wrong_labels(labels: torch.Tensor, noise: float, generator: torch.Generator) -> torch.Tensor:
    """Symmetric noise: `floor(noise * n)` labels replaced, uniformly among the other classes."""
    chosen = torch.randperm(len(labels), generator=generator)[: int(noise * len(labels))]
    offsets = torch.randint(1, CLASSES, (len(chosen),), generator=generator)
    return labels.scatter(0, chosen, (labels[chosen] + offsets) % CLASSES)


def pairs(data: str, split: str, n: int | None, tokenizer, max_length: int) -> Dataset:
    """`n` random pairs, tokenised, with a column `labels`; those on which the annotators did not agree are left out."""
    rows = load_dataset(data, split=split)
    missing = {"premise", "hypothesis", "label"} - set(rows.column_names)
    if missing:
        raise SystemExit(f"--data must have columns premise, hypothesis and label; {data} lacks {sorted(missing)}")
    rows = rows.filter(lambda labels: [label >= 0 for label in labels], input_columns="label", batched=True)
    rows = rows.shuffle(seed=0).select(range(min(n or len(rows), len(rows))))

    def tokens(batch: dict[str, list]) -> dict[str, list]:
        texts = tokenizer(batch["premise"], batch["hypothesis"], truncation=True, max_length=max_length)
        return {**texts, "labels": batch["label"], "length": [len(ids) for ids in texts["input_ids"]]}

    return rows.map(tokens, batched=True, remove_columns=rows.column_names)


def model_of(name: str, freeze: int):
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=CLASSES, ignore_mismatched_sizes=True)
    if freeze:
        model.get_input_embeddings().requires_grad_(False)
        layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        for part in (*layers[:freeze], getattr(model.base_model, "embeddings", torch.nn.Identity())):
            part.requires_grad_(False)
    return model


def train(data: tuple[Dataset, Dataset], tokenizer, job: dict, args: argparse.Namespace) -> dict[str, float]:
    """One run: test accuracy, seconds without the test, selection's share of them, share of clean labels at the end."""
    setting, (train_set, test_set) = SETTINGS[job["setting"]], data
    clean = torch.tensor(train_set["labels"][:])
    noisy = with_wrong_labels(clean, job["noise"], torch.Generator().manual_seed(job["seed"]))
    train_set = train_set.remove_columns(["labels", "length"]).add_column("labels", noisy.tolist())
    folder = args.log.parent / ("snli-" + "-".join(str(job[key]) for key in KEYS))
    set_seed(job["seed"])
    trainer = CoresetTrainer(
        model=model_of(args.model, setting["freeze"]),
        args=TrainingArguments(
            output_dir=str(folder), seed=job["seed"], num_train_epochs=job["epochs"], learning_rate=setting["lr"],
            per_device_train_batch_size=setting["batch_size"], per_device_eval_batch_size=100, weight_decay=0.01,
            warmup_steps=0.1, lr_scheduler_type="linear", fp16=torch.cuda.is_available(), save_steps=args.save_steps,
            save_total_limit=1, logging_steps=20, report_to=[], disable_tqdm=args.quiet,
        ),
        train_dataset=train_set,
        data_collator=DataCollatorWithPadding(tokenizer),
        coreset=dict(
            fraction=1.0 if job["strategy"] == "full" else FRACTION,
            strategy=strategy_of(job["strategy"], setting),
            reselect_every=1,
        ),
    )  # fmt: skip
    began = {kind: clock() for kind, clock in CLOCKS.items()}
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.exists() else None)
    spent = {kind: clock() - began[kind] for kind, clock in CLOCKS.items()}
    sampler = trainer.coreset_sampler
    coreset = sampler.coreset
    found = trainer.predict(test_set.sort("length").remove_columns("length"))
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "accuracy": float((found.predictions.argmax(1) == found.label_ids).mean()),
        **spent,
        "share": sampler.stats["share"],
        "clean": float((coreset.weights * (noisy == clean)[coreset.indices]).sum() / coreset.weights.sum()),
    }


def run_all(jobs: list[dict], args: argparse.Namespace) -> list[dict]:
    """All jobs, those in the log already taken from there; each new result is written down at once."""
    key = lambda row: json.dumps([row[k] for k in KEYS])  # noqa: E731
    lines = args.log.read_text().splitlines() if args.log.exists() else []
    done = {key(row): row for row in map(json.loads, lines)}
    todo = [job for job in jobs if key(job) not in done]
    if todo:
        setting = SETTINGS[args.setting]
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        sizes = {"train": setting["n"], "test": setting["n_test"]}
        data = tuple(pairs(args.data, split, n, tokenizer, setting["max_length"]) for split, n in sizes.items())
    for count, job in enumerate(todo, 1):
        row = {**job, **train(data, tokenizer, job, args)}
        done[key(row)] = row
        if FIRST:
            with args.log.open("a") as out:
                print(json.dumps(row), file=out)
            print(f"{count}/{len(todo)} runs: {json.dumps(row)}", flush=True)
    return [done[key(job)] for job in jobs]


def jobs_of(args: argparse.Namespace) -> list[dict]:
    setting = SETTINGS[args.setting]
    noises, names, seeds = args.noise or setting["noises"], args.strategy or ["uniform", "crest", "stable"], args.seeds
    if args.command == "run":
        noises, names, seeds = args.noise or [0.0], args.strategy or ["stable"], 1
    if args.command == "time":
        noises, names = args.noise or [0.0], args.strategy or ["full", "uniform", "stable"]

    def epochs(name: str) -> list[int]:
        whole = args.epochs or (setting["full_epochs"] if name == "full" else setting["epochs"])
        return [*setting["lengths"], whole] if args.command == "time" and name != "full" else [whole]

    cells = [(noise, name, length) for noise in noises for name in names for length in dict.fromkeys(epochs(name))]
    return [
        dict(setting=args.setting, noise=noise, strategy=name, epochs=length, seed=args.seed + k)
        for k in range(seeds) for noise, name, length in cells
    ]  # fmt: skip


def report(rows: list[dict], args: argparse.Namespace) -> None:
    cells: dict[tuple, list[dict]] = {}
    for row in rows:
        cells.setdefault((row["noise"], row["strategy"], row["epochs"]), []).append(row)
    print("| noise | strategy | epochs | accuracy | seconds | selection | clean labels |\n" + "|---" * 7 + "|")
    curves: dict[float, dict[str, list[tuple[float, float]]]] = {}
    for (noise, name, epochs), found in cells.items():
        mean = {key: statistics.mean(row[key] for row in found) for key in ("accuracy", "share", "clean", *CLOCKS)}
        deviation = statistics.stdev(row["accuracy"] for row in found) if len(found) > 1 else 0.0
        costs = f"{mean[args.clock]:.0f} | {mean['share']:.0%} | {mean['clean']:.2f}"
        print(f"| {noise} | {name} | {epochs} | {mean['accuracy']:.3f} ± {deviation:.3f} | {costs} |")
        curves.setdefault(noise, {}).setdefault(name, []).append((mean[args.clock], mean["accuracy"]))
    print(f"\nn = {len(found)} seeds, mean ± standard deviation; {args.clock} seconds")
    if args.command == "time":
        for noise, lines in curves.items():
            picture = args.picture.with_stem(f"{args.picture.stem}-{noise:g}")
            print(*time_to_accuracy(lines, picture, title=f"SNLI, {noise:.0%} of the labels wrong"), sep="\n")
            print(f"picture: {picture}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "table", "time"])
    parser.add_argument("--data", required=True, help="folder or hub id of SNLI for datasets.load_dataset")
    parser.add_argument("--model", required=True, help="folder or hub id of an encoder with its tokenizer")
    parser.add_argument("--setting", choices=SETTINGS, default="paper", help="default: %(default)s")
    parser.add_argument("--strategy", choices=["uniform", "crest", "stable", "full"], nargs="+", help="run: stable")
    parser.add_argument(
        "--noise", type=float, nargs="+", help="shares of wrong labels; run, time: 0; table: the setting's"
    )
    parser.add_argument(
        "--epochs", type=int, help="each a tenth of the pairs, with full all of them; default: the setting's"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first one (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="for table and time (default: %(default)s)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="to report; cpu where others use the machine")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: %(default)s)")
    parser.add_argument("--save-steps", type=int, default=500, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument(
        "--results", dest="log", type=Path, default=Path("runs/snli.jsonl"), help="results (default: %(default)s)"
    )
    parser.add_argument(
        "--picture", type=Path, default=Path("runs/snli_time.png"), help="of time (default: %(default)s)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.log.parent.mkdir(parents=True, exist_ok=True)
    rows = run_all(jobs_of(args), args)
    if FIRST:
        report(rows, args)


if __name__ == "__main__":
    main()
