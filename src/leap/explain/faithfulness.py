"""Whether what is called important is: strike it out, and see what becomes of the prediction.

Tokens are left out as if they had never been there, and y, the log-probability of what was
predicted, falls by some nats. For each text and method there are two curves over the share of
tokens struck out: the most important first, and the least important first.

    deletion            area under the first: the more, the better
    insertion           area under the second. Striking out the least important is to keep the
                        most important: the less is missing, the better
    gap                 deletion - insertion; 0 for an order at random
    comprehensiveness   the fall without the most important 5, 10, 20 and 50 %, on average
    sufficiency         the fall with nothing but them, on average: the less, the better

(deletion and insertion: Petsiuk et al. 2018, arXiv 1806.07421; the other two: DeYoung et al. 2020,
arXiv 1911.03429). As a check, the same order is found by a model with random parameters, and tried
on the trained one: what explains as well without having learned anything explains the shape of the
model, not the model (Adebayo et al. 2018, arXiv 1810.03292).

Axes: n texts, s shares of tokens struck out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel

from leap.errors import ConfigError
from leap.explain.importance import (
    METHODS,
    importance,
    log_probabilities,
    predicts_next,
    with_random_parameters,
)
from leap.reports.plots import Line, Panel, plot
from leap.reports.progress import Progress, Status, silent
from leap.reports.table import Table

if TYPE_CHECKING:
    import pandas as pd

STRUCK = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 1.0)
"""Shares of tokens that are struck out."""
KEPT = (0.05, 0.1, 0.2, 0.5)
"""Shares by which comprehensiveness and sufficiency are measured."""
RESAMPLES = 2000
BASELINES = ("recency", "random")
"""Methods that do not look at the model."""


@dataclass(frozen=True)
class Case:
    """A text, and what a model predicts for it: its class, or the token after it."""

    input_ids: Int[Tensor, "1 t"]
    target: int


@dataclass(frozen=True)
class Curves:
    """How far the log-probability falls, text by text."""

    most: Float[Tensor, "n s"]
    """With the most important tokens struck out, by the shares in `STRUCK`."""
    least: Float[Tensor, "n s"]
    """With the least important struck out."""

    def measures(self) -> dict[str, Float[Tensor, " n"]]:
        """Every measure of every text, by its name."""
        at = torch.tensor(STRUCK)
        deletion, insertion = torch.trapezoid(self.most, at), torch.trapezoid(self.least, at)
        kept = [STRUCK.index(share) for share in KEPT]
        rest = [len(STRUCK) - 1 - place for place in kept]
        return {
            "deletion": deletion,
            "insertion": insertion,
            "gap": deletion - insertion,
            "comprehensiveness": self.most[:, kept].mean(dim=1),
            "sufficiency": self.least[:, rest].mean(dim=1),
        }


@dataclass(frozen=True)
class Faithfulness:
    """What came out, by method."""

    curves: Mapping[str, Curves]
    unlearned: Mapping[str, Curves]
    """By the order that the method finds in a model with random parameters."""
    agreement: Mapping[str, Float[Tensor, " n"]]
    """Rank correlation of both orders."""

    @property
    def n_texts(self) -> int:
        """How many texts were tried."""
        return len(next(iter(self.curves.values())).most)

    def best(self) -> str:
        """The method with the largest gap, among those that look at the model."""
        looking = [name for name in self.curves if name not in BASELINES] or list(self.curves)
        return max(looking, key=lambda name: float(self.curves[name].measures()["gap"].mean()))

    def table(self) -> "pd.DataFrame":
        """A row per method and measure: the mean over texts and its 95 % interval."""
        import pandas as pd

        return pd.DataFrame(self.records())

    def records(self) -> list[dict[str, Any]]:
        """The rows of the table."""
        rows = []
        for method, curves in self.curves.items():
            measures = curves.measures()
            if method in self.unlearned:
                measures["gap, random parameters"] = self.unlearned[method].measures()["gap"]
                measures["rank correlation"] = self.agreement[method]
            for measure, values in measures.items():
                mean, low, high = interval(values)
                row = {"method": method, "measure": measure, "mean": mean, "low": low, "high": high}
                rows.append(row)
        return rows


def interval(values: Float[Tensor, " n"], seed: int = 0) -> tuple[float, float, float]:
    """The mean, and its 95 % interval by bootstrap over texts."""
    values = values.double()
    draws = torch.randint(
        len(values), (RESAMPLES, len(values)), generator=torch.Generator().manual_seed(seed)
    )
    means = values[draws].mean(dim=1)
    low, high = torch.quantile(means, means.new_tensor([0.025, 0.975])).tolist()
    return float(values.mean()), low, high


@torch.no_grad()
def strike(
    model: PreTrainedModel, case: Case, order: Int[Tensor, " n"]
) -> tuple[Float[Tensor, " s"], Float[Tensor, " s"]]:
    """Strike tokens out, first to last of an order and last to first: how far y falls.

    Args:
        model: what predicts.
        case: what it predicts.
        order: tokens to strike out. Of a language model the last token is none of them: it is what
            predicts.
    """
    counts = [round(share * len(order)) for share in STRUCK]
    masks = case.input_ids.new_ones(2 * len(counts), case.input_ids.shape[1])
    for row, count in enumerate(counts):
        masks[row, order[:count]] = 0
        masks[len(counts) + row, order[len(order) - count :]] = 0
    ids = case.input_ids.expand(len(masks), -1)
    y = log_probabilities(model, input_ids=ids, attention_mask=masks)[:, case.target]
    most, least = (y[0] - y).cpu().chunk(2)
    return most, least


def strikable(model: PreTrainedModel, case: Case) -> int:
    """How many of the first tokens can be struck out."""
    return case.input_ids.shape[1] - int(predicts_next(model))


def measure(
    model: PreTrainedModel,
    cases: Sequence[Case],
    methods: Sequence[str],
    progress: Progress = silent,
) -> Faithfulness:
    """Try methods on texts.

    Args:
        model: a language model or a classifier, not in training.
        cases: texts, and what is predicted.
        methods: their names in `leap.explain.importance.METHODS`.
        progress: told how far it is.
    """
    check_methods(methods)
    if not cases:
        raise ConfigError("there are no texts to measure on; give one or more")
    unlearned = with_random_parameters(model)
    found: dict[tuple[str, bool], list[tuple[Tensor, Tensor]]] = {}
    agreement: dict[str, list[Tensor]] = {}
    for i, case in enumerate(cases):
        n = strikable(model, case)
        for method in methods:
            scores = importance(model, case.input_ids, case.target, method)[:n].cpu()
            order = scores.argsort(descending=True, stable=True)
            found.setdefault((method, True), []).append(strike(model, case, order))
            if method in BASELINES:
                continue
            others = importance(unlearned, case.input_ids, case.target, method)[:n].cpu()
            order = others.argsort(descending=True, stable=True)
            found.setdefault((method, False), []).append(strike(model, case, order))
            agreement.setdefault(method, []).append(rank_correlation(scores, others))
        progress(Status(i + 1, len(cases), doing="striking out"))
    curves = {
        key: Curves(*(torch.stack(each) for each in zip(*pairs, strict=True)))
        for key, pairs in found.items()
    }
    return Faithfulness(
        {method: each for (method, learned), each in curves.items() if learned},
        {method: each for (method, learned), each in curves.items() if not learned},
        {method: torch.stack(each) for method, each in agreement.items()},
    )


def check_methods(methods: Sequence[str]) -> None:
    """Refuse what is no method."""
    for method in methods:
        if method not in METHODS:
            raise ConfigError(f"method={method!r} is not known; there are {', '.join(METHODS)}")
    if not methods or len(set(methods)) < len(methods):
        raise ConfigError(f"methods={' '.join(methods)}: give one or more, none of them twice")


def rank_correlation(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """Spearman's; 0 where there are fewer than 2 tokens."""
    if len(a) < 2:
        return torch.zeros(())
    ranks = torch.stack([x.argsort().argsort().float() for x in (a, b)])
    return torch.corrcoef(ranks)[0, 1]


