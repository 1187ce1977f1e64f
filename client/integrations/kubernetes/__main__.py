"""`gpulease-dra`: a driver for Kubernetes' Dynamic Resource Allocation, with leases as its devices."""

import signal
import threading
import time
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    from gpulease.imports import begin_imports

    begin_imports()

import click

from gpulease.client.console.command_group import CommandGroup
from gpulease.client.console.exit_status import MissingPrerequisite, needing
from gpulease.client.console.number_range import NumberRange
from gpulease.client.integrations.kubernetes.resource_pool import DRIVER
from gpulease.imports import end_imports
from gpulease.protocol.address import ADDRESS_VARIABLE, DEFAULT_ADDRESS

LEASE_S: Final = 600.0
"""Duration in seconds of a claim's lease, which the driver renews. The driver may be down for this time. A lease that
is not freed lasts at most this long."""


@click.group(cls=CommandGroup)
def main() -> None:
    """Serve Kubernetes' claims with leases. client/integrations/kubernetes/README.md is the guide."""


_node = click.option("--node", required=True, envvar="NODE_NAME", help="The node's name in the cluster (NODE_NAME).")
_daemon = click.option(
    "--daemon", "address", default=DEFAULT_ADDRESS, show_default=True, envvar=ADDRESS_VARIABLE, help="unix:PATH."
)


_kubelet = click.option(
    "--kubelet", type=click.Path(path_type=Path), default=Path("/var/lib/kubelet"), show_default=True
)
_instance = click.option(
    "--pod-uid",
    default="",
    envvar="POD_UID",
    help="The uid of the driver's pod (POD_UID), so that two pods can serve during an update.",
)


@main.command()
@_node
@_daemon
@_kubelet
@_instance
@click.option(
    "--lease-secs",
    type=NumberRange(min=10),
    default=LEASE_S,
    show_default=True,
    help="How long a claim's lease lasts; it is renewed while the claim is prepared.",
)
@click.option("--share-users", is_flag=True, help="Allow claims of several namespaces to have the same user.")
@click.option("--cdi", type=click.Path(path_type=Path), default=Path("/var/run/cdi"), show_default=True)
@click.option(
    "--api-server", help="The API server, https://HOST:PORT; by default the cluster's, from the pod's environment."
)
@click.option(
    "--api-token", type=click.Path(path_type=Path), help="A file with the account's token; by default the pod's."
)
@click.option("--api-ca", type=click.Path(path_type=Path), help="A file with the server's CA; by default the pod's.")
def serve(
    node: str,
    address: str,
    kubelet: Path,
    pod_uid: str,
    lease_secs: float,
    share_users: bool,
    cdi: Path,
    api_server: str | None,
    api_token: Path | None,
    api_ca: Path | None,
) -> None:
    """Publish the node's cards, register with the kubelet and prepare claims, until SIGTERM.

    Prepared claims outlive this program; their leases end unless it is back within --lease-secs.
    """
    with needing("dra"):
        from gpulease.client.integrations.kubernetes.cluster import KubernetesCluster
        from gpulease.client.integrations.kubernetes.kubelet_plugin import KubeletPlugin
    from gpulease.client.http.unix_path import CHECK_INTERVAL_S
    from gpulease.client.integrations.kubernetes.claim_leases import RENEW_S, ClaimLeases
    from gpulease.client.integrations.kubernetes.node_cards import NodeCards
    from gpulease.client.integrations.kubernetes.node_files import NodeFiles
    from gpulease.client.integrations.kubernetes.resource_pool import device_of
    from gpulease.client.integrations.kubernetes.slice_publisher import SlicePublisher

    end_imports()
    # Install the handlers first, so that no signal during the start kills the driver while it prepares a claim.
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    folder, registry = kubelet / "plugins" / DRIVER, kubelet / "plugins_registry"
    for needed in (folder, registry):
        needed.mkdir(mode=0o750, parents=True, exist_ok=True)
    # In a pod, the cluster provides the server's address, the token and the CA.
    cluster = KubernetesCluster.of_pod() if api_server is None else KubernetesCluster(api_server, api_token, api_ca)
    files = NodeFiles(folder / "state", cdi)
    claims = ClaimLeases(address, node, files, cluster, _write_status, lease_s=lease_secs, shares_users=share_users)
    # Restore containers' files before the kubelet can connect, because the kubelet may restart containers at any time.
    # Then renew leases that may soon expire.
    claims.restore()
    claims.keep()
    cards = NodeCards(address, claims.lease_ids)

    def listening() -> KubeletPlugin:
        try:
            return KubeletPlugin(
                DRIVER, claims, lambda: cards.health(node), registry, folder, _write_status, instance=pod_uid
            )
        except OSError as error:
            raise MissingPrerequisite(
                f"can't listen for the kubelet: {error}. End the program that listens there"
            ) from None

    plugin = listening()
    # Publish slices after the driver listens, because the scheduler then assigns claims at once.
    publisher = SlicePublisher(cluster, node, lambda: list(map(device_of, cards.read())), _write_status)
    _write_status(f"serves {DRIVER} on {plugin.socket}, for the daemon at {address}")
    # Short leases are renewed three times in their duration.
    renew_s = min(RENEW_S, lease_secs / 3)
    try:
        next_renewal = time.monotonic() + CHECK_INTERVAL_S
        # The kubelet's requests run in gRPC's threads. This loop renews leases, and recreates removed sockets.
        while not stopped.wait(min(CHECK_INTERVAL_S, renew_s)):
            if time.monotonic() >= next_renewal or claims.has_news.is_set():
                claims.keep()
                next_renewal = time.monotonic() + renew_s
            # If a bug has ended the publisher, end this process, so that the cluster restarts the pod.
            if not publisher.is_alive:
                raise MissingPrerequisite("the ResourceSlices are no longer published: the log says why")
            # A restart of the kubelet or a clean-up of its folder may remove the sockets.
            if lost := plugin.lost_sockets():
                _write_status(f"{', '.join(map(str, lost))} was removed: the sockets are created again")
                plugin.close()
                plugin = listening()
    finally:
        publisher.stop()
        plugin.close()
        cluster.close()
    _write_status("has stopped; prepared claims keep their leases")


@main.command()
@_kubelet
@_instance
def probe(kubelet: Path, pod_uid: str) -> None:
    """Fail unless the driver of this pod answers at both of its sockets. For the pod's probes."""
    with needing("dra"):
        from gpulease.client.integrations.kubernetes.driver_probe import problem_of

    end_imports()
    if problem := problem_of(DRIVER, kubelet / "plugins_registry", pod_uid):
        raise MissingPrerequisite(problem)


def _write_status(text: str) -> None:
    click.echo(f"gpulease-dra: {text}", err=True)


def run() -> None:
    """Run the command that the command line names."""
    main(prog_name="gpulease-dra")


if __name__ == "__main__":
    run()
