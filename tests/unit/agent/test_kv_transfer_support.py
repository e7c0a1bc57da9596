"""How an engine transfers KV, from what it announces and what the operator configures."""

from __future__ import annotations

import pytest

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.engine_address import parse_engine_address
from pointsman_agent.core.engine_metrics import Scrape, parse_metrics
from pointsman_agent.core.kv_transfer_support import engine_ids, kv_transfer

ANNOUNCED = {
    "connector": "LayerwiseMooncakeConnector",
    "protocol": "mooncake",
    "role": "kv_both",
    "layerwise": "True",
    "bootstrap_host": "",
    "bootstrap_port": "9001",
}


def transfer_of(url: str, **changes: str) -> pb.KvTransfer | None:
    return kv_transfer(parse_engine_address(url), ANNOUNCED | changes, "auto")


def mooncake(
    bootstrap: str, *, layerwise: bool = True, role: pb.KvRole.ValueType = pb.KV_ROLE_UNSPECIFIED
) -> pb.KvTransfer:
    return pb.KvTransfer(
        protocol=pb.KV_PROTOCOL_MOONCAKE, bootstrap_url=bootstrap, cache_dtype="auto", layerwise=layerwise, role=role
    )


def test_what_an_engine_announces() -> None:
    assert transfer_of("http://h:8000") == mooncake("http://h:9001")
    assert transfer_of("http://127.0.0.1:8000?advertise=http://[::2]:8000") == mooncake("http://[::2]:9001")
    assert transfer_of("http://h", bootstrap_host="b") == mooncake("http://b:9001")
    assert transfer_of("http://h", layerwise="False") == mooncake("http://h:9001", layerwise=False)
    assert transfer_of("http://h", role="kv_producer") == mooncake("http://h:9001", role=pb.KV_ROLE_PRODUCER)
    assert transfer_of("http://h", role="kv_consumer") == mooncake("http://h:9001", role=pb.KV_ROLE_CONSUMER)
    assert transfer_of("http://h", protocol="nixl") == pb.KvTransfer(protocol=pb.KV_PROTOCOL_NIXL, cache_dtype="auto")
    assert transfer_of("http://h", protocol="carrier-pigeon") is None


def test_an_operator_knows_where_others_reach_it() -> None:
    assert transfer_of("http://h?bootstrap=http://b:1") == mooncake("http://b:1")


def test_the_engine_knows_its_protocol_and_role() -> None:
    assert transfer_of("http://h?kv=nixl&kv-role=consumer", role="kv_producer") == mooncake(
        "http://h:9001", role=pb.KV_ROLE_PRODUCER
    )


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h", None),
        ("http://h?kv=mooncake", mooncake("http://h:8998", layerwise=False)),
        ("http://h?kv=mooncake&bootstrap=http://b:1", mooncake("http://b:1", layerwise=False)),
        ("http://h?kv=nixl", pb.KvTransfer(protocol=pb.KV_PROTOCOL_NIXL, cache_dtype="auto")),
        (
            "http://h?kv=mooncake&kv-role=producer",
            mooncake("http://h:8998", layerwise=False, role=pb.KV_ROLE_PRODUCER),
        ),
    ],
)
def test_an_engine_that_announces_nothing_is_what_the_operator_says(url: str, expected: pb.KvTransfer | None) -> None:
    """The two requests of a transfer are never sent at once to such an engine."""
    assert kv_transfer(parse_engine_address(url), {}, "auto") == expected


def test_an_announcement_is_read_from_the_page() -> None:
    labels = ",".join(f'{name}="{value}"' for name, value in ANNOUNCED.items())
    page = f'pointsman_kv_transfer_info{{{labels}}} 1.0\nvllm:num_requests_running{{engine="0"}} 2.0\n'
    scrape = parse_metrics(page.encode())
    assert scrape.kv_transfer == ANNOUNCED
    assert list(scrape.ranks) == [0]
    assert parse_metrics(b'vllm:num_requests_running{engine="0"} 2.0\n').kv_transfer == {}


@pytest.mark.parametrize(
    ("announced", "root", "place"),
    [
        ({}, "maker/tiny", "maker/tiny"),
        ({"tokenizer": "maker/tiny", "revision": "abc"}, "maker/tiny", "maker/tiny@abc"),
        ({"tokenizer": "maker/tokens", "revision": ""}, "/models/tiny", "maker/tokens"),
        ({"tokenizer": "/models/tokens", "revision": ""}, "/models/tiny", "/models/tokens"),
        ({"tokenizer": "/tmp/of/the/engine", "revision": ""}, "maker/tiny", "maker/tiny"),
    ],
)
def test_where_a_tokenizer_is_from(announced: dict[str, str], root: str, place: str) -> None:
    labels = ",".join(f'{name}="{value}"' for name, value in announced.items())
    page = f"pointsman_tokenizer_info{{{labels}}} 1.0\n" if announced else ""
    assert parse_metrics((page + 'vllm:num_requests_running{engine="0"} 2.0\n').encode()).tokenizer_place(root) == place


def test_engines_that_sent_wrong_kv_are_named_to_the_rank_that_refuses_them() -> None:
    name = "pointsman_kv_wrong_requests_total"
    page = (
        'vllm:num_requests_running{engine="0"} 2.0\n'
        f"# TYPE {name} counter\n"
        f'{name}{{engine="0",engine_id="p1",sender="http://p:1"}} 3.0\n'
        f'{name}{{engine="0",engine_id="p2",sender="http://p:1"}} 1.0\n'
        f'{name}{{engine="1",engine_id="q1",sender="http://q:1"}} 1.0\n'
    )
    scrape = parse_metrics(page.encode())
    assert scrape.wrong_kv == {
        ("http://p:1", "p1", 0): 3,
        ("http://p:1", "p2", 0): 1,
        ("http://q:1", "q1", 1): 1,
    }
    expected = [[("http://p:1", "p1", 3), ("http://p:1", "p2", 1)], [("http://q:1", "q1", 1)], []]
    assert [wrong(scrape, rank) for rank in range(3)] == expected


def test_an_older_package_names_senders_by_url_and_no_rank() -> None:
    scrape = parse_metrics(b'pointsman_kv_wrong_requests_total{sender="http://p:1"} 3.0\n')
    assert wrong(scrape, 0) == wrong(scrape, 1) == [("http://p:1", "", 3)]


def wrong(scrape: Scrape, rank: int) -> list[tuple[str, str, int]]:
    support = kv_transfer(parse_engine_address("http://h"), ANNOUNCED, "auto", scrape.wrong_kv, rank=rank)
    assert support is not None
    return [
        (wrong_requests.bootstrap_url, wrong_requests.engine_id, wrong_requests.requests)
        for wrong_requests in support.wrong_from
    ]


def test_engine_ids_are_read_by_rank() -> None:
    answer = {
        "0": {"engine_id": "e_dp0", "worker_addr": {"0": {"0": "tcp://h:1"}}},
        "1": {"engine_id": "e_dp1", "worker_addr": {}},
    }
    assert engine_ids(answer) == {0: "e_dp0", 1: "e_dp1"}
    # What no bootstrap server of today answers.
    assert engine_ids({"detail": "no", "2": {}, "3": "e", "4": {"engine_id": 7}, "\u00b2": {"engine_id": "e"}}) == {}


def test_only_mooncake_has_engine_ids() -> None:
    for kind, expected in (("mooncake", "e1"), ("nixl", "")):
        support = kv_transfer(parse_engine_address(f"http://h?kv={kind}"), {}, "auto", engine_id="e1")
        assert support is not None
        assert support.engine_id == expected
