"""vLLM's API server with a scripted engine core: what a client gets of an answer that is cut after each event and continued.

A module for inside_vllm.py. The output processor, the parsers and the stream's generator are vLLM's own; the outputs of the
engine core are those of the script.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.responses import api_router
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.parser.parser_manager import ParserManager
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from pointsman_connector.answer_continuation import register

SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>")
PROMPT = "a prompt"


def tokenizer() -> Any:
    """A token for each byte, and one for each special text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={character: at for at, character in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


SERVERS = {"chat": OpenAIServingChat, "messages": AnthropicServingMessages, "responses": OpenAIServingResponses}


class Server:
    """An API server of one of the APIs in SERVERS."""

    def __init__(self, api: str, tool_parser: str | None, reasoning_parser: str | None) -> None:
        register()
        self._api = api
        self.tokenizer = tokenizer()
        self.serving: Any = object.__new__(SERVERS[api])
        values: dict[str, Any] = {
            "parser_cls": ParserManager.get_parser(
                tool_parser_name=tool_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=tool_parser is not None,
                tokenizer=self.tokenizer,
            ),
            "model_config": SimpleNamespace(),
            "_include_reasoning_tokens_details": reasoning_parser is not None,
            "enable_force_include_usage": False,
            "enable_log_outputs": False,
            "enable_log_deltas": False,
            "enable_prompt_tokens_details": True,
            "enable_per_request_metrics": False,
            "request_logger": None,
            "response_role": "assistant",
            "default_chat_template_kwargs": {},
            "chat_template": None,
            "chat_template_content_format": "auto",
            "use_harmony": False,
            "tool_server": None,
            "enable_auto_tools": tool_parser is not None,
            "response_store_lock": asyncio.Lock(),
            "response_store": {},
        }
        for name, value in values.items():
            setattr(self.serving, name, value)
        type(self.serving).system_fingerprint = None

    async def stream(
        self, script: list[list[int]], begun: str, stop: list[str], interval: int = 1, **defaults: Any
    ) -> list[str]:
        """The events of an answer whose engine core puts out `script` after what is told. `interval`: the server's
        --stream-interval. `defaults`: sampling parameters that the engine itself sets."""
        request = self._request(begun, stop)
        processor = OutputProcessor(self.tokenizer, log_stats=False, stream_interval=interval)
        queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
        total = sum(map(len, script))
        params = SamplingParams(
            max_tokens=10_000,
            stop=stop,
            output_kind=RequestOutputKind.DELTA,
            extra_args=dict(request.vllm_xargs or {}),
            skip_special_tokens=False,
            **defaults,
        )
        params.update_from_generation_config({}, self.tokenizer.convert_tokens_to_ids(SPECIAL[-1]))
        ids = self.tokenizer.encode(PROMPT)
        core = EngineCoreRequest("r", ids, None, params, None, 0.0, None, None, None, external_req_id="r")
        processor.add_request(core, PROMPT, None, 0, queue)
        assert core.prompt_token_ids is not None
        before = len(core.prompt_token_ids) - len(ids)

        async def outputs() -> Any:
            at = 0
            for number, piece in enumerate(script):
                at += len(piece)
                if at <= before:
                    continue
                last = FinishReason.STOP if number == len(script) - 1 else None
                processor.process_outputs([EngineCoreOutput("r", piece, finish_reason=last)])
                while (output := queue.get_nowait()) is not None:
                    yield output
            while (output := queue.get_nowait()) is not None:
                yield output

        assert total
        metadata = RequestResponseMetadata(request_id="r")
        if self._api == "responses":
            return [event async for event in self._response_events(request, params, outputs(), metadata)]
        events = self.serving.chat_completion_stream_generator(
            request, outputs(), "r", "m", [], self.tokenizer, metadata, {}
        )
        if self._api == "messages":
            events = self.serving.message_stream_converter(events)
        return [event async for event in events]

    def _request(self, begun: str, stop: list[str]) -> Any:
        asked: dict[str, Any] = {"model": "m", "stream": True, "stop": stop, "vllm_xargs": {"pointsman_answer": begun}}
        function = {"name": "get", "parameters": {"type": "object"}}
        if self._api == "responses":
            tools = [{"type": "function", **function}]
            return ResponsesRequest(**asked, input=PROMPT, tools=tools, request_id="resp_1", store=False)
        return ChatCompletionRequest(
            **asked,
            messages=[{"role": "user", "content": PROMPT}],
            stream_options={"include_usage": True, "continuous_usage_stats": self._api == "messages"},
            tools=[{"type": "function", "function": function}],
        )

    def _response_events(self, request: Any, params: Any, outputs: Any, metadata: Any) -> Any:
        """As `create_responses` and its route do."""
        context = SimpleContext(parser_cls=self.serving.parser_cls, tokenizer=self.tokenizer, request=request)

        async def contexts() -> Any:
            async for output in outputs:
                context.append_output(output)
                yield context

        generator = self.serving.responses_stream_generator(
            request, params, contexts(), context, "m", self.tokenizer, metadata
        )
        return api_router._convert_stream_to_sse_events(generator)


def ids_and_events(events: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """What comments tell, and the events' data."""
    lines = "".join(events).split("\n")
    ids = "".join(line.partition("x")[0] for line in lines if line.startswith(":"))
    return ids, [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def gist_of_messages(events: list[str]) -> dict[str, Any]:
    """What a client of Messages has of these events, and what is told."""
    ids, parsed = ids_and_events(events)
    found: dict[str, Any] = {
        "blocks": {},
        "roles": 0,
        "finish": "",
        "usage": None,
        "told": ids,
        "open": [],
        "order": [],
    }
    for event in parsed:
        match event["type"]:
            case "message_start":
                found["roles"] += 1
            case "content_block_start":
                block = event["content_block"]
                assert str(event["index"]) not in found["blocks"], "a block begins twice"
                found["blocks"][str(event["index"])] = [block["type"], block.get("name") or "", ""]
                found["open"].append(event["index"])
            case "content_block_delta":
                assert found["open"] == [event["index"]], "a part of a block that is not open"
                delta = event["delta"]
                text = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
                found["blocks"][str(event["index"])][2] += text
            case "content_block_stop":
                found["open"].remove(event["index"])
            case "message_delta":
                found["finish"], found["usage"] = event["delta"]["stop_reason"], event["usage"]
            case other:
                found["order"].append(other)
    return found


def gist_of_responses(events: list[str]) -> dict[str, Any]:
    """What a client of Responses has of these events, and what is told."""
    ids, parsed = ids_and_events(events)
    found: dict[str, Any] = {"roles": 0, "items": {}, "usage": None, "told": ids, "order": []}
    assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
    for event in parsed:
        found["order"].append(event["type"].removesuffix(".delta"))
        match event["type"]:
            case "response.created":
                found["roles"] += 1
                found["id"] = event["response"]["id"]
            case "response.output_item.added":
                item = event["item"]
                found["items"][str(event["output_index"])] = [item["type"], item["id"], item.get("call_id"), "", None]
            case "response.output_item.done":
                found["items"][str(event["output_index"])][4] = event["item"]
            case "response.completed":
                response = event["response"]
                assert response["id"] == found["id"]
                found["usage"], found["output"] = response["usage"], response["output"]
            case kind if kind.endswith(".delta"):
                output_item = found["items"][str(event["output_index"])]
                assert output_item[1] == event["item_id"], "a part of an item with another id"
                output_item[3] += event["delta"]
    found["order"] = [kind for kind, _ in itertools.groupby(found["order"])]
    return found


def gist(events: list[str]) -> dict[str, Any]:
    """What a client has of these events, and what is told."""
    ids, parsed = ids_and_events(events)
    found: dict[str, Any] = {
        "content": "",
        "reasoning": "",
        "calls": {},
        "roles": 0,
        "finish": "",
        "usage": None,
        "told": ids,
    }
    for chunk in parsed:
        assert "error" not in chunk, chunk
        found["usage"] = chunk.get("usage") or found["usage"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            found["roles"] += "role" in delta
            found["finish"] = choice.get("finish_reason") or found["finish"]
            for name in ("content", "reasoning"):
                found[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                known = found["calls"].setdefault(str(call["index"]), ["", ""])
                known[0] += (call.get("function") or {}).get("name") or ""
                known[1] += (call.get("function") or {}).get("arguments") or ""
    return found


def cut_everywhere(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the whole answer and, for each number of events, what a client has whose answer is cut there and continued."""
    of = {"chat": gist, "messages": gist_of_messages, "responses": gist_of_responses}[asked["api"]]
    server = Server(asked["api"], asked["tool_parser"], asked["reasoning_parser"])
    ids = server.tokenizer.encode(asked["text"] + "<|im_end|>")
    script, at = [], 0
    for size in asked["sizes"] * len(ids):
        if piece := ids[at : at + size]:
            script.append(piece)
        at += size
    stop, (first, second) = asked["stop"], asked["intervals"]
    whole = asyncio.run(server.stream(script, "", stop, first))
    joined = []
    for events in range(1, len(whole)):
        begun = of(whole[:events])["told"]
        rest = asyncio.run(server.stream(script, begun, stop, second))
        joined.append(of(whole[:events] + rest))
    return {"whole": of(whole), "joined": joined}


def untold(asked: dict[str, Any]) -> list[str]:
    """The events of an answer that no other engine could continue, because of the engine's own defaults."""
    server = Server(asked["api"], None, None)
    script = [[token] for token in server.tokenizer.encode("one two<|im_end|>")]
    return asyncio.run(server.stream(script, "", [], presence_penalty=0.5))
