"""The daemon's version, as it introduces itself."""

from importlib.metadata import PackageNotFoundError, version


def _version() -> str:
    try:
        return version("gpulease")
    except PackageNotFoundError:
        # Run from a checkout that was not installed.
        return "0+unknown"


VERSION = _version()
AGENT = f"gpuleased/{VERSION}"