COLUMNS = (
    "gap",
    "deletion",
    "insertion",
    "comprehensiveness",
    "sufficiency",
    "gap, random parameters",
    "rank correlation",
)
"""Measures in a table."""


def report_table(found: Faithfulness, title: str = "") -> Table:
    """A row per method, the largest gap first, with 95 % intervals."""
    cells: dict[str, dict[str, str]] = {}
    gaps: dict[str, float] = {}
    for row in found.records():
        half = (row["high"] - row["low"]) / 2
        cells.setdefault(row["method"], {})[row["measure"]] = f"{row['mean']:.2f} ± {half:.2f}"
        if row["measure"] == "gap":
            gaps[row["method"]] = row["mean"]
    rows = [
        [method, *(cells[method].get(column, "-") for column in COLUMNS)]
        for method in sorted(cells, key=lambda method: -gaps[method])
    ]
    return Table(title, ["method", *COLUMNS], rows)


def curves_figure(found: Faithfulness, title: str) -> Figure:
    """How far the prediction falls, by the share of tokens struck out."""

    def lines(which: str) -> list[Line]:
        means = {name: getattr(each, which).mean(dim=0) for name, each in found.curves.items()}
        return [
            Line(name.replace("-", " "), list(zip(STRUCK, mean.tolist(), strict=True)))
            for name, mean in means.items()
        ]

    x, y = "share of tokens struck out", "fall of the log-probability (nats)"
    return plot(
        [
            Panel(x=x, y=y, lines=lines("most"), title="most important first: high is good"),
            Panel(x=x, y=y, lines=lines("least"), title="least important first: low is good"),
        ],
        title,
    )
