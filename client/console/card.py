"""The title of a table of figures: the card, its driver and the date."""

import subprocess
import time
from typing import Final

from gpulease.client.console.exit_status import MissingPrerequisite

QUERY_S: Final = 30.0
"""Longest time for nvidia-smi to answer, in seconds."""


def card_title(driver: str, card_name: str, card_uuid: str) -> str:
    """The title line: the card, its driver and the date. Raises MissingPrerequisite."""
    # Only a card's driver has a version. The embedded driver is a part of this package.
    version = f" {ask_card(card_uuid, 'driver_version')}" if driver == "cuda" else ""
    return f"{card_name}, driver {driver}{version}, {time.strftime('%Y-%m-%d')}"


def ask_card(card_uuid: str, field: str) -> str:
    """Ask nvidia-smi for one property of the card. Raises MissingPrerequisite if it does not answer."""
    command = ["nvidia-smi", f"--id={card_uuid}", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingPrerequisite(f"nvidia-smi does not report {field}: {error}") from None
    return result.stdout.strip()
