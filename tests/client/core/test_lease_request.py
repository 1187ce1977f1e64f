import asyncio
from typing import Any

import pytest

from gpulease.client import GpuBuilder, GpuExclusivityClass, GpuSession, InvalidRequest, aio
from gpulease.client.core.lease_request import address_of, milliseconds
from gpulease.protocol.address import DEFAULT_ADDRESS


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("min_vram", 0),
        ("min_vram", -5),
        ("min_vram", 1.5),
        ("min_vram", 2**64),
        ("min_vram", "much"),
        ("min_vram", ""),
        ("min_vram", "17592186044416TiB"),
        ("submits", "64 MiBs"),
        ("lease_secs", 0),
        ("lease_secs", float("nan")),
        ("lease_secs", float("inf")),
        ("lease_secs", "60"),
        ("lease_secs", True),
        ("lease_secs", 2**32),
        ("timeout", -1),
        ("max_kernel_secs", 0),
        ("orphan_secs", -1),
        ("orphan_secs", 2**32),
        ("parkable", -1),
        ("parkable", 2**32),
        ("max_kernel_secs", 2**32),
        ("exclusivity", 4),
        ("exclusivity", 255),
        ("exclusivity", "shared"),
        ("weight", 0),
        ("weight", 65536),
        ("weight", 1.5),
        ("waiting", 3),
        ("waiting", "spin"),
        ("device", ""),
        ("device", "x" * 2000),
    ],
)
def test_nonsense_is_refused_at_once(method: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=method):
        getattr(GpuBuilder(), method)(value)


def test_a_lease_needs_a_size() -> None:
    with pytest.raises(InvalidRequest, match="size is missing"):
        GpuBuilder().acquire()


def test_the_last_word_counts() -> None:
    wish = GpuBuilder().min_vram(1).min_vram(2).exclusivity(1).exclusivity(GpuExclusivityClass.SHARED)._request()
    assert wish.size_bytes == 2
    assert [parameter.value for parameter in wish.parameters] == [b"\0"]


@pytest.mark.parametrize("builder", [GpuBuilder, aio.GpuBuilder])
def test_sizes_are_numbers_or_as_people_write_them(builder: type[GpuBuilder | aio.GpuBuilder]) -> None:
    written, counted = builder().min_vram("4GiB").submits("64 MiB"), builder().min_vram(4 << 30).submits(64 << 20)
    assert written._request() == counted._request()
    assert written._request().size_bytes == (4 << 30) + (64 << 20)


@pytest.mark.parametrize("builder", [GpuBuilder, aio.GpuBuilder])
def test_sizes_that_do_not_fit_together_are_refused(builder: type[GpuBuilder | aio.GpuBuilder]) -> None:
    request = builder().min_vram(1).submits(2**64 - 2)._request()
    assert request.size_bytes == 2**64 - 1
    with pytest.raises(InvalidRequest, match=r"min_vram and submits together must be from 1 to 18446744073709551615"):
        builder().min_vram(1).submits(2**64 - 1)._request()


def test_times_are_rounded_up_to_whole_milliseconds() -> None:
    assert milliseconds(0.0001, "x", least_ms=1) == 1
    assert milliseconds(1.5, "x", least_ms=1) == 1500
    assert milliseconds(0, "x", least_ms=0) == 0


@pytest.mark.parametrize("seconds", [4294968, 1e306, -1e308, -1])
def test_a_time_that_does_not_fit_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match=r"lease_secs must be from 0.001 s to 4294967 s, not "):
        GpuBuilder().lease_secs(seconds)


def test_where_the_daemon_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPULEASE_ADDRESS", raising=False)
    assert str(address_of(None)) == DEFAULT_ADDRESS
    monkeypatch.setenv("GPULEASE_ADDRESS", "tcp:127.0.0.1:5")
    assert str(address_of(None)) == "tcp:127.0.0.1:5"
    assert str(address_of("unix:/x")) == "unix:/x"
    with pytest.raises(InvalidRequest, match="the daemon's address: 'nonsense' is not an address"):
        address_of("nonsense")


def test_a_time_with_a_unit_says_how_to_write_it() -> None:
    with pytest.raises(InvalidRequest, match=r"must be a number of seconds, not '10m'.*600 for ten minutes"):
        GpuBuilder().lease_secs("10m")  # type: ignore[arg-type]


@pytest.mark.parametrize("builder", [GpuBuilder(), aio.GpuBuilder()])
def test_a_builder_in_a_lease_s_place_says_to_acquire(builder: Any) -> None:
    session = GpuSession if isinstance(builder, GpuBuilder) else aio.GpuSession
    with pytest.raises(InvalidRequest, match=r"must be a lease, not a GpuBuilder.*acquire\(\)"):
        session(builder)
    with pytest.raises(AttributeError, match=r"has no 'renew', because it is not a lease yet.*acquire\(\)"):
        builder.renew(5)
    with pytest.raises(InvalidRequest, match=r"is not a lease.*acquire\(\)"), builder:
        pass

    async def main() -> None:
        async with builder:
            pass

    with pytest.raises(InvalidRequest, match=r"is not a lease.*acquire\(\)"):
        asyncio.run(main())


def test_a_lease_that_was_not_awaited_says_so() -> None:
    opening = aio.GpuBuilder().acquire()
    with pytest.raises(InvalidRequest, match=r"must be a lease, not .*\. Await it"):
        aio.GpuSession(opening)  # type: ignore[arg-type]
    opening.close()
