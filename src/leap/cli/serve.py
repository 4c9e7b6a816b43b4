"""`leap serve`: a server for many users."""

import logging

from leap.runtime.manifest import is_export
from leap.serve import config as serving
from leap.serve.config import ServeConfig


def serve(config: ServeConfig) -> None:
    """Serve, and say where."""
    if not is_export(config.run):
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
    logging.basicConfig(format="leap serve: %(message)s", level=logging.WARNING)

    def tell(url: str) -> None:
        kind = "translations" if serving.translates(config.run) else "completions"
        print(f"{config.run} is served at {url}/v1/{kind}; Ctrl-C ends it", flush=True)

    serving.serve(config, tell)
