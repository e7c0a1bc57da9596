"""Engines behind TLS with a private CA and an API key: parts that are configured with both reach them, others report why not."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.http_request import ask, serves
from tests.support.processes.pointsman import flag_words, pointsman_command, pointsman_process
from tests.support.processes.process import Process, free_port
from tests.support.waiting import WITHIN_S, until

KEY = "sk-engine"
CHAT = {"model": "pointsman-emulated", "messages": [{"role": "user", "content": "Which way?"}], "max_tokens": 2}


@dataclass
class Fleet:
    """A router and a gateway, an engine, and an agent that is not started."""

    folder: Path
    ca: Path
    router: str
    gateway: str
    engine: str
    agent_url: str
    agent: Process | None = None

    def start_agent(self, **settings: object) -> None:
        """Start the agent with these settings in addition to its addresses."""
        listen = self.agent_url.removeprefix("http://")
        flags = {"engines": self.engine, "routers": self.router, "metrics_listen": listen, "scrape_interval_s": 0.2}
        flags |= {"state_dir": self.folder / "state"}
        self.agent = pointsman_process("agent", self.folder, "agent", flags=flags | settings)
        self.agent.start()

    def doctor_says(self, sentence: str, **settings: object) -> bool:
        """Whether `pointsman doctor` prints the words of a sentence; long text is wrapped within its column."""
        flags = {"router": self.router, "gateway": self.gateway, "agent": self.agent_url, **settings}
        words = pointsman_command("doctor", *flag_words(flags))
        said = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout
        return set(re.findall(r"[\w-]+", sentence)) <= set(re.findall(r"[\w-]+", said))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    authority = Authority(tmp_path / "authority")
    certificate = authority.sign("engine")
    router, gateway, agent = (f"127.0.0.1:{free_port()}" for _ in range(3))
    port = free_port()
    emulated = {"port": port, "ssl_certfile": certificate.cert, "ssl_keyfile": certificate.key, "api_key": KEY}
    processes = [
        pointsman_process("engine", tmp_path, "emulate", flags=emulated),
        pointsman_process("router", tmp_path, "router", flags={"listen": router, "metrics_listen": ""}),
        pointsman_process(
            "gateway",
            tmp_path,
            "gateway",
            flags={"listen": gateway, "routers": router, "engine_ca": authority.ca, "engine_api_key": KEY},
        ),
    ]
    fleet = Fleet(tmp_path, authority.ca, router, f"http://{gateway}", f"https://127.0.0.1:{port}", f"http://{agent}")
    try:
        for process in processes:
            process.start()
        yield fleet
    finally:
        for started in (fleet.agent, *reversed(processes)):
            if started is not None and started.alive:
                started.stop()


def test_engines_behind_tls_with_a_key_are_reached(fleet: Fleet) -> None:
    fleet.start_agent(engine_ca=fleet.ca, engine_api_key=KEY)
    until(lambda: serves(fleet.gateway), within_s=WITHIN_S, what="a gateway that can place")
    answer = ask(f"{fleet.gateway}/v1/chat/completions", CHAT)
    assert answer.status == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2
    sentence = "answers, and reports its cached tokens is monitored"
    assert fleet.doctor_says(sentence, engine_ca=fleet.ca, engine_api_key=KEY)
    # A doctor with neither CA nor key, and one without the key.
    assert fleet.doctor_says("its certificate is not trusted")
    assert fleet.doctor_says("--engine-api-key", engine_ca=fleet.ca)


@pytest.mark.parametrize(
    ("with_ca", "said"),
    [(False, "the engine's certificate is not trusted"), (True, "does engine_api_key fit the engine's --api-key?")],
)
def test_an_agent_that_was_not_told_says_so_and_the_doctor_repeats_it(fleet: Fleet, with_ca: bool, said: str) -> None:
    fleet.start_agent(**({"engine_ca": fleet.ca} if with_ca else {}))

    def problem() -> str:
        if not serves(fleet.agent_url):
            return ""
        [engine] = json.loads(ask(f"{fleet.agent_url}/health").text)["engines"]
        return str(engine["problem"]) if not engine["healthy"] else ""

    until(lambda: said in problem(), within_s=WITHIN_S, what="the reason in the agent's /health")
    assert fleet.doctor_says(said)


def test_an_authority_that_is_no_file_ends_the_agent_with_a_sentence(fleet: Fleet) -> None:
    missing = fleet.folder / "nothing.pem"
    fleet.start_agent(engine_ca=missing)
    assert fleet.agent is not None
    agent = fleet.agent
    until(lambda: not agent.alive, within_s=WITHIN_S, what="the agent's end")
    assert "pointsman agent: " in agent.tail(3)
    assert str(missing) in agent.tail(3)
    assert "Traceback" not in agent.tail()
