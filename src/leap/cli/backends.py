"""`leap backends`: what can answer a call here, in the order in which they are asked."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leap.ops.backends import BACKENDS, VARIABLE, named
from leap.reports.table import Table, markdown

if TYPE_CHECKING:
    from leap.ops.triton.compile import Compiled


def show(targets: Sequence[str] | None = None, output: str | None = None) -> None:
    """Print each backend: whether it is here or why not, and what it covers.

    Args:
        targets: GPUs to compile for instead, all for none named; None not to.
        output: a file for what they take, in Markdown.
    """
    if targets is not None:
        return compile_for(targets, output)
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


def compile_for(targets: Sequence[str], output: str | None) -> None:
    """Compile Triton's kernels for GPUs and print what each takes."""
    from leap.ops.triton.compile import TARGETS, WORKLOAD, compile_all

    print(f"{'':<41} {'GPU':<20} registers  shared, kB  spilled, B  ESTIMATED us")
    found = []
    for made in compile_all(targets or tuple(TARGETS)):
        found.append(made)
        gpu = f"{made.target} ({TARGETS[made.target].name})"
        print(
            f"{made.kernel:<22} {made.kind:<18} {gpu:<20} {made.registers:>9}  "
            f"{made.shared / 1024:>10.1f}  {made.spilled:>10}  {made.seconds * 1e6:>12.0f}",
            flush=True,
        )
    print(f"Times are estimates, from bytes and operations alone: {WORKLOAD}. None was measured.")
    if output is not None:
        Path(output).write_text(markdown(table_of(found)))
        print(f"wrote {output}")


def table_of(found: Sequence["Compiled"]) -> Table:
    """A row for each form of a kernel, and a column for each GPU; the most that a form takes."""
    from leap.ops.triton.compile import TARGETS

    forms: dict[tuple[str, str], dict[str, list[float]]] = {}
    for made in found:
        most = forms.setdefault((made.kernel, made.kind), {}).setdefault(made.target, [0.0] * 4)
        numbers = made.registers, made.shared / 1024, made.spilled, made.seconds * 1e6
        most[:] = map(max, most, numbers)
    targets = list(dict.fromkeys(made.target for made in found))
    rows = [
        [
            f"`{kernel}`{', ' * bool(kind)}{kind}",
            *(" / ".join(f"{n:.0f}" for n in by[t]) if t in by else "-" for t in targets),
        ]
        for (kernel, kind), by in sorted(forms.items())
    ]
    title = "Registers per thread / shared kB / spilled B per thread / ESTIMATED microseconds"
    return Table(title, ["kernel", *(f"{t} ({TARGETS[t].name})" for t in targets)], rows)
