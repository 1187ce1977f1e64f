"""Entry into the sandbox: a newly forked worker applies every measure before it uses a driver.

The kernel dictates the order. Measures that need privileges come before the privileges are dropped. The signal for the
parent's death is set after the change of user, which clears it (prctl(2)). The filter comes last, because it forbids
the calls that the other measures need.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from gpulease.daemon.host.processes import die_with_parent, gain_no_privileges, never_dump
from gpulease.daemon.sandbox.landlock import Reach, restrict
from gpulease.daemon.sandbox.measures import Measure, SandboxNeeds, SandboxUnavailable
from gpulease.daemon.sandbox.resource_limits import impose, limits_for, prefer_oom_kill
from gpulease.daemon.sandbox.syscall_filter import NoFilter, install
from gpulease.daemon.sandbox.worker_identity import (
    WorkerIdentity,
    become,
    bound_capabilities,
    drop_capabilities,
    keep_only,
)
from gpulease.protocol.fast_dataclass import dataclass

Step = Callable[[], None]

BY_LANDLOCK: Mapping[Measure, Reach] = {
    Measure.FILES: Reach(files=True),
    Measure.DEVICES: Reach(devices=True),
    Measure.NETWORK: Reach(network=True),
    Measure.SCOPE: Reach(scope=True),
}
"""The access that a ruleset forbids for each measure. A worker's one ruleset combines these for all of its measures."""


@dataclass(frozen=True, slots=True)
class SandboxPlan:
    """The sandbox of one driver's workers on this host.

    Attributes:
        needs: The paths and memory that the driver needs.
        identity: The workers' user; None for the daemon's own.
        measures: The measures to apply.
    """

    needs: SandboxNeeds
    identity: WorkerIdentity | None
    measures: frozenset[Measure]

    def enter(self, kept_fds: Iterable[int], parent_pid: int) -> None:
        """Apply every measure in this process, and make it die with its parent.

        Args:
            kept_fds: The descriptors that the process keeps.
            parent_pid: The parent's process id.

        Raises SandboxUnavailable if a measure fails. The process must then end.
        """
        for measure, step in self._before(tuple(kept_fds)):
            self._apply(measure, step)
        # These two steps are taken even without a sandbox.
        die_with_parent(parent_pid)
        gain_no_privileges()
        for measure, step in self._after():
            self._apply(measure, step)

    def _apply(self, measure: Measure, step: Step) -> None:
        try:
            step()
        except (OSError, ValueError, NoFilter) as error:
            raise SandboxUnavailable(f"the worker can't be sandboxed ({measure.value}): {error}") from None

    def _before(self, kept_fds: tuple[int, ...]) -> Iterator[tuple[Measure, Step]]:
        identity = self.identity
        # Close descriptors first: /proc, which lists them, can't be reached later.
        if Measure.DESCRIPTORS in self.measures:
            yield Measure.DESCRIPTORS, partial(keep_only, (*kept_fds, *self.needs.kept))
        # This step writes a file that belongs to root, so it precedes the change of user. The other limits come later,
        # because they would also apply to the steps here.
        if Measure.LIMITS in self.measures:
            yield Measure.LIMITS, prefer_oom_kill
        # The bounding set can be changed only with CAP_SETPCAP, which the process loses when it changes its user.
        if Measure.CAPABILITIES in self.measures:
            yield Measure.PRIVILEGES, bound_capabilities
        if Measure.USER in self.measures and identity is not None:
            yield Measure.USER, partial(become, identity)
        if Measure.CAPABILITIES in self.measures:
            yield Measure.CAPABILITIES, drop_capabilities

    def _after(self) -> Iterator[tuple[Measure, Step]]:
        # This must follow the change of user, which resets the attribute (prctl(2), PR_SET_DUMPABLE).
        if Measure.INSPECTION in self.measures:
            yield Measure.INSPECTION, never_dump
        if Measure.LIMITS in self.measures:
            yield Measure.LIMITS, partial(impose, limits_for(self.needs))
        # Use one ruleset for all four measures, because each ruleset counts towards Landlock's limit of 16 layers.
        reach = Reach(
            files=Measure.FILES in self.measures,
            devices=Measure.DEVICES in self.measures,
            network=Measure.NETWORK in self.measures,
            scope=Measure.SCOPE in self.measures,
        )
        if reach != Reach():
            yield Measure.FILES, partial(restrict, reach, self.needs)
        # The filter is last, because it forbids calls that the other measures need.
        if Measure.SYSCALLS in self.measures:
            yield (
                Measure.SYSCALLS,
                partial(install, writes_files=self.needs.writes_files, connects=bool(self.needs.tcp_ports)),
            )
