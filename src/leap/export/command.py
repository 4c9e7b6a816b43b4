"""Exporting the model of a run, whatever its task."""

from leap.errors import ConfigError, FileError
from leap.export.files import ExportConfig, Exported
from leap.reports.files import read_json

TRANSLATION = ("leapformer-seq2seq", "leapformer-speech")


def export(config: ExportConfig) -> Exported:
    """Export a run's model to a folder.

    Raises:
        LeapError: if there is no such model, or its graph does not do as it does.
    """
    if not config.run.is_dir():
        raise FileError(f"no run folder at {config.run}; train a model with leap lm train")
    folder = config.run / "model" if (config.run / "model").is_dir() else config.run
    settings = folder / "config.json"
    kind = read_json(settings).get("model_type") if settings.is_file() else None
    if config.to == "executorch":
        if kind in TRANSLATION:
            raise ConfigError(f"{config.run} translates; --to executorch takes language models")
        from leap.export.executorch import export_executorch

        return export_executorch(config)
    if kind in TRANSLATION:
        from leap.export.simul import export_translation

        return export_translation(config)
    from leap.export.lm import export_lm

    return export_lm(config)
