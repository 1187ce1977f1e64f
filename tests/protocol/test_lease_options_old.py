"""The declarations say what the tables say that stand beside them."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from gpulease.client import GpuBuilder
from gpulease.daemon.broker.handlers import lease_requests
from gpulease.daemon.broker.refusal import Refused
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.leases import LeaseTerms
from gpulease.daemon.record.journal import rows
from gpulease.protocol import lease_options, opcodes
from gpulease.protocol.lease_options import KEPT_OPTIONS, OPTIONS, WORKER_OPTIONS, LeaseOption, OptionRefused, Row
from gpulease.protocol.primitives import LeaseParameter

from .vector_json import VECTORS

OLD: dict[str, tuple[LeaseOption[Any, Any], Any]] = {
    "EXCLUSIVITY_TAG": (lease_options.EXCLUSIVITY, lease_requests.exclusivity_of),
    "MAX_KERNEL_TAG": (lease_options.MAX_KERNEL, lease_requests.max_kernel_ms_of),
    "WAITING_TAG": (lease_options.WAITING, lease_requests.waiting_of),
    "SUBMIT_TAG": (lease_options.SUBMIT, lease_requests.submit_bytes_of),
    "ORPHAN_TAG": (lease_options.ORPHAN, lease_requests.orphan_ms_of),
    "REGIONS_REQUIRED_TAG": (lease_options.REGIONS_REQUIRED, lease_requests.regions_required_of),
    "NAME_TAG": (lease_options.LEASE_NAME, lease_requests.name_of),
    "LABELS_TAG": (lease_options.LABELS, lease_requests.labels_of),
    "REQUEST_ID_TAG": (lease_options.REQUEST_ID, lease_requests.request_id_of),
}
VALUES = (
    *((), (b"",), (b"\0",), (b"\1",), (b"\2",), (b"\3",), (b"\4",), (b"\xff",), (b"\0", b"\0"), (b"\0\0",)),
    *((bytes(4),), (b"\0\0\0\1",), (bytes(8),), (b"\0" * 7 + b"\1",), (b"\0" * 7 + b"\1",) * 2, (bytes(16),)),
    *((bytes(range(16)),), (b"a" * 16, b"a" * 16), (b"model-a.1_B",), (b"-a",), (b"a" * 129,), (b"zone=a,tier=gold",)),
    *((b"zone",), (b"a=b,a=c",), (b"a=b,",), (b",".join(b"k%d=v" % n for n in range(33)),), (b"a=b",) * 2),
)


@pytest.mark.parametrize("name", OLD)
def test_tags_and_parsers(name: str) -> None:
    option, parse = OLD[name]
    assert option.tag == getattr(opcodes, name)
    for values in VALUES:
        parameters = tuple(LeaseParameter(option.tag, value) for value in values)
        before, after = (outcome(way, parameters) for way in (parse, option.read))
        assert before == after
        if values and not isinstance(before, tuple):
            assert option.parameter(before) == parameters[0]


def outcome(read: Callable[[tuple[LeaseParameter, ...]], Any], parameters: tuple[LeaseParameter, ...]) -> Any:
    try:
        return read(parameters)
    except (Refused, OptionRefused) as refused:
        return refused.failure.status, refused.failure.message


def test_every_tag() -> None:
    assert [option.tag for option in OPTIONS] == [getattr(opcodes, name) for name in OLD]
    assert {name for name in vars(opcodes) if name.endswith("_TAG")} == OLD.keys()


def test_terms_rows_and_workers() -> None:
    assert KEPT_OPTIONS.keys() == set(LeaseTerms._fields) - {"size_bytes", "ttl_ms", "epoch", "fleet_bytes"}
    defaults = LeaseTerms._field_defaults | {"exclusivity": opcodes.Exclusivity.SESSION_EXCLUSIVE}
    assert {name: defaults[name] for name in KEPT_OPTIONS} == {n: one.default for n, one in KEPT_OPTIONS.items()}
    later = {name: one.before for name, one in KEPT_OPTIONS.items() if not isinstance(one.before, Row)}
    assert later == {name: value for name, value in rows._LATER.items() if name in KEPT_OPTIONS}
    assert list(later) == [name for name in rows._LATER if name in KEPT_OPTIONS]
    worker = {item.name: item.default for item in fields(WorkerSpec)}
    assert {name: worker[name] for name in WORKER_OPTIONS} == {n: one.default for n, one in WORKER_OPTIONS.items()}


def test_documents() -> None:
    specification = (VECTORS.parent / "protocol" / "README.md").read_text(encoding="utf-8")
    guide = (VECTORS.parent / "client" / "README.md").read_text(encoding="utf-8")
    for option in OPTIONS:
        assert f"\n| {' | '.join(option.row)} |\n" in specification
        assert not option.call or f"\n| `.{option.call}` | {option.effect} |\n" in guide
        assert not option.method or callable(getattr(GpuBuilder, option.method))
