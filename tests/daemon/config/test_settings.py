from pathlib import Path

import pytest

from gpulease.daemon.config.settings import MAX_EMBEDDED_CARDS, Config, ConfigError, OnStop, load_config
from gpulease.daemon.leases import PlacementOrder, Recycling
from gpulease.daemon.sandbox.measures import Measure, SandboxSettings
from gpulease.protocol.address import TcpAddress, UnixAddress


def test_defaults() -> None:
    config = load_config(None, {})
    assert config == Config()
    assert config.listen == (UnixAddress("/run/gpulease/gpuleased.sock"),)
    assert config.driver == "auto"


def test_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        'listen = ["unix:/tmp/a.sock", "tcp:[::1]:7"]\ndriver = "cpu"\nvram = ["1GiB", "2GiB"]\nsocket_mode = "0600"\n'
        'state = "/var/lib/g"\non_stop = "keep"\n'
        'audit = "/var/log/g"\naudit_head = "/mnt/head.json"\naudit_required = true\n'
        'audit_file_size = "8MiB"\naudit_keep_files = 9\n'
        'max_connections = 9\nmax_connections_per_tenant = 8\nwarm_contexts = 3\nplacement = "pack"\n'
        "[limits]\nmax_leases = 3\n"
    )
    config = load_config(path, {})
    assert config.listen == (UnixAddress("/tmp/a.sock"), TcpAddress("::1", 7))
    assert config.vram_bytes == (1 << 30, 2 << 30)
    assert config.socket_mode == 0o600
    assert (config.state, config.on_stop) == (Path("/var/lib/g"), OnStop.KEEP)
    assert (config.audit, config.audit_head) == (Path("/var/log/g"), Path("/mnt/head.json"))
    assert (config.audit_required, config.audit_file_bytes, config.audit_keep_files) == (True, 8 << 20, 9)
    assert (config.max_connections, config.max_connections_per_tenant) == (9, 8)
    assert config.limits.max_leases == 3
    assert config.warm_contexts == 3
    assert (config.placement, Config().placement) == (PlacementOrder.PACK, PlacementOrder.SPREAD)
    assert load_config(path, {"warm_contexts": 0, "vram": []}).warm_contexts == 0


