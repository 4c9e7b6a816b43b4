"""`leap backends`: what can answer a call here, in the order in which they are asked."""

from collections.abc import Sequence

from leap.ops.backends import BACKENDS, VARIABLE, named


def show(targets: Sequence[str] | None = None) -> None:
    """Print each backend: whether it is here or why not, and what it covers.

    Args:
        targets: GPUs to compile for instead, all for none named; None not to.
    """
    if targets is not None:
        return compile_for(targets)
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
    return None


def compile_for(targets: Sequence[str]) -> None:
    """Compile Triton's kernels for GPUs and print what each takes."""
    from leap.ops.triton.compile import TARGETS, WORKLOAD, compile_all

    print(f"{'':<16}  {'GPU':<20} registers  shared, kB  spilled, B  ESTIMATED us")
    for made in compile_all(targets or tuple(TARGETS)):
        gpu = f"{made.target} ({TARGETS[made.target].name})"
        print(
            f"{made.kernel:<16}  {gpu:<20} {made.registers:>9}  {made.shared / 1024:>10.1f}  "
            f"{made.spilled:>10}  {made.seconds * 1e6:>12.0f}",
            flush=True,
        )
    print(f"Times are estimates, from bytes and operations alone: {WORKLOAD}. None was measured.")
