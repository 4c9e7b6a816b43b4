"""Train a small classifier of IMDb's reviews, in subwords, for `leap explain` to look at.

    python benchmarks/explain/imdb.py ATTENTION OUTPUT

ATTENTION is a mechanism with options after colons, as leapformer:travelled. OUTPUT is a run folder
that has the tokenizer beside the model; the reviews are those in LEAP_DATA/imdb.
"""

import json
import lzma
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from leap.models import LeapformerConfig, LeapformerForSequenceClassification
from leap.tasks.files import data_folder
from leap.tasks.lm.tokenizer import train_tokenizer
from leap.tasks.lra.evaluate import ACCURACY, score
from leap.tasks.mechanism import parse_short_form
from leap.training import Recipe, RunFolder, Work, save_weights, train_run

VOCABULARY, LENGTH = 4096, 128
RECIPE = Recipe(steps=500, batch=32, learning_rate=2e-3, warmup=0.1, evaluate_every=100)
TEXTS_FOR_TOKENIZER, VALID, TEST = 4000, 512, 2000


class Reviews(Dataset):
    """The first tokens of each review, and its class."""

    def __init__(self, reviews, tokenizer):
        self.items = [
            {
                "input_ids": tokenizer.encode(review["text"]).long()[:LENGTH],
                "labels": torch.tensor(review["label"]),
            }
            for review in reviews
        ]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def collate(items):
    """A batch, its pads marked."""
    ids = [item["input_ids"] for item in items]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
        "labels": torch.stack([item["labels"] for item in items]),
    }


def read(part):
    """The reviews of a part, in an order that mixes the classes."""
    path = data_folder() / "imdb" / f"{part}.jsonl.xz"
    with lzma.open(path, "rt", encoding="utf8") as lines:
        reviews = [json.loads(line) for line in lines]
    order = torch.randperm(len(reviews), generator=torch.Generator().manual_seed(0))
    return [reviews[i] for i in order.tolist()]


def work(attention):
    """What the run learns."""
    train, test = read("train"), read("test")
    tokenizer = train_tokenizer((x["text"] for x in train[:TEXTS_FOR_TOKENIZER]), VOCABULARY)
    data = Reviews(train[VALID:], tokenizer)
    name, changes = parse_short_form(attention)

    def build():
        return LeapformerForSequenceClassification(
            LeapformerConfig(
                attention=name,
                vocab_size=VOCABULARY,
                hidden_size=128,
                n_layer=2,
                n_head=4,
                n_positions=LENGTH,
                num_labels=2,
                **changes,
            )
        )

    def results(model, fitted):
        tested = score(model, Reviews(test[:TEST], tokenizer), collate, 64)
        return {
            **asdict(fitted),
            "accuracy": tested.accuracy,
            "parameters": model.num_parameters(),
            "attention": attention,
        }

    def save(model, path):
        save_weights(model, path)
        tokenizer.save(path)

    return Work(
        name=attention,
        title="IMDb",
        digests={"reviews": str(len(train))},
        build=build,
        train=data,
        held_out=Reviews(train[:VALID], tokenizer),
        recipe=RECIPE,
        results=results,
        save=save,
        unit="nats per review",
        measure=ACCURACY,
        options={"collate": collate},
    )


def main(attention, output):
    """Train, or tell what was trained."""
    settings = {"task": "imdb", "attention": attention, "max_length": LENGTH, **asdict(RECIPE)}
    folder = RunFolder(output, settings)
    found = train_run(folder, {"accuracy": float}, RECIPE, lambda: work(attention), tell)
    sys.stdout.write(f"{attention}: accuracy {found['accuracy']:.3f} on {TEST} test reviews\n")


def tell(status):
    """A line for what there is to know, and for each evaluation."""
    if status.note or status.step % RECIPE.evaluate_every == 0:
        sys.stderr.write(f"{status.step} {dict(status.numbers)} {status.note or ''}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
