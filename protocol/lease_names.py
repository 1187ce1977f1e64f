"""Names of leases in a fleet, and the keys and values of labels."""

import re
from typing import Final

MAX_NAME_CHARS: Final = 128
"""Maximum number of characters of a name, and of a label's key or value. Stops names from filling the fleet's store.
"""

NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")
"""A name, to be matched in full. It has no slash, so it can't be a path to another key of the fleet's store."""

NAME_RULE: Final = f"1 to {MAX_NAME_CHARS} letters, digits, dots, dashes and underscores, the first a letter or digit"
"""The rule of a name, in words."""
