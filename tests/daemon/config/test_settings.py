import os
from pathlib import Path

import pytest

from gpulease.daemon.config.settings import (
    MAX_EMBEDDED_CARDS,
    MAX_SETTINGS_BYTES,
    Config,
    ConfigError,
    OnStop,
    load_config,
)
from gpulease.daemon.leases.devices import PlacementOrder
from gpulease.daemon.leases.model import Recycling
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
        ({"driver": "coda"}, "driver must be 'auto', 'cuda' or 'cpu', not 'coda'; did you mean 'cuda'?"),
        ({"driver": "metal"}, "driver must be 'auto', 'cuda' or 'cpu', not 'metal'"),
        ({"vram": ["1GiB"] * (MAX_EMBEDDED_CARDS + 1)}, "vram must be at most 64 cards, not 65"),
        ({"vram": "48"}, "vram must be enough to lease, such as 48GiB or 512MiB, not 48; did you forget the unit"),
        ({"vram": ["1GiB", "1023KiB"]}, "vram must be enough to lease, .* not 1047552"),
        (
            {"max_connections": 3, "max_connections_per_tenant": 4},
            "max_connections_per_tenant must be at most max_connections",
        ),
        ({"socket_mode": 660}, "socket_mode must be a file mode such as .0660. or 0o660, not "),
        ({"socket_mode": -1}, "socket_mode must be a file mode such as .0660. or 0o660, not "),
        ({"listen": 5}, "listen must be a string or a list of strings, not 5"),
        ({"max_connections_per_tenant": -1}, "max_connections_per_tenant must be a whole number of at least 1, not -1"),
        ({"limits": {"max_leases": 0}}, "limits.max_leases must be a whole number of at least 1, not 0"),
        ({"limits": {"grace_ms": ["expired"]}}, "limits.grace_ms must be a table, not"),
        (
            {"limits": {"grace_ms": {"revoked": 10_001}}},
            "limits.grace_ms.revoked must be a whole number from 0 to 10000, not 10001",
        ),
        ({"warm_contexts": 65}, "warm_contexts must be a whole number from 0 to 64, not 65"),
        ({"warm_contexts": -1}, "warm_contexts must be a whole number from 0 to 64, not -1"),
        ({"recycle": "always"}, "recycle must be 'off' or 'same-tenant', not 'always'"),
        ({"recycle": "same-tenant"}, "recycle needs warm_contexts"),
        ({"recycle_idle_s": 0}, "recycle_idle_s must be a whole number from 1 to 3600, not 0"),
        ({"recycle_leases": 0}, "recycle_leases must be a whole number of at least 1, not 0"),
        ({"placement": "tight"}, "placement must be 'spread' or 'pack', not 'tight'"),
        ({"colour": "red"}, "there is no setting colour; known are listen, driver, arch, shuffle_warps, launch_chains"),
        ({"launch_chains": "no"}, "launch_chains must be true or false, not 'no'"),
        ({"launch_chains": False, "driver": "cpu"}, "launch_chains is for cards"),
        ({"vram": [6]}, "vram must be a string or a list of strings, not .6."),
        ({"listen": ["ftp:there"]}, "'ftp:there' is not an address"),
        ({"listen": "tcp:127.0.0.1:9400", "http": "127.0.0.1:9400"}, "http and listen have the same address"),
        ({"max_connections": "many"}, "max_connections must be a whole number of at least 1, not 'many'"),
        ({"limits": {"max_ttl_s": 0}}, "limits.max_ttl_s must be .* not 0"),
        ({"limits": {"max_ttl_s": -5}}, "limits.max_ttl_s must be .* not -5"),
        ({"limits": 3}, "limits must be a table, not 3"),
        ({"socket_mode": "rwx"}, "socket_mode must be a file mode such as .0660. or 0o660, not "),
        ({"socket_mode": "0990"}, "socket_mode must be a file mode such as .0660. or 0o660, not "),
        ({"listen": ["unix:/s", "unix:/s"]}, "the same address twice"),
        ({"max_connections": 0}, "max_connections must be a whole number of at least 1, not 0"),
        ({"max_load_s": 2**31}, "max_load_s must be at most 2147483647, not 2147483648"),
        ({"limits": {"max_ttl_s": 10**20}}, "limits.max_ttl_s must be at most 2147483647, not 1"),
        ({"audit": "log"}, "audit must be an absolute path, not 'log'"),
        ({"state": "/a\0b"}, r"state must be an absolute path, not '/a\\x00b'"),
        ({"audit": "/log", "audit_required": "yes"}, "audit_required must be true or false, not 'yes'"),
        ({"audit_required": True}, "need audit, the folder"),
        ({"on_stop": "keep"}, "needs state, the folder"),
        ({"state": "/s", "on_stop": "kill"}, "on_stop must be 'end' or 'keep', not 'kill'"),
        ({"audit_head": "/head.json"}, "need audit, the folder"),
        (
            {"audit": "/log", "audit_file_size": "64"},
            "audit_file_size must be a size from 65536 to 1073741824 bytes, not '64'",
        ),
        ({"audit": "/log", "audit_file_size": "2GiB"}, "must be a size from 65536 to"),
        (
            {"audit": "/log", "audit_file_bytes": 1 << 20},
            "there is no setting audit_file_bytes; did you mean 'audit_file_size'",
        ),
        (
            {"audit": "/log", "audit_keep_files": 1},
            "audit_keep_files must be a whole number of at least 2, or 0, not 1",
        ),
        ({"sandbox": "off"}, "sandbox must be 'available' or 'required', not 'off'"),
        ({"sandbox_without": "seccomp"}, "sandbox_without must be 'user', 'capabilities', .* not 'seccomp'"),
        ({"sandbox_without": ["no_new_privs"]}, "sandbox_without must be .* not 'no_new_privs'"),
        ({"sandbox_without": ["descriptors"]}, "sandbox_without must be .* not 'descriptors'"),
        ({"worker_user": 65534}, "worker_user must be the name of a user, not 65534"),
        ({"max_load_s": 0}, "max_load_s must be a whole number of at least 1, not 0"),
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"driver = ", "is not TOML"),
        (b"\xff", "is not TOML"),
        (b"listen = " + b"[" * 2000, "is nested too deeply"),
        (bytes(MAX_SETTINGS_BYTES + 1), f"at most {MAX_SETTINGS_BYTES} bytes"),
    ],
)
def test_what_is_no_settings_file(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=said):
        load_config(path, {})


def test_a_settings_file_must_be_a_regular_file(tmp_path: Path) -> None:
    """Opening a FIFO would wait forever, and a device has no settings: the daemon would continue with the defaults."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/null")):
        with pytest.raises(ConfigError, match=f"{path}: it must be a regular file, not a folder, a FIFO or a device"):
            load_config(path, {})


def test_listening_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("listen = []\n")
    with pytest.raises(ConfigError, match="listen must name at least one address"):
        load_config(path, {})
