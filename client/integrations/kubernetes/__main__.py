"""`gpulease-dra`: a driver for Kubernetes' Dynamic Resource Allocation, with leases as its devices."""

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

import click

from gpulease.client.console.exit_status import CannotStart, failures_as_sentences, needing
from gpulease.protocol.address import ADDRESS_VARIABLE, DEFAULT_ADDRESS

DEFAULT_LEASE_S: Final = 86_400.0
"""A day, the longest lease that a daemon grants by default."""


@click.group()
def main() -> None:
    """Serve Kubernetes' claims with leases. client/integrations/kubernetes/README.md is the guide."""


_node = click.option("--node", required=True, envvar="NODE_NAME", help="The node's name in the cluster (NODE_NAME).")
_daemon = click.option(
    "--daemon", "address", default=DEFAULT_ADDRESS, show_default=True, envvar=ADDRESS_VARIABLE, help="unix:PATH."
)


@main.command()
@_node
@_daemon
@click.option("--lease-secs", type=click.FloatRange(min=1), default=DEFAULT_LEASE_S, show_default=True)
@click.option("--kubelet", type=click.Path(path_type=Path), default=Path("/var/lib/kubelet"), show_default=True)
@click.option("--cdi", type=click.Path(path_type=Path), default=Path("/var/run/cdi"), show_default=True)
@click.option("--api-server", help="https://HOST:PORT; by default the cluster's, from the pod's environment.")
@click.option("--api-token", type=click.Path(path_type=Path), help="The account's token; by default the pod's.")
@click.option("--api-ca", type=click.Path(path_type=Path), help="The server's CA; by default the pod's.")
def serve(
    node: str,
    address: str,
    lease_secs: float,
    kubelet: Path,
    cdi: Path,
    api_server: str | None,
    api_token: Path | None,
    api_ca: Path | None,
) -> None:
    """Register with the kubelet and prepare claims until SIGTERM. Prepared claims outlive this program."""
    with needing("dra"):
        from gpulease.client.integrations.kubernetes.cluster import KubernetesCluster
        from gpulease.client.integrations.kubernetes.kubelet_plugin import KubeletPlugin
    from gpulease.client.http.unix_path import LOOK_S
    from gpulease.client.integrations.kubernetes.claim_leases import TOKEN_REFRESH_S, ClaimLeases
    from gpulease.client.integrations.kubernetes.node_cards import NodeCards
    from gpulease.client.integrations.kubernetes.node_files import NodeFiles
    from gpulease.client.integrations.kubernetes.resource_pool import DRIVER, device_of
    from gpulease.client.integrations.kubernetes.slice_publisher import SlicePublisher

    # Handlers first: a signal during the start must not kill the driver halfway through a claim.
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    # The kubelet's conventional places for a plugin's socket and for its registration.
    folder, registry = kubelet / "plugins" / DRIVER, kubelet / "plugins_registry"
    for needed in (folder, registry):
        needed.mkdir(mode=0o750, parents=True, exist_ok=True)
    # In a pod, the cluster provides the server's address, the token and the CA.
    cluster = KubernetesCluster.of_pod() if api_server is None else KubernetesCluster(api_server, api_token, api_ca)
    claims = ClaimLeases(address, node, NodeFiles(folder / "state", cdi), cluster, lease_secs, _say)
    claims.refresh_tokens()

    def listening() -> KubeletPlugin:
        try:
            return KubeletPlugin(DRIVER, claims, registry, folder, _say)
        except OSError as error:
            raise CannotStart(f"can't listen for the kubelet: {error}. End what listens there") from None

    plugin = listening()
    cards = NodeCards(address, claims.lease_ids)
    # Published only once the driver listens: a slice is an offer.
    publisher = SlicePublisher(cluster, node, lambda: list(map(device_of, cards.read())), _say)
    _say(f"serves {DRIVER} on {plugin.socket}, for the daemon at {address}")
    try:
        refresh_at = time.monotonic() + TOKEN_REFRESH_S
        # The kubelet's requests run in gRPC's threads. This loop renews tokens, and recreates removed sockets.
        while not stopped.wait(LOOK_S):
            if time.monotonic() >= refresh_at:
                claims.refresh_tokens()
                refresh_at = time.monotonic() + TOKEN_REFRESH_S
            # Restarting the kubelet or cleaning its folder may remove them.
            if lost := plugin.lost_sockets():
                _say(f"{', '.join(map(str, lost))} was removed: the sockets are made again")
                plugin.close()
                plugin = listening()
    finally:
        publisher.stop()
        plugin.close()
        cluster.close()
    _say("has stopped; prepared claims keep their leases")


def _say(text: str) -> None:
    click.echo(f"gpulease-dra: {text}", err=True)


def run() -> None:
    """Run the command that the command line names."""
    with failures_as_sentences():
        sys.exit(main(prog_name="gpulease-dra", standalone_mode=True))


if __name__ == "__main__":
    run()
