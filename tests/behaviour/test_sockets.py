"""A daemon whose files are deleted by somebody else: its socket, the lock next to it, and its zygote's socket."""

from collections.abc import Callable

from gpulease.client import GpuBuilder, GpuSession
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Ping
from helpers.daemon import Daemon
from helpers.lasting import LastingDaemon
from helpers.waiting import wait_until


def test_no_second_daemon_takes_the_path_of_a_living_one(start_daemon: Callable[..., Daemon]) -> None:
    first = start_daemon()
    first.socket_path.with_name("d.sock.lock").unlink()
    second = Daemon(folder=first.folder)
    assert second.wait_for_exit() == 69, "EX_UNAVAILABLE"
    assert f"can't listen on {first.address}: another " in second.log()
    assert ask(Opcode.PING, Ping(7), first.address) == Ping(7)
    assert first.socket_path.exists(), "the second one's end removed nothing"


def test_tenants_come_back_through_a_socket_that_was_removed(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with GpuBuilder(daemon.address).min_vram(1 << 20).lease_secs(60).acquire() as lease, GpuSession(lease) as session:
        daemon.socket_path.unlink()
        wait_until(daemon.socket_path.exists, "the socket was created again")
        session.sync()
        assert ask(Opcode.PING, Ping(7), daemon.address) == Ping(7)
    told = "a socket's file was removed: the socket was created again"
    wait_until(lambda: told in daemon.log(), "the log says it", seen=daemon.log)


def test_the_next_daemon_finds_what_was_made_anew(lasting: LastingDaemon) -> None:
    (zygote,) = (lasting.state / "zygotes").glob("*.sock")
    removed = [lasting.now.socket_path, zygote]
    with GpuBuilder(lasting.address).min_vram(1 << 20).lease_secs(60).acquire() as lease, GpuSession(lease) as session:
        for path in removed:
            path.unlink()
        for path in removed:
            wait_until(path.exists, f"{path} is made anew")
        lasting.restart()
        session.sync()
        lease.renew(60)