def test_one_text_instead_of_a_list(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('listen = "tcp:localhost:1"\nvram = "1GiB"\n')
    config = load_config(path, {})
    assert config.listen == (TcpAddress("localhost", 1),)
    assert config.vram_bytes == (1 << 30,)


def test_the_command_line_wins_and_its_silence_does_not(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('driver = "cuda"\nvram = ["1GiB"]\n')
    config = load_config(path, {"driver": "cpu", "vram": [], "listen": ["tcp:127.0.0.1:5"]})
    assert config.driver == "cpu"
    assert config.vram_bytes == (1 << 30,)
    assert config.listen == (TcpAddress("127.0.0.1", 5),)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"driver": "metal"}, "unknown driver 'metal'; there are auto, cuda, cpu"),
        ({"vram": ["1GiB"] * (MAX_EMBEDDED_CARDS + 1)}, "65 cards; at most 64"),
        ({"vram": "48"}, "vram is 48 bytes, which is too little .*: write it as 48GiB"),
        ({"vram": ["1GiB", "1023KiB"]}, "vram is 1047552 bytes"),
        ({"max_connections": 3, "max_connections_per_tenant": 4}, "max_connections_per_tenant must be between"),
        ({"socket_mode": 660}, "is not a file mode"),
        ({"socket_mode": -1}, "is not a file mode"),
        ({"listen": 5}, "setting listen: it must be a string or a list of strings"),
        ({"max_connections_per_tenant": -1}, "max_connections_per_tenant must be between"),
        ({"limits": {"max_leases": 0}}, "setting limits: max_leases is 0"),
        ({"limits": {"grace_ms": ["expired"]}}, "setting limits: grace_ms must be a table"),
        (
            {"limits": {"grace_ms": {"revoked": 10_001}}},
            "grace_ms.revoked is 10001; it must be at most 10000, in milli",
        ),
        ({"warm_contexts": 65}, "warm_contexts is 65; it must be between 0 and 64"),
        ({"warm_contexts": -1}, "warm_contexts is -1"),
        ({"recycle": "always"}, "recycle is 'always'; it must be off or same-tenant"),
        ({"recycle": "same-tenant"}, "recycle needs warm_contexts"),
        ({"recycle_idle_s": 0}, "recycle_idle_s is 0; it must be between 1 and 3600"),
        ({"recycle_leases": 0}, "recycle_leases is 0; it must be at least 1"),
        ({"placement": "tight"}, "setting placement: 'tight' is none of spread, pack"),
        ({"colour": "red"}, "unknown setting 'colour'; known are listen, driver, arch, shuffle_warps, launch_chains"),
        ({"launch_chains": "no"}, "setting launch_chains"),
        ({"launch_chains": False, "driver": "cpu"}, "launch_chains is for cards"),
        ({"vram": [6]}, "setting vram: it must be a string or a list of strings"),
        ({"listen": ["ftp:there"]}, "'ftp:there' is not an address"),
        ({"listen": "tcp:127.0.0.1:9400", "http": "127.0.0.1:9400"}, "http and listen have the same address"),
        ({"max_connections": "many"}, "setting max_connections"),
        ({"limits": {"max_ttl_s": 0}}, "max_ttl_s is 0"),
        ({"limits": {"max_ttl_s": -5}}, "max_ttl_s is -5"),
        ({"limits": 3}, "setting limits"),
        ({"socket_mode": "rwx"}, "is not a file mode"),
        ({"socket_mode": "0990"}, "is not a file mode"),
        ({"listen": ["unix:/s", "unix:/s"]}, "an address stands twice"),
        ({"max_connections": 0}, "max_connections is 0; it must be at least 1"),
        ({"max_load_s": 2**31}, "max_load_s is 2147483648; it must be at most 2147483647"),
        ({"limits": {"max_ttl_s": 10**20}}, "max_ttl_s is 1.*; it must be at most"),
        ({"audit": "log"}, "setting audit: 'log' is not an absolute path"),
        ({"state": "/a\0b"}, r"setting state: '/a\\x00b' is not an absolute path"),
        ({"audit": "/log", "audit_required": "yes"}, "setting audit_required: 'yes' is neither true nor false"),
        ({"audit_required": True}, "need audit, the folder"),
        ({"on_stop": "keep"}, "needs state, the folder"),
        ({"state": "/s", "on_stop": "kill"}, "setting on_stop: 'kill' is none of end, keep"),
        ({"audit_head": "/head.json"}, "need audit, the folder"),
        ({"audit": "/log", "audit_file_size": "64"}, "audit_file_size is 64 bytes; it must be between"),
        ({"audit": "/log", "audit_file_size": "2GiB"}, "must be between"),
        (
            {"audit": "/log", "audit_file_bytes": 1 << 20},
            "'audit_file_bytes'; did you mean 'audit_file_size'",
        ),
        ({"audit": "/log", "audit_keep_files": 1}, "audit_keep_files must be 0, for all, or at least 2"),
        ({"sandbox": "off"}, "sandbox is 'off'; it must be available or required"),
        ({"sandbox_without": "seccomp"}, "setting sandbox_without: 'seccomp' is none of user, capabilities"),
        ({"sandbox_without": ["no_new_privs"]}, "setting sandbox_without: 'no_new_privs' is none of"),
        ({"sandbox_without": ["descriptors"]}, "setting sandbox_without: 'descriptors' is none of"),
        ({"worker_user": 65534}, "setting worker_user: 65534 is not the name of a user"),
        ({"max_load_s": 0}, "max_load_s is 0; it must be at least 1"),
    ],
)
def test_settings_that_can_not_be_used(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, settings)


def test_what_is_said_of_recycling() -> None:
    assert load_config(None, {}).recycling is None
    settings = {"warm_contexts": 1, "recycle": "same-tenant", "recycle_idle_s": 3, "recycle_leases": 4}
    assert load_config(None, settings).recycling == Recycling(idle_s=3, max_leases=4)


def test_what_is_said_of_the_sandbox(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('sandbox = "required"\nworker_user = "gpu"\nsandbox_without = ["syscalls"]\n')
    wanted = SandboxSettings(is_required=True, user="gpu", without=frozenset({Measure.SYSCALLS}))
    assert load_config(path, {}).of_sandbox == wanted
    assert load_config(None, {}).of_sandbox == SandboxSettings()


@pytest.mark.parametrize("text", [b"driver = ", b"\xff", b"listen = " + b"[" * 2000])
def test_what_is_no_settings_file(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(path, {})


def test_listening_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("listen = []\n")
    with pytest.raises(ConfigError, match="nothing to listen on"):
        load_config(path, {})
