"""Builds the native library into the wheel, or next to the sources of an editable install."""

import sysconfig
from pathlib import Path
from runpy import run_path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeLibrary(BuildHookInterface[Any]):
    """A wheel for this platform where the library can be built, else one for all without it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and have the wheel carry what came of it: the library, or why there is none."""
        built = run_path(str(Path(self.root) / "src" / "native" / "build.py"))
        reason = built["build"]()
        made = "src/leap/ops/native/" + built["LIBRARY" if reason is None else "REASON"]
        build_data["artifacts"].append(made)
        if reason is None:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"
        else:
            self.app.display_warning(f"native library not built: {reason}")
