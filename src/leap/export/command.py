"""Exporting the model of a run, whatever its task."""

from leap.errors import FileError
from leap.export.files import ExportConfig, Exported
from leap.export.lm import export_lm


def export(config: ExportConfig) -> Exported:
    """Export a run's model to a folder.

    Raises:
        LeapError: if there is no such model, or its graph does not do as it does.
    """
    if not config.run.is_dir():
        raise FileError(f"no run folder at {config.run}; train a model with leap lm train")
    return export_lm(config)
