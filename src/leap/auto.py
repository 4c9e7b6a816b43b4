"""Have transformers' Auto classes know our models, whichever is imported first.

Registration takes the models, and these take torch, which whoever asks for `leap --help` or
`leap.errors` should not wait for. So `leap.models`, which registers itself, is imported along with
the Auto classes: at once if they are there, and otherwise when transformers loads them.
"""

import sys
import threading
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE, AUTO = "transformers", "transformers.models.auto"


def register_with_transformers() -> None:
    """Import `leap.models` as soon as transformers has loaded its Auto classes."""
    if AUTO in sys.modules:
        import_module("leap.models")
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch:
    """Finds no module of its own, but is told when a module of transformers has been loaded.

    Its modules import each other, and load the Auto classes from amidst themselves. Only when the
    outermost of them is complete can ours be built on them.
    """

    def __init__(self) -> None:
        self.loading = threading.local()

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of transformers as the other finders do, and watch its loading."""
        if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec)
        return spec

    def _watch(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        assert loader is not None
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            depth = getattr(self.loading, "depth", 0)
            self.loading.depth = depth + 1
            try:
                load(module)
            finally:
                self.loading.depth = depth
            if depth == 0 and AUTO in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)
                import_module("leap.models")

        loader.exec_module = exec_module  # type: ignore[method-assign]
