"""`leap app`: a page in the browser."""

import logging

from transformers.utils import logging as transformers_logging

from leap.app import config as showing
from leap.app.config import AppConfig

transformers_logging.set_verbosity_error()


def app(config: AppConfig) -> None:
    """Serve the page, and say where."""
    logging.basicConfig(format="leap app: %(message)s", level=logging.WARNING)
    showing.serve(config, lambda url: print(f"open {url} in a browser; Ctrl-C ends it", flush=True))
