import json
from importlib.metadata import PathDistribution

import pytest

from leap import extras
from leap.extras import extras_with, install_command

METADATA = """Name: leapformer
Version: 1
Requires-Dist: torch
Requires-Dist: accelerate>=1.1; extra == "lm"
Requires-Dist: accelerate>=1.1; extra == 'simul'
Requires-Dist: kaldi-native-fbank>=1.20; extra == "simul"
Requires-Dist: pillow>=10.0; extra == "lra"
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Pretend that this distribution came from somewhere."""

    def install(direct_url=None):
        (tmp_path / "METADATA").write_text(METADATA)
        if direct_url is not None:
            (tmp_path / "direct_url.json").write_text(json.dumps(direct_url))
        monkeypatch.setattr(extras, "distribution", lambda name: PathDistribution(tmp_path))

    return install


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("accelerate", ["lm", "simul"]),
        ("accelerate.state", ["lm", "simul"]),
        ("kaldi_native_fbank", ["simul"]),
        ("PIL", ["lra"]),
        ("torch", []),
        ("leap.oops", []),
    ],
)
def test_the_extras_that_bring_a_module(installed, module, expected):
    installed()
    assert extras_with(module) == expected


@pytest.mark.parametrize(
    ("direct_url", "expected"),
    [
        (None, "leapformer[lm]"),
        ({"url": "file:///home/a%20b/leapformer", "dir_info": {}}, "/home/a b/leapformer[lm]"),
        (
            {"url": "file:///tmp/leapformer-0.1.0-py3-none-any.whl", "archive_info": {}},
            "/tmp/leapformer-0.1.0-py3-none-any.whl[lm]",
        ),
        (
            {"url": "https://a.org/x.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}},
            "leapformer[lm] @ git+https://a.org/x.git@12ab",
        ),
        (
            {"url": "https://a.org/leapformer.tar.gz", "archive_info": {}},
            "leapformer[lm] @ https://a.org/leapformer.tar.gz",
        ),
    ],
    ids=["index", "folder", "wheel", "git", "archive"],
)
def test_an_extra_is_installed_from_where_the_rest_came(installed, direct_url, expected):
    installed(direct_url)
    assert install_command("lm") == f"pip install '{expected}'"


def test_from_within_the_folder_it_is_a_dot(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    installed({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    assert install_command("lm") == "pip install '.[lm]'"
