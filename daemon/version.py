"""The daemon's version, as it introduces itself."""

import gpulease

VERSION = gpulease.__version__
AGENT = f"gpuleased/{VERSION}"
