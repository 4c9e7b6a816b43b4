"""`leap backends`: what can answer a call here, in the order in which they are asked."""

from leap.ops.backends import BACKENDS, VARIABLE, named


def show() -> None:
    """Print each backend: whether it is here or why not, and what it covers."""
    width = max(map(len, BACKENDS))
    for name, backend in BACKENDS.items():
        reason = backend.missing()
        here = "available" if reason is None else f"not available: {reason}"
        if reason is None and backend.by_name_alone:
            here = "available by name"
        print(f"{name:<{width}}  {here}\n{'':<{width}}  {backend.covers}")
    asked = named()
    if asked is None:
        print(f"The first that takes a call answers it; {VARIABLE}=torch, say, names one instead.")
    else:
        print(f"{VARIABLE}={asked}: this one answers, or the call is an error.")
