"""The one exception tree of velox-pack. Every message is one line: what, where, what to do."""


class VeloxError(Exception):
    """Root of all errors that a user can cause; the command line prints it and exits 1."""


class BundleError(VeloxError):
    """A bundle is damaged, hostile, incomplete or of an unknown version."""


class SourceError(VeloxError):
    """A source model cannot be found, read or handled."""


class CalibrationError(VeloxError):
    """A calibration cannot be done from what was captured."""


class RecipeError(VeloxError):
    """A cache recipe is unknown, malformed or lacks an artifact."""


class PackError(VeloxError):
    """A weight cannot be packed or a packed weight cannot be used."""
