"""Which services `pointsman up` starts, and with which variables."""

from __future__ import annotations

from pointsman_cli.up import UpSettings, services


def test_router_and_gateway_share_a_process_unless_the_gateway_has_several() -> None:
    settings = UpSettings(engine=["http://127.0.0.1:8000"], policy="foresight", tokenizer=["m=/t"])
    shared = dict(services(settings, {}))
    apart = dict(services(settings, {"POINTSMAN_GATEWAY_PROCESSES": "2"}))
    assert ([*shared], [*apart]) == (["agent", "serve"], ["agent", "router", "gateway"])
    assert shared["agent"] == apart["agent"]
    assert apart["router"].items() <= shared["serve"].items()
    assert apart["gateway"].items() <= shared["serve"].items()
    assert apart["router"]["POINTSMAN_ROUTER_POLICY"] == "foresight"
    assert apart["gateway"]["POINTSMAN_GATEWAY_TOKENIZERS"] == "m=/t"
    # The gateway asks the router that listens beside it.
    assert apart["gateway"]["POINTSMAN_GATEWAY_ROUTERS"] == apart["router"]["POINTSMAN_ROUTER_LISTEN"]
