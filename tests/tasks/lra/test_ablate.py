"""Promises of `leap lra ablate`."""

import json

import pytest
import torch

from leap.errors import ConfigError
from leap.models import LeapformerForSequenceClassification
from leap.reports.table import markdown
from leap.tasks.lra import ablate as ablating
from leap.tasks.lra.ablate import (
    AblateConfig,
    ablate,
    added_parameters,
    hidden_units,
    proportion_spread,
    table,
    variants,
)
from leap.tasks.lra.data import TASKS
from leap.tasks.lra.model import encoder_config


def model(**changes):
    return encoder_config(TASKS["text"], "leapformer", **changes)


@pytest.mark.parametrize(("hidden", "added"), [(1, 132), (8, 1_092), (16, 2_180)])
def test_parameters_of_the_nets_are_as_counted_in_models(hidden, added):
    assert added_parameters(model(), hidden, own=False) == added
    for own in (False, True):
        built = LeapformerForSequenceClassification(
            model(proportion_hidden=hidden, proportion_per_head=own)
        )
        expected = added_parameters(model(), hidden, own=own)
        assert built.num_parameters() - 370_562 == expected


@pytest.mark.parametrize("hidden", [None, 1, 8])
def test_parameters_of_steps_are_those_of_their_nets_and_clocks(hidden):
    travelled = {"proportion": "travelled", "proportion_hidden": hidden}
    for own in (False, True):
        options = travelled | {"proportion_per_head": own, "constant_steps": hidden is None}
        built = LeapformerForSequenceClassification(model(**options))
        expected = added_parameters(model(proportion="travelled"), hidden, own=own)
        assert built.num_parameters() - 370_562 == expected


@pytest.mark.parametrize(
    ("percent", "hidden"), [(0.2, 1), (0.5, 3), (1.0, 6), (1.5, 8), (2.88, 16), (90.0, 63)]
)
def test_the_size_is_the_nearest_there_is(percent, hidden):
    assert hidden_units(model(), percent / 100, own=False) == hidden


def test_variants_are_every_size_shared_and_not_and_two_without_nets():
    names = [variant.name for variant in variants(AblateConfig(task="text"))]
    assert names[:4] == ["learned-0.2", "learned-0.5", "learned-1", "learned-1.5"]
    assert names[-2:] == ["fixed", "none"]
    own = [v for v in variants(AblateConfig(task="text")) if v.changes.get("proportion_per_head")]
    assert {v.name for v in own} <= {f"{name}-own" for name in names[:4]}
    hidden = [v.changes["proportion_hidden"] for v in own]
    assert hidden == sorted(set(hidden))  # None is trained twice.
    said = []
    variants(AblateConfig(task="text"), said.append)
    assert said == ["learned-0.5-own comes to the same nets as learned-0.2-own, and is left out"]
    with pytest.raises(ConfigError, match=r"sizes=50: the nearest nets have 11 % of the param"):
        variants(AblateConfig(task="text", sizes=(50.0,)))
    one = variants(AblateConfig(task="text", sizes=(1.0,), sharing=("shared",)))
    assert [variant.name for variant in one] == ["learned-1", "fixed", "none"]


def test_steps_are_ablated_with_constant_ones_beside_them():
    config = AblateConfig(task="text", proportion="travelled", sizes=(0.2, 1.5), sharing=("own",))
    found = variants(config)
    names = ["travelled-0.2-own", "travelled-1.5-own", "constant", "fixed", "none"]
    assert [variant.name for variant in found] == names
    assert all(v.changes["proportion"] == "travelled" for v in found[:3])


def test_steps_are_trained_and_their_spread_is_told(tiny_data, tmp_path):
    config = AblateConfig(
        task="text",
        proportion="travelled",
        sizes=(0.5,),
        sharing=("shared",),
        steps=2,
        batch=8,
        data=tiny_data,
        output=tmp_path,
    )
    rows = {row.name: row for row in ablate(config)}
    assert 0 < rows["travelled-0.5"].proportion_spread < 0.5
    assert rows["constant"].proportion_spread is None
    assert rows["constant"].added == 4  # a clock for each of two heads in two layers
    page = (tmp_path / "text" / "ablation.md").read_text(encoding="utf-8")
    assert "| constant |" in page


@pytest.fixture(scope="module")
def ablation(tiny_data, tmp_path_factory):
    config = AblateConfig(
        task="text",
        sizes=(1.5,),
        sharing=("own",),
        seeds=(0,),
        steps=2,
        batch=8,
        data=tiny_data,
        output=tmp_path_factory.mktemp("ablation"),
    )
    return config, ablate(config)


def test_every_variant_is_trained_in_equal_steps(ablation):
    config, rows = ablation
    folder = config.output / "text"
    assert [row.name for row in rows] == ["learned-1.5-own", "fixed", "none"]
    for row in rows:
        run = json.loads((folder / row.name / "seed-0" / "metrics.json").read_text())
        assert (run["steps"], run["accuracy"]) == (2, row.accuracy)
        assert (row.added > 0) == (row.hidden is not None) == (row.proportion_spread is not None)
    assert rows[0].share == pytest.approx(0.015, rel=0.3)
    for name in ("ablation.md", "ablation.csv", "ablation.png", "curves.png"):
        assert (folder / name).is_file()
    assert "| fixed |  | 0 | 0.00 % |" in markdown(table(rows))


def test_the_spread_of_proportions_is_0_where_all_tokens_stand_at_one_place(ablation, tmp_path):
    config, rows = ablation
    folder = config.output / "text" / "learned-1.5-own" / "seed-0" / "model"
    assert 0 < rows[0].proportion_spread == proportion_spread(config, folder) < 0.5
    trained = LeapformerForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "proportion.net" in name and "weight" in name:
                parameter.zero_()
    trained.save_pretrained(tmp_path)
    assert proportion_spread(config, tmp_path) == pytest.approx(0.0, abs=1e-6)


def test_only_the_first_of_several_processes_writes_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(ablating, "train_variants", lambda *_: [])
    assert ablate(AblateConfig(output=tmp_path)) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sizes": (0.0,)}, r"sizes=0\.0 must be more than 0"),
        ({"sharing": ("both",)}, "sharing='both' is not known; there are shared, own"),
    ],
)
def test_settings_that_cannot_work_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        AblateConfig(**settings)
