import json

import pytest

from leap.cli import main
from leap.tasks.simul.prepare import FACTS


def test_prepare_says_what_it_holds_and_where_it_is(capsys, tmp_path):
    output = str(tmp_path / "numbers")
    main(["simul", "prepare", "--limit", "30", "--vocabulary", "80", "--output", output])
    out = capsys.readouterr().out
    assert "numbers, en to de, " in out
    assert "train                    30 sentences" in out
    assert out.endswith(f"wrote {output}\n")


def test_facts_that_were_changed_are_an_error_in_a_line(capsys, tmp_path):
    command = ["simul", "prepare", "--limit", "30", "--vocabulary", "80", "--output", str(tmp_path)]
    main(command)
    path = tmp_path / "metrics.json"
    facts = json.loads(path.read_text())
    for name in FACTS:
        path.write_text(json.dumps(facts | {name: ["x"]}))
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main(command)
        assert leaving.value.code == 1
        err = capsys.readouterr().err
        assert (
            err.startswith(f"leap: {path} has ")
            and f" as '{name}': " in err
            and err.count("\n") == 1
        )


def test_a_bad_file_is_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit) as leaving:
        main(["simul", "prepare", "--corpus", "text", "--data", str(tmp_path / "gone")])
    assert leaving.value.code == 1
    assert capsys.readouterr().err == f"leap: no parallel text at {tmp_path / 'gone'}\n"


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["simul", "prepare", "--help"])
    out = capsys.readouterr().out
    assert "leap simul prepare --corpus multi30k --output runs/multi30k" in out


def test_the_folder_of_a_comparison_is_no_run(capsys, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    with pytest.raises(SystemExit) as leaving:
        main(["simul", "stream", "--run", str(tmp_path)])
    assert leaving.value.code == 1
    said = capsys.readouterr().err
    assert said == f"leap: {tmp_path} is no run, but holds some (a, b); give one of them\n"
