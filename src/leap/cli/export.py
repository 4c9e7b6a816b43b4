"""`leap export`: models as graphs, to run without torch."""

from leap.export.command import export as export_model
from leap.export.files import NAMES, ExportConfig


def export(config: ExportConfig) -> None:
    """Export, and say how close the graph is, what int8 costs, and where it is."""
    done = export_model(config)
    print(f"largest difference from torch {done.difference:.1e}")
    for name, value in done.facts.items():
        print(f"{NAMES.get(name, name)} {value:.3f}")
    print(f"wrote {config.output} ({done.n_bytes / 1e6:.1f} MB)")
