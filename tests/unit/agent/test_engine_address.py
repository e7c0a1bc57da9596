"""An engine's address, with all that an operator can say of it."""

from __future__ import annotations

import pytest

from pointsman_agent.core.engine_address import offset_port, parse_engine_address


def test_addresses_with_options() -> None:
    target = parse_engine_address(
        "http://127.0.0.1:8000/?events=tcp://127.0.0.1:5557&replay=tcp://127.0.0.1:5558&advertise=http://10.0.0.7:9000&gpus=0,3"
    )
    assert target.url == "http://127.0.0.1:8000"
    assert (target.instance_id(None), target.instance_id(1)) == ("10.0.0.7:9000", "10.0.0.7:9000/1")
    assert (target.events, target.replay, target.gpus) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", (0, 3))
    assert parse_engine_address("https://host").instance_id(None) == "host:443"
    assert parse_engine_address("http://[::1]:8000").instance_id(None) == "[::1]:8000"


@pytest.mark.parametrize(
    ("text", "kv", "bootstrap"),
    [
        ("http://h", "", ""),
        ("http://h?kv=nixl", "nixl", ""),
        ("http://h?kv=mooncake", "mooncake", ""),
        ("http://h?bootstrap=http://b:1", "", "http://b:1"),
        ("http://h?kv=mooncake&bootstrap=http://b:1/", "mooncake", "http://b:1"),
    ],
)
def test_how_an_engine_passes_kv_on(text: str, kv: str, bootstrap: str) -> None:
    target = parse_engine_address(text)
    assert (target.kv, target.bootstrap) == (kv, bootstrap)
    assert target.kv_role == "both"


def test_what_an_engine_computes_with() -> None:
    target = parse_engine_address("http://h?hardware=h200&long-prefill-token-threshold=4096")
    assert (target.hardware, target.long_prefill_token_threshold) == ("h200", 4_096)
    assert (
        parse_engine_address("http://h").hardware,
        parse_engine_address("http://h").long_prefill_token_threshold,
    ) == ("", 0)


def test_what_an_engine_wants_of_a_transfer() -> None:
    assert parse_engine_address("http://h?kv=mooncake&kv-role=producer").kv_role == "producer"
    assert parse_engine_address("http://h?kv=nixl&kv-role=consumer").kv_role == "consumer"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:8000",
        "http://",
        "http://h?evnts=tcp://a:1",
        "http://h?replay=tcp://a:1",
        "http://h?events=carrier-pigeon://loft",
        "http://h?events=tcp://a:1&replay=a:2",
        # What ZeroMQ binds, but does not connect to.
        "http://h?events=tcp://*:5557",
        "http://h?events=tcp://a:1&replay=tcp://a",
        "http://h?events=ipc://",
        "http://h:x",
        "http://h?gpus=a",
        "http://h?kv=carrier-pigeon",
        "http://h?kv=nixl&bootstrap=http://b:1",
        "http://h?kv=mooncake&bootstrap=b:1",
        "http://h?kv=mooncake&kv-role=kv_both",
        "http://h?kv-role=both",
        "http://h?kv=mooncake&decode-first=1",
        "http://h?long-prefill-token-threshold=-1",
        "http://h?long-prefill-token-threshold=4k",
        "http://h?long-prefill-token-threshold=9999999999",
    ],
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"engine|[Pp]ort"):
        parse_engine_address(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("localhost:8000", "write http://HOST:PORT or https://HOST:PORT"),
        ("http://h?evnts=tcp://a:1", "the unknown option evnts .known: advertise, bootstrap, events, "),
        ("http://h:1,http://h:2", "several are separated by blanks, not by commas"),
        ("http://h:x", "the port must be a number"),
        ("http://h?kv", "options are NAME=VALUE with & between, not 'kv'"),
        ("http://h?gpus=all", "gpus are indices of devices with commas between, such as 0,1, not 'all'"),
    ],
)
def test_what_to_write_instead_is_told(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_engine_address(text)


def test_event_addresses() -> None:
    assert offset_port("tcp://h:5557", 2) == "tcp://h:5559"
    assert offset_port("ipc:///run/kv/tcp-events:1", 2) == "ipc:///run/kv/tcp-events:3"
    assert offset_port("ipc:///run/kv/events", 2) == "ipc:///run/kv/events"
    assert offset_port("", 2) == ""
