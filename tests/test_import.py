"""What `import leap` costs, and what it promises all the same."""

import subprocess
import sys

import pytest

import leap
from leap.cli.verbs import COMMANDS, TASKS


def python(code):
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", f"import sys\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_importing_it_imports_nothing_heavy():
    imported = python("import leap, leap.errors\nprint(*sys.modules)")
    assert not {"torch", "transformers", "numpy", "importlib.metadata"} & set(imported)


def test_telling_what_there_is_imports_nothing_heavy():
    code = """
from leap.cli import main
from leap.cli.verbs import COMMANDS, TASKS
helps = [f"{task} --help" for task in TASKS if task not in COMMANDS]
for arguments in ("--help", "--version", "bench", *helps):
    try:
        main(arguments.split())
    except SystemExit:
        print("modules:", *sys.modules)
"""
    told = " ".join(python(code)).split("modules:")
    assert len(told) == 3 + len(TASKS) - len(COMMANDS) + 1
    assert not {"torch", "transformers", "tyro"} & set(told[-1].split())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_of_one_word_does_without_torch(name):
    code = f"""
from leap.cli import main
try:
    main([{name!r}, "--help"])
except SystemExit:
    print("modules:", *sys.modules)
"""
    told, _, imported = " ".join(python(code)).partition("modules:")
    assert f"leap {name}" in told
    assert "torch" not in imported.split()


def test_the_functions_do_without_transformers():
    assert "transformers" not in python("import leap.ops\nprint(*sys.modules)")


def test_every_public_name_is_there_and_listed():
    for name in (*leap.__all__, "ops", "layers", "models", "explain", "bench", "__version__"):
        assert name in dir(leap)
        assert getattr(leap, name) is getattr(leap, name)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'leap' has no attribute 'LeapFormer'"):
        leap.LeapFormer  # noqa: B018


@pytest.mark.parametrize(
    "imports",
    [
        "import leap, transformers",
        "import transformers; transformers.AutoConfig; import leap",
        "import leap; from transformers import Trainer",
        "import leap; from transformers import GenerationMixin; from transformers import pipeline",
    ],
)
def test_the_auto_classes_know_our_models_whatever_comes_first(imports):
    asked = "from transformers import AutoConfig\nprint(AutoConfig.for_model('leap').model_type)"
    assert python(f"{imports}\n{asked}") == ["leap"]
