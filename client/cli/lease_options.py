"""The options with which commands describe the lease to acquire."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import click

from gpulease.client.cli.drain import span_option
from gpulease.client.core.lease_request import LeaseRequest
from gpulease.protocol.lease_options import WEIGHT
from gpulease.protocol.sizes import parse_size

Builder = TypeVar("Builder", bound=LeaseRequest)


class LeaseArguments(NamedTuple):
    """The lease that a command line describes.

    Attributes:
        vram_bytes: The lease's device memory.
        ttl_ms: The lease's duration.
        wait_ms: Longest wait for room.
        device: The lease's card, by UUID or index; None for any.
        name: The lease's name in the fleet; None for none.
        labels: Labels that the lease's node must have.
        weight: The lease's weight when its card's time is shared; None for the default.
        is_latency: Whether the card's other sessions hold back for the lease.
        is_parkable: Whether the lease's session may be parked.
        park_idle_ms: Idle time after which the session is parked; 0 if idleness never parks it.
    """

    vram_bytes: int
    ttl_ms: int
    wait_ms: int
    device: str | None
    name: str | None
    labels: dict[str, str]
    weight: int | None
    is_latency: bool
    is_parkable: bool
    park_idle_ms: int

    def described_to(self, builder: Builder) -> Builder:
        """Set all arguments in a builder, and return the builder. Raises InvalidRequest."""
        # The size and the times always have a value. Set the others only if they were given.
        builder.min_vram(self.vram_bytes).lease_secs(self.ttl_ms / 1000).timeout(self.wait_ms / 1000)
        if self.device is not None:
            builder.device(self.device)
        if self.name is not None:
            builder.name(self.name)
        if self.weight is not None:
            builder.weight(self.weight)
        if self.is_latency:
            builder.latency()
        if self.is_parkable:
            builder.parkable(self.park_idle_ms / 1000)
        return builder.labels(**self.labels)


def lease_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add a lease's options to a command, which receives them as one argument `lease_request`."""

    @wraps(command)
    def with_lease(**values: Any) -> Any:
        # Replace the lease's options by one argument, and pass the others on unchanged.
        lease_request = LeaseArguments(**{name: values.pop(name) for name in LeaseArguments._fields})
        if lease_request.park_idle_ms and not lease_request.is_parkable:
            raise click.UsageError("--park-idle needs --parkable.")
        return command(lease_request=lease_request, **values)

    # click lists options in the reverse of the order in which they are added.
    for option in (
        span_option(
            "--park-idle",
            "park_idle_ms",
            "0s",
            "Park the session when it has been idle for this time; 0s: idle sessions are not parked.",
        ),
        click.option(
            "--parkable",
            "is_parkable",
            is_flag=True,
            help="Allow the session's bytes to leave the card while it is idle; its next operation brings them back.",
        ),
        click.option(
            "--latency",
            "is_latency",
            is_flag=True,
            help="Hold back the card's other sessions while this one has work; the operator must permit it.",
        ),
        click.option(
            "--weight",
            type=click.IntRange(WEIGHT.least, WEIGHT.most),
            help="The lease's weight when its card's time is shared; by default 1.",
        ),
        click.option(
            "--label",
            "labels",
            multiple=True,
            callback=_labels_of,
            help="A label that the node must have, such as zone=a.",
        ),
        click.option("--name", help="The lease's name; only one node of the fleet serves it at a time."),
        click.option("--device", help="The card's UUID or index; by default, any card with enough room."),
        span_option("--wait", "wait_ms", "0s", "How long to wait until a card has room."),
        time_option,
        click.option(
            "--vram",
            "vram_bytes",
            required=True,
            callback=_size_of,
            help="The amount of device memory, such as 4GiB or 512MiB.",
        ),
    ):
        with_lease = option(with_lease)
    return with_lease


time_option = span_option("--for", "ttl_ms", "10m", "The lease's duration, such as 30s or 2h.")


def _size_of(ctx: click.Context, param: click.Parameter, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}.", ctx, param) from None


def _labels_of(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    # Split only at the first equals sign, because a value may contain more.
    pairs = [value.partition("=") for value in values]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise click.BadParameter(f"must be KEY=VALUE, not {key}{equals}{value}.", ctx, param)
    return {key: value for key, _, value in pairs}
