"""Every command of `leap`: its settings, what runs it, and examples to end its help with.

Settings and what runs them are named here and imported only when they are asked for: they need
torch, which is no use to who asks what there is.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from typing import Any

TASKS = {
    "app": "A page in the browser: write, explain, interpret, compare.",
    "backends": "What can compute the ops here, or why it cannot.",
    "bench": "Speed and memory: attentions, training, decoding, streams, server.",
    "explain": "What predictions rest on, where tokens stand.",
    "export": "Models as ONNX graphs, to run without torch.",
    "lm": "Language models: train, measure, write.",
    "lra": "Long Range Arena: data, training, tables, speed.",
    "serve": "A server for many users: completions, translation streams.",
    "simul": "Simultaneous translation: data, training, scores, streams.",
}


@dataclass(frozen=True)
class Verb:
    """One command."""

    config: str
    """Where its settings are: a dataclass, its fields the flags, its docstrings the help."""
    run: str
    """Where the function is that does it."""
    examples: Sequence[tuple[str, str]]
    """Command lines, without the leading `leap`, and what they do."""

    @property
    def summary(self) -> str:
        """The first line of the help, read from the source."""
        module, _, name = self.config.rpartition(".")
        spec = find_spec(module)
        assert spec is not None and isinstance(spec.loader, SourceFileLoader)
        parsed = ast.parse(spec.loader.get_source(module) or "")
        found = (x for x in parsed.body if isinstance(x, ast.ClassDef) and x.name == name)
        return (ast.get_docstring(next(found)) or "").partition("\n")[0]

    def load_config(self) -> type[Any]:
        """The dataclass."""
        return _load(self.config)

    def load_run(self) -> Callable[[Any], None]:
        """The function."""
        return _load(self.run)


def _load(place: str) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(import_module(module), name)


COMMANDS = {
    "app": Verb(
        config="leap.app.config.AppConfig",
        run="leap.cli.app.app",
        examples=[
            ("app --run runs/play", "at http://127.0.0.1:7860"),
            ("app --run runs/play runs/captions exported/play", "several models, to choose from"),
            ("app --run runs/play --benchmarks benchmarks --port 0", "at a free port"),
        ],
    ),
    "export": Verb(
        config="leap.export.files.ExportConfig",
        run="leap.cli.export.export",
        examples=[
            ("export --run runs/play --output exported/play", "checked against torch"),
            ("export --run runs/play --output exported/play --int8", "a quarter of the size"),
        ],
    ),
    "serve": Verb(
        config="leap.serve.config.ServeConfig",
        run="leap.cli.serve.serve",
        examples=[
            ("serve --run runs/play", "at http://127.0.0.1:8000/v1, for the openai package"),
            ("serve --run runs/play --port 9000 --states kept", "with states saved to a folder"),
            ("serve --run runs/captions --policy wait-5", "translation streams"),
        ],
    ),
}
"""Commands of one word."""

VERBS = {
    "bench": {
        "attention": Verb(
            config="leap.bench.attention.BenchConfig",
            run="leap.cli.bench.attention",
            examples=[
                ("bench attention", "everything, in about ten minutes"),
                ("bench attention --lengths 1024 2048", "two lengths, in seconds"),
                (
                    "bench attention --mechanisms leapformer leap-w64",
                    "these two and their baseline",
                ),
                ("bench attention --lengths 32768 65536 --windows", "longer, LEAP without windows"),
                ("bench attention --backend torch", "without the native library"),
            ],
        ),
        "decode": Verb(
            config="leap.bench.decode.DecodeConfig",
            run="leap.cli.bench.decode",
            examples=[
                ("bench decode", "contexts up to 100,000, in a minute"),
                ("bench decode --contexts 256 4096", "two contexts, in seconds"),
                ("bench decode --models leapformer cosformer linear", "these, and no GPT-2"),
                ("bench decode --preset 350m --contexts 1024", "at the size of GPT-2 medium"),
            ],
        ),
        "runtime": Verb(
            config="leap.bench.runtime.RuntimeConfig",
            run="leap.cli.bench.runtime",
            examples=[
                ("bench runtime", "torch, onnxruntime and int8, in minutes"),
                ("bench runtime --models leapformer --preset tiny", "a small model, in seconds"),
            ],
        ),
        "serve": Verb(
            config="leap.bench.serve.ServeBenchConfig",
            run="leap.cli.bench.serve",
            examples=[
                ("bench serve", "1, 8 and 50 users of three models, in minutes"),
                ("bench serve --users 4 --preset tiny", "a small model, in seconds"),
                ("bench serve --models leapformer --soak 1800", "and half an hour of users"),
            ],
        ),
        "train": Verb(
            config="leap.bench.train.TrainBenchConfig",
            run="leap.cli.bench.train",
            examples=[
                ("bench train", "2 texts of 512 and of 2,048 tokens, in minutes"),
                ("bench train --lengths 4096 --batch 1", "one longer text"),
                ("bench train --models leapformer softmax gpt2", "these three"),
            ],
        ),
        "stream": Verb(
            config="leap.bench.stream.StreamBenchConfig",
            run="leap.cli.bench.stream",
            examples=[
                ("bench stream", "after up to 100,000 subwords of text and an hour of speech"),
                ("bench stream --lengths 100 1000 --sound", "two lengths of text, in seconds"),
            ],
        ),
    },
    "explain": {
        "text": Verb(
            config="leap.tasks.explain.text.TextConfig",
            run="leap.cli.explain.text",
            examples=[
                ("explain text --run runs/play 'Enter the'", "what the next token rests on"),
                ("explain text --run runs/play 'Enter the king' --token 2", "or an earlier one"),
                ("explain text --run runs/play 'Enter the' --html why.html", "as a page"),
            ],
        ),
        "proportions": Verb(
            config="leap.tasks.explain.proportions.ProportionsConfig",
            run="leap.cli.explain.proportions",
            examples=[
                ("explain proportions --run runs/play", "places, gates and focus, by layer"),
                ("explain proportions --run runs/play --quiet 40", "with a long quiet stretch"),
                ("explain proportions --run runs/lra/text/leapformer/seed-0", "of a classifier"),
            ],
        ),
        "faithfulness": Verb(
            config="leap.tasks.explain.faithfulness.FaithfulnessConfig",
            run="leap.cli.explain.faithfulness",
            examples=[
                ("explain faithfulness --run runs/play", "every method on 200 texts"),
                ("explain faithfulness --run runs/play --methods weights random", "two methods"),
            ],
        ),
    },
    "lm": {
        "train": Verb(
            config="leap.tasks.lm.train.TrainConfig",
            run="leap.cli.lm.train",
            examples=[
                ("lm train", "learn from the Python library of this machine"),
                ("lm train --data play.txt --output runs/play", "minutes on a CPU"),
                (
                    "lm train --data play.txt --attention leap --output runs/leap",
                    "the same, with LEAP",
                ),
                (
                    "lm train --data wikitext-2 --train-tokenizer 8192 --epochs 3 --length 1024",
                    "with a tokenizer of its own",
                ),
            ],
        ),
        "eval": Verb(
            config="leap.tasks.lm.evaluate.EvalConfig",
            run="leap.cli.lm.evaluate",
            examples=[
                ("lm eval --run runs/play --data play.txt", "on its held-out text"),
                ("lm eval --run runs/play --data play.txt --stride 64", "windows that overlap"),
                ("lm eval --run runs/play --data play.txt --stateful", "no window at all"),
            ],
        ),
        "generate": Verb(
            config="leap.tasks.lm.writing.GenerateConfig",
            run="leap.cli.write.generate",
            examples=[
                ("lm generate --run runs/play --prompt Enter", "200 tokens more"),
                ("lm generate --run runs/play --state tale.safetensors", "begin a tale, or go on"),
                ("lm generate --run runs/play --temperature 0", "always the likeliest token"),
            ],
        ),
        "compare": Verb(
            config="leap.tasks.lm.compare.CompareConfig",
            run="leap.cli.lm.compare",
            examples=[
                ("lm compare", "several models on WikiText-2, hours on a CPU"),
                ("lm compare --models gpt2 leap:windowed --steps 200", "two of them, briefly"),
                (
                    "lm compare --seeds 0 1 2 --recorded results.json",
                    "with runs that another machine has made",
                ),
                (
                    "lm compare --tokenizer spiece.model --train-tokenizer None --length 2048 "
                    "--batch 2 --epochs 20",
                    "LEAP's own experiment in full, given T5's tokenizer",
                ),
            ],
        ),
        "demo": Verb(
            config="leap.tasks.lm.demo.DemoConfig",
            run="leap.cli.lm.demo",
            examples=[("lm demo", "five minutes on two cores; ends in runs/demo/report.html")],
        ),
        "recall": Verb(
            config="leap.tasks.lm.recall.RecallConfig",
            run="leap.cli.lm.recall",
            examples=[
                ("lm recall", "ask LEAP, LeaPformer and softmax over up to 65,536 tokens"),
                ("lm recall --models leap:none --distances 64 1024", "one model, two distances"),
            ],
        ),
        "mqar": Verb(
            config="leap.tasks.lm.mqar.MqarConfig",
            run="leap.cli.lm.mqar",
            examples=[
                ("lm mqar", "four models of three widths, an hour or two on a CPU"),
                (
                    "lm mqar --models leapformer:travelled:gate:conv4 --widths 64 --seeds 0 1 2",
                    "one model and width, three times",
                ),
                (
                    "lm mqar --widths 64 --vocabulary 1024 --output runs/mqar-1024",
                    "smaller vocabulary, each step at half the cost",
                ),
            ],
        ),
        "presets": Verb(
            config="leap.cli.lm.PresetsConfig",
            run="leap.cli.lm.presets",
            examples=[("lm presets", "names to give as --preset")],
        ),
    },
    "lra": {
        "prepare": Verb(
            config="leap.tasks.lra.prepare.PrepareConfig",
            run="leap.cli.lra.prepare",
            examples=[
                ("lra prepare", "all that can be made from what is at hand"),
                ("lra prepare --task listops", "100,000 expressions, in less than a minute"),
                ("lra prepare --task listops --difficulty easy", "of up to 127 tokens"),
                ("lra prepare --task pathfinder --difficulty easy", "short curves"),
                ("lra prepare --task text --source aclImdb", "IMDb's reviews, byte by byte"),
                ("lra prepare --task image --source cifar-10-binary.tar.gz", "CIFAR-10 in grey"),
                ("lra prepare --task listops --train 2000 --output small", "fewer to train on"),
            ],
        ),
        "train": Verb(
            config="leap.tasks.lra.train.TrainConfig",
            run="leap.cli.lra.train",
            examples=[
                ("lra train --task listops", "as in the paper: 20,000 steps, days on a CPU"),
                ("lra train --task image --attention softmax leapformer --budget 60", "in an hour"),
                (
                    "lra train --task text --steps 500 --batch 8 --seeds 0 1 2",
                    "briefly, three times",
                ),
                ("lra train --task listops --attention all --budget 600", "every attention"),
                ("lra train --task listops --start runs/lra/listops-easy", "from short lists"),
            ],
        ),
        "report": Verb(
            config="leap.tasks.lra.report.ReportConfig",
            run="leap.cli.lra.report",
            examples=[
                ("lra report", "of all runs in runs/lra"),
                (
                    "lra report --runs runs/mine --output benchmarks/lra",
                    "of others, kept elsewhere",
                ),
            ],
        ),
        "speed": Verb(
            config="leap.bench.lra.SpeedConfig",
            run="leap.cli.lra.speed",
            examples=[
                ("lra speed", "every attention on every task, one example at a time"),
                ("lra speed --tasks text --batch 4", "four texts of 4,000 bytes"),
                ("lra speed --attention leapformer bigbird --tasks text", "these, and softmax"),
            ],
        ),
        "ablate": Verb(
            config="leap.tasks.lra.ablate.AblateConfig",
            run="leap.cli.lra.ablate",
            examples=[
                ("lra ablate --task image --budget 120", "nine models, in two hours"),
                ("lra ablate --sizes 0.2 1.5 --sharing shared --steps 500", "four models, briefly"),
                ("lra ablate --proportion travelled --steps 500", "steps: by nets, constant, none"),
            ],
        ),
        "overhead": Verb(
            config="leap.bench.overhead.OverheadConfig",
            run="leap.cli.lra.overhead",
            examples=[
                ("lra overhead", "lengths to 8,192 and widths to 512, in minutes"),
                ("lra overhead --lengths 1024 --widths 64 --hidden 8", "in seconds"),
            ],
        ),
    },
    "simul": {
        "prepare": Verb(
            config="leap.tasks.simul.prepare.PrepareConfig",
            run="leap.cli.simul.prepare",
            examples=[
                ("simul prepare", "numbers in words: a toy that needs no file"),
                ("simul prepare --corpus multi30k --output runs/multi30k", "captions, as text"),
                (
                    "simul prepare --corpus tatoeba --target es --output runs/everyday",
                    "everyday sentences, English to Spanish",
                ),
                (
                    "simul prepare --corpus multi30k --speak --limit 10000 "
                    "--tests test_2016_flickr --output runs/spoken",
                    "captions, spoken by espeak-ng",
                ),
                (
                    "simul prepare --corpus text --data talks --source en --target fr",
                    "of talks/train.en, talks/train.fr and so on",
                ),
                ("simul prepare --corpus must-c --data MUST-C --output runs/must-c", "recordings"),
            ],
        ),
        "train": Verb(
            config="leap.tasks.simul.train.TrainConfig",
            run="leap.cli.simul.train",
            examples=[
                ("simul train", "learn what leap simul prepare has made; minutes for the numbers"),
                (
                    "simul train --data runs/multi30k --n-layer 3 --encoder-layers 3 --dropout 0.2 "
                    "--tokens 4096 --epochs 20 --feature exp --position-embedding alibi "
                    "--cross-attention softmax --cross-window 64 --output runs/captions",
                    "captions, as in benchmarks/multi30k; less than an hour",
                ),
                (
                    "simul train --data runs/multi30k --attention softmax --output runs/softmax",
                    "with another attention",
                ),
            ],
        ),
        "eval": Verb(
            config="leap.tasks.simul.evaluate.EvalConfig",
            run="leap.cli.simul.evaluate",
            examples=[
                ("simul eval", "quality and latency of what leap simul train has made"),
                ("simul eval --waits 3 --policies agree-2 align-2", "other policies beside wait-3"),
                ("simul eval --engine simuleval --waits 3", "the same scores, by SimulEval"),
                ("simul eval --batch 1", "with computation-aware latency of speech"),
                (
                    "simul eval --long-form all --reset 200",
                    "all in one stream, with and without resets",
                ),
                ("simul eval --omnisteval", "with OmniSTEval's figures beside ours"),
            ],
        ),
        "report": Verb(
            config="leap.tasks.simul.report.ReportConfig",
            run="leap.cli.simul.report",
            examples=[
                (
                    "simul report --evals runs/leapformer-eval runs/softmax-eval",
                    "quality and latency of two models beside each other",
                ),
            ],
        ),
        "stream": Verb(
            config="leap.tasks.simul.live.StreamConfig",
            run="leap.cli.stream.stream",
            examples=[
                (
                    "simul stream --policy wait-5",
                    "type, or pipe text in; words appear as they can; English to German at once",
                ),
                (
                    "simul stream --no-lag < talk.en > talk.de",
                    "the translation alone, line by line",
                ),
                (
                    "simul stream --run runs/spoken --sound talk.wav --real-time",
                    "as if it were spoken",
                ),
                ("simul stream --run runs/spoken --microphone", "what you say, until Ctrl-C"),
            ],
        ),
    },
}
