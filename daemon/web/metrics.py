"""The broker's metrics, passed on: with tenants' names to whoever has the operator's token, with pseudonyms else."""

import re
from typing import Final

from gpulease.daemon.web.health import Ask, Kept
from gpulease.daemon.web.view import Pseudonyms
from gpulease.protocol.messages import Empty
from gpulease.protocol.opcodes import Opcode

FRESH_S: Final = 1.0
"""How old an exposition may be. It costs the broker milliseconds, and any local user may ask."""

NOBODY: Final = ("", "other")
"""Values of the label that name no tenant."""

_TENANT: Final = re.compile(r'(?<=[{,])tenant="((?:[^"\\\n]|\\.)*)"')
"""The label, in Prometheus's text format: a backslash escapes a quote, a backslash and a line feed."""


class Metrics:
    """METRICS of the broker."""

    def __init__(self, ask: Ask, pseudonyms: Pseudonyms) -> None:
        async def scrape() -> tuple[str, str, str]:
            metrics = await ask(Opcode.METRICS, Empty())
            # Once for all who ask meanwhile: it is a tenth of a second's work where there are many series.
            return metrics.content_type, metrics.exposition, without_names(metrics.exposition, pseudonyms)

        self._kept = Kept(scrape, FRESH_S)

    async def exposition(self, *, is_named: bool) -> tuple[str, str]:
        """(media type, text). Raises BrokerSilent."""
        content_type, named, hidden = await self._kept.get()
        return content_type, named if is_named else hidden


def without_names(text: str, pseudonyms: Pseudonyms) -> str:
    """The same series, of tenants that nobody knows by name."""

    def hide(found: re.Match[str]) -> str:
        name = found[1]
        return found[0] if name in NOBODY else f'tenant="{pseudonyms.of_tenant(name)}"'

    lines = (line if line.startswith("#") else _TENANT.sub(hide, line) for line in text.split("\n"))
    return "\n".join(lines)
