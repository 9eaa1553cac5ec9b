"""SNLI whose labels are partly wrong: any Hugging Face encoder, a tenth of the pairs an epoch, chosen by the model.

    python recipes/snli.py --data stanfordnlp/snli --model FacebookAI/roberta-base --noise 0.3
    torchrun --nproc-per-node 4 recipes/snli.py --data stanfordnlp/snli --model FacebookAI/roberta-base
    python recipes/snli.py --data DIR --model DIR --pairs 4000 --passes 2 --batch-size 16 --lr 1e-4 --freeze 3 --noise 0.3

`CoresetTrainer` is a `Trainer` with one more argument. --noise makes so many of the training labels wrong, to try it; test
labels stay clean. A run that was killed goes on from the trainer's last checkpoint by --resume.

Measured by `benchmarks/snli.py table --setting cpu --clock cpu`: MiniLM, half of it frozen, as in the third line but in
bf16; 3,000 test pairs, n = 3, mean ± standard deviation; one rate for all, chosen for uniform on validation pairs.
label_confidence scored by passes of its own then; here it watches, which has no table on a fine-tuned encoder yet:

    noise   uniform         CREST           stable          label_conf.     selection: CREST, stable, label_conf.
    0.3     0.607 ± 0.028   0.612 ± 0.007   0.613 ± 0.009   0.620 ± 0.003   27 %, 30 %, 28 %
    0       0.726 ± 0.003   0.699 (n = 1)   0.710 (n = 1)   0.715 (n = 1)

Two passes are too few for a gain that stands out of the spread. Watching for six, on 20,000 pairs with a frozen encoder
(`benchmarks/pretrained.py`, noise 0.3): uniform 0.659 ± 0.004, label_confidence 0.684 ± 0.003, oracle 0.712 ± 0.002.
"""

from __future__ import annotations

import argparse

import torch
from coreset_sampler.integrations.huggingface import CoresetTrainer
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    TrainingArguments,
    set_seed,
)

from coreset_sampler import SphericalGaussian, strategies
from coreset_sampler.selection.testing import inject_label_noise

CLASSES = 3
POOLS = dict(pool_size=4, keep=1, rescore_every=5)  # one of four of its class stays; a scoring pass serves five epochs
SCORED = {
    "crest": strategies.Crest(**POOLS),
    "stable": strategies.Stable(posterior=SphericalGaussian(0.01, "norm", redraw=1), draws=4, **POOLS),
}
STRATEGIES = {"label_confidence": strategies.LabelConfidence(), "uniform": strategies.Uniform(), **SCORED}


def load(data: str, model: str, split: str, max_length: int) -> Dataset:
    """All pairs, tokenised, in one random order; those on which the annotators did not agree are left out."""
    try:
        rows = load_dataset(data, split=split).select_columns(["premise", "hypothesis", "label"])
    except (OSError, ValueError) as error:
        needed = f"--data {data} must have a split {split} with premise, hypothesis and label"
        raise SystemExit(f"{needed}: {error}".splitlines()[0]) from None
    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokens(batch: dict[str, list]) -> dict[str, list]:
        texts = tokenizer(batch["premise"], batch["hypothesis"], truncation=True, max_length=max_length)
        return {**texts, "labels": batch["label"]}

    rows = rows.filter(lambda labels: [label >= 0 for label in labels], input_columns="label", batched=True)
    return rows.shuffle(seed=0).map(tokens, batched=True, remove_columns=rows.column_names)


def load_model(name: str, freeze: int) -> PreTrainedModel:
    """With a new head; the embeddings and the first layers may stay as they are."""
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=CLASSES, ignore_mismatched_sizes=True)
    if freeze:
        model.get_input_embeddings().requires_grad_(False)
        layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        for part in (*layers[:freeze], getattr(model.base_model, "embeddings", torch.nn.Identity())):
            part.requires_grad_(False)
    return model


def trainer_of(args: argparse.Namespace, train_set: Dataset, coreset: dict, **more) -> CoresetTrainer:
    """The trainer; `coreset` says what to choose, and `more` are arguments of the training."""
    set_seed(args.seed)
    arguments = dict(
        output_dir=str(args.output), seed=args.seed, learning_rate=args.lr, weight_decay=0.01, warmup_steps=0.1,
        num_train_epochs=args.passes / coreset["fraction"], per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=100, fp16=torch.cuda.is_available(), save_total_limit=1, logging_steps=20, report_to=[],
        use_cpu=not torch.accelerator.is_available(),  # else torchrun's processes train each for itself there
    )  # fmt: skip
    return CoresetTrainer(
        model=load_model(args.model, args.freeze),
        args=TrainingArguments(**(arguments | more)),
        train_dataset=train_set,
        data_collator=DataCollatorWithPadding(AutoTokenizer.from_pretrained(args.model)),
        coreset=coreset,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, help="folder or hub id of SNLI for datasets.load_dataset")
    add("--model", required=True, help="folder or hub id of an encoder with its tokenizer")
    add("--strategy", choices=STRATEGIES, default="label_confidence", help="default: %(default)s")
    add("--fraction", type=float, default=0.1, help="of the pairs an epoch (default: %(default)s)")
    add("--noise", type=float, default=0.0, help="share of wrong labels to put in (default: 0)")
    add("--pairs", type=int, help="to train on (default: all)")
    add("--passes", type=float, default=3, help="over the pairs; ten epochs of a tenth are one (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="of a process (default: %(default)s)")
    add("--lr", type=float, default=2e-5, help="default: %(default)s")
    add("--max-length", type=int, default=128, help="tokens of a pair (default: %(default)s)")
    add("--freeze", type=int, default=0, help="layers that stay as they are, and the embeddings (default: none)")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--output", default="snli", help="folder of the checkpoints (default: %(default)s)")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args()
    train_set = load(args.data, args.model, "train", args.max_length)
    train_set = train_set.select(range(min(args.pairs or len(train_set), len(train_set))))
    noisy = inject_label_noise(torch.tensor(train_set["labels"][:]), args.noise, seed=args.seed, num_classes=CLASSES)
    train_set = train_set.remove_columns("labels").add_column("labels", noisy.tolist())
    strategy = STRATEGIES[args.strategy]
    if args.strategy in SCORED:  # for half of the run: the head starts at random
        strategy = strategies.WarmUp(strategy, selections=round(0.5 * args.passes / args.fraction))
    trainer = trainer_of(args, train_set, dict(fraction=args.fraction, strategy=strategy))
    trainer.train(resume_from_checkpoint=args.resume)
    found = trainer.predict(load(args.data, args.model, "test", args.max_length))
    if trainer.is_world_process_zero():
        print(f"accuracy {(found.predictions.argmax(1) == found.label_ids).mean():.4f}")
        print(f"selection took {trainer.coreset_sampler.stats['share']:.0%} of the time")


if __name__ == "__main__":
    main()
