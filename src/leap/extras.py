"""The optional packages: which extra of this distribution brings one, and how to install it."""

import json
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "leapformer"
PROJECTS = {"PIL": "pillow", "google": "protobuf", "yaml": "pyyaml"}
"""Where a module goes by another name than the project that has it."""


def extras_with(module: str) -> list[str]:
    """The extras that bring a module; none if nothing of ours is known to use it."""
    top = module.partition(".")[0]
    project = _normalised(PROJECTS.get(top, top))
    found = []
    for requirement in distribution(DISTRIBUTION).requires or ():
        wanted = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if wanted and extra and _normalised(wanted[0]) == project:
            found.append(extra[1])
    return found


def install_command(extra: str) -> str:
    """The command that installs an extra from where this distribution came from."""
    return f"pip install '{_origin(extra)}'"


def _origin(extra: str) -> str:
    named = f"{DISTRIBUTION}[{extra}]"
    try:
        # Written by whoever installs from elsewhere than an index (PEP 610).
        recorded = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        recorded = None
    if recorded is None:
        return named
    origin = json.loads(recorded)
    url, vcs = origin["url"], origin.get("vcs_info")
    if vcs is not None:
        return f"{named} @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    parts = urlsplit(url)
    if parts.scheme != "file":
        return f"{named} @ {url}"
    path = Path(url2pathname(parts.path))
    return f"{'.' if path == Path.cwd() else path}[{extra}]"


def _normalised(project: str) -> str:
    return re.sub(r"[-_.]+", "-", project).lower()
