"""What can go wrong that the caller can put right: one sentence, saying what would work."""


class LeapError(Exception):
    """Base of every error this package raises on purpose; the command line shows it as one line."""


class ConfigError(LeapError, ValueError):
    """A setting that does not fit: an unknown mechanism, widths that do not divide, ..."""


class InputError(LeapError, ValueError):
    """A tensor that does not fit the call: its shape, dtype or values."""


class FileError(LeapError, ValueError):
    """A file that is missing, broken or of another kind than was asked for."""


def check_seed(seed: int) -> None:
    """Refuse a random seed that NumPy's generators do not take; torch's take more."""
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed} must be from 0 to {2**32 - 1}")
