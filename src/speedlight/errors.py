"""The one exception that is Speedlight's own."""


class UnsupportedError(NotImplementedError):
    """A valid problem that the asked backend, or every backend, refuses. The message names the reasons."""
