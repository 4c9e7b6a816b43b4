"""What every test starts from: one thread, a fixed seed, and memory that shows when it is unset."""

import inspect
import os
from importlib.util import find_spec
from types import SimpleNamespace

import jaxtyping
import pytest
import torch
from hypothesis import settings

# Triton looks at it once, when it is first imported: its kernels are interpreted in the tests.
# With TRITON_INTERPRET=0 they run on the GPU that is here.
os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
# Memory a kernel forgot to write comes out as NaN instead of whatever happened to lie there. On a
# GPU torch has sums that it cannot do in a fixed order, so there it warns of them.
torch.use_deterministic_algorithms(True, warn_only=os.environ["TRITON_INTERPRET"] == "0")
torch.utils.deterministic.fill_uninitialized_memory = True

# The same examples on every run, so that a failure is always one's own. To look for new ones:
# pytest --hypothesis-profile=explore
settings.register_profile("leap", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("leap")


def pytest_configure(config):
    # What is first imported from within `leap` while its shapes are checked misses Python's cache
    # of compiled files. The process that only hands tests out to workers needs none of it.
    if not config.getoption("numprocesses", default=None):
        from transformers import GenerationMixin, PreTrainedModel  # noqa: F401


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def configs_take_any_keyword():
    """The shape checker does not know that Hugging Face's configs take more than their fields."""
    from leap import models

    configs = (value for value in vars(models).values() if isinstance(value, type))
    for config in (each for each in configs if issubclass(each, models.LeapformerConfig)):
        config.__init__ = getattr(config.__init__, "__wrapped__", config.__init__)


@pytest.fixture
def shapes_unchecked(monkeypatch):
    """Turn the shape checks off: for compiled functions, and for wrong shapes given on purpose."""
    # Imported late, so that the process which only hands tests out to others does without.
    from leap.ops.state import KINDS

    jaxtyping.config.update("jaxtyping_disable", True)
    # Even when off, the checker's wrappers around a state's methods stop a compiler.
    for kind in {base for leaf in KINDS.values() for base in leaf.__mro__[:-1]}:
        for name, method in list(vars(kind).items()):
            if inspect.isfunction(method):
                monkeypatch.setattr(kind, name, inspect.unwrap(method))
            elif isinstance(method, classmethod):
                monkeypatch.setattr(kind, name, classmethod(inspect.unwrap(method.__func__)))
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def interpreter():
    """Triton's kernels run here: interpreted, or on a GPU."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if os.environ["TRITON_INTERPRET"] == "1":
        patch_once()


def patch_once():
    """Let the interpreter patch its language once, and not at each call within a kernel."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    if patch.__name__ == "once":
        return
    done = []

    def once(function):
        if not done:
            done.extend(patch(each) for each in (function, tl.sum.fn))
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = once
