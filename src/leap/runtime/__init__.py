"""Exported models with numpy and onnxruntime, where there is no torch: writing and translating.

    writer = Writer("exported/play")                        a folder of `leap export`
    print(writer.generate("Enter ", tokens=50, seed=0).text)

    stream = Translator("exported/captions", "wait-3").stream()
    stream.push("A man in")                                 the words that can be said by now
    stream.finish()                                         all the others

Nothing in here imports torch or transformers.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leap.runtime.translator import Translator as Translator
    from leap.runtime.writer import Writer as Writer

__all__ = ["Translator", "Writer"]

if not TYPE_CHECKING:

    def __getattr__(name):
        """Load a public name when it is first used."""
        if name not in __all__:
            raise AttributeError(f"module 'leap.runtime' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"leap.runtime.{name.lower()}"), name)
