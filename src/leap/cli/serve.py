"""`leap serve`: a server for many users."""

import logging

from transformers.utils import logging as transformers_logging

from leap.serve import config as serving
from leap.serve.config import ServeConfig

transformers_logging.set_verbosity_error()


def serve(config: ServeConfig) -> None:
    """Serve, and say where."""
    logging.basicConfig(format="leap serve: %(message)s", level=logging.WARNING)

    def tell(url: str) -> None:
        kind = "translations" if serving.translates(config.run) else "completions"
        print(f"{config.run} is served at {url}/v1/{kind}; Ctrl-C ends it", flush=True)

    serving.serve(config, tell)
