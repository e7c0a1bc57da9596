"""Renders a chat as the engine does: with vLLM's normalisation of messages and transformers' Jinja environment.

The rendering follows vLLM 0.32 `renderers/chat_utils.py` (parts, tool calls, reasoning) and `renderers/hf.py` (content format,
developer role), and transformers' `utils/chat_template_utils.py` (environment, continue_final_message). What only the engine can
render (a template in the request, media that the template does not show itself) raises Unrenderable, and the request is placed
without keys. With other media the prompt is known up to the first media part.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import msgspec

from pointsman_gateway.core.api.decode_body import (
    COMMA_BYTES,
    LIST_BYTES,
    MAX_DEPTH,
    OBJECT_BYTES,
    STRING_BYTES,
    check_depth,
    memory_of_json,
    too_deep,
)
from pointsman_gateway.core.pauses import paced
from pointsman_gateway.core.tokens.render_budget import (
    MeteredEnvironment,
    RenderLimits,
    Unrenderable,
    hold,
    metered,
    whole_text,
)

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_PART_FIELDS = frozenset({"type", "text", "thinking", "refusal", "closed", "uuid", "name"})
_MEDIA_FIELDS = ("image_url", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "audio_url", "video_url")
# Types of parts whose only other field has the type's name -> the type that the engine passes to the template.
_MEDIA_TYPES = {
    "image_url": "image",
    "input_image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
_MEDIA_TAG = "MEDIA_TAG"
_BILLING_HEADER = "x-anthropic-billing-header"
_RESERVED_KWARGS = frozenset(
    {"messages", "tools", "documents", "chat_template", "tokenize", "return_dict", "continue_final_message", "padding"}
    | {"truncation", "max_length", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs", "conversation"}
)
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Maximum time from now within which the two instances of an offload render its prompt. The gateway's timeouts for two placements,
# prefill and transfer are four and a half minutes; the rest allows for clock differences. It is not a whole number of minutes or
# seconds, so that a format which shows only minutes or only seconds changes too.
RENDERED_APART = timedelta(seconds=617.3)
_LIMITS = RenderLimits()
# Bytes of memory from which it is counted without what is in the strings of arguments.
_LARGE_ARGUMENTS = 1 << 16
Message = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """A prompt's text. If it has media, only its first `known` characters equal the engine's prompt, and `media` is the content
    of the first media part; otherwise `known` is the whole length. `steady`: the text would be the same RENDERED_APART earlier or
    later."""

    text: str
    known: int
    media: bytes = b""
    steady: bool = True


class _Generation(jinja2.ext.Extension):
    """The `{% generation %}` block, which marks the assistant's output. In a prompt it renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """One compiled template. `special_tokens` (bos_token, ...) are variables of the template; strftime_now reads `clock`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Callable[[], datetime]) -> None:
        """Raises jinja2.TemplateError if `source` is not a valid template."""
        environment = MeteredEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.globals["raise_exception"] = _raise_exception
        self._clock = clock
        tree = environment.parse(source)
        self._source = source
        self._template = environment.compiled(source)
        self._globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)
        self._variables = jinja2.meta.find_undeclared_variables(tree)
        self.parts_as_dicts = _loops_over_content(tree)

    def render(self, body: Mapping[str, Any]) -> str:
        """Return the prompt of a chat completions `body` (parsed and checked) without media. Raises Unrenderable. Does not
        mutate."""
        rendered = self.read(body)
        if rendered.media:
            raise Unrenderable("a content part that is not text")
        return rendered.text

    def read(self, body: Mapping[str, Any], limits: RenderLimits = _LIMITS) -> Rendered:
        """Return the rendered prompt of a `body`, which may have media if the template shows media itself. Raises Unrenderable,
        as OverBudget if it exceeds `limits`, and ApiRequestError for arguments of tool calls that are nested too deeply."""
        media = next(_media(body["messages"]), None) if self.parts_as_dicts else None
        if media is None:
            text, steady = self._render(body, limits)
            return Rendered(text, len(text), steady=steady)
        if body.get("continue_final_message") is True:
            raise Unrenderable("media in a message to be continued")
        # The text before the first media part equals the prompt with a text in the part's place. If a template treats prompts
        # with media differently (omits the system prompt, moves media to the front), the two prompts differ before that place.
        (text, steady), (marked, _) = self._render(body, limits), self._render(body, limits, _MEDIA_TAG)
        known = marked.find(_MEDIA_TAG)
        if known < 0:
            raise Unrenderable("the template drops what is in the place of media")
        return Rendered(text, common_prefix(text, marked[:known]), msgspec.json.encode(media, order="sorted"), steady)

    def _render(self, body: Mapping[str, Any], limits: RenderLimits, mark: str = "") -> tuple[str, bool]:
        """Return the text, and whether it is steady. `mark` replaces media parts."""
        continue_final = body.get("continue_final_message") is True
        # The engine's default is True, also with continue_final_message, which forbids it: the engine refuses that request.
        add_generation = body.get("add_generation_prompt") is not False
        if continue_final and add_generation:
            raise Unrenderable("continue_final_message needs add_generation_prompt false")
        asked = body.get("chat_template_kwargs") or {}
        if _RESERVED_KWARGS & asked.keys():
            raise Unrenderable("chat_template_kwargs with a reserved name")
        kwargs = {name: value for name, value in asked.items() if name in self._variables}
        effort = body.get("reasoning_effort")
        if effort is not None:
            kwargs["reasoning_effort"] = effort
            if "enable_thinking" not in asked:
                kwargs["enable_thinking"] = effort != "none"
        kwargs = {**self._special_tokens, **kwargs}
        asked_clock: set[str] = set()

        def strftime_now(form: str) -> str:
            asked_clock.add(form)
            return self._clock().strftime(form)

        with metered(limits) as meter:
            messages = self._conversation(body["messages"], mark)
            final = _open_final_message(messages, self._source) if continue_final else None
            kwargs |= {"tools": _tools(body.get("tools")), "documents": body.get("documents")}
            # As Template.render(), without the chain of dictionaries that it copies each time.
            names = {
                **self._globals,
                "strftime_now": strftime_now,
                "messages": messages,
                **kwargs,
                "add_generation_prompt": add_generation,
            }
            try:
                text = whole_text(
                    self._template.root_render_func(self._template.new_context(names, shared=True)), meter
                )
            except Unrenderable:
                raise
            except Exception as error:  # a template may raise any exception on a client's content
                raise Unrenderable(f"the chat template failed: {type(error).__name__}") from error
        steady = not asked_clock or self._steady(asked_clock)
        return text if final is None else _cut_at_tag(text, final), steady

    def _steady(self, forms: set[str]) -> bool:
        """Whether all of `forms` give the same text now and RENDERED_APART earlier and later, and so also at times between."""
        now = self._clock()
        earlier, later = now - RENDERED_APART, now + RENDERED_APART
        return all(earlier.strftime(form) == now.strftime(form) == later.strftime(form) for form in forms)

    def _conversation(self, messages: list[Message], mark: str) -> list[Message]:
        if self.parts_as_dicts:
            hold(len(messages) * (2 * OBJECT_BYTES + LIST_BYTES))
        done = [_normalise(message, self.parts_as_dicts, mark) for message in paced(messages)]
        if any(message["role"] == "developer" for message in done) and not (
            '"developer"' in self._source or "'developer'" in self._source
        ):
            done = _merge_system([_as_system(message) for message in done])
        return done


def _normalise(message: Message, parts_as_dicts: bool, mark: str) -> Message:
    """Return one message as vLLM's `_parse_chat_message_content` and `_postprocess_messages` pass it to the template. If `mark`
    is not empty, that text replaces the message's media."""
    role, content = message["role"], message.get("content")
    if isinstance(content, str) and role in ("user", "assistant") and len(message) == 2:
        if not parts_as_dicts and next(iter(message)) == "role":
            return message
        return {"role": role, "content": [{"type": "text", "text": content}] if parts_as_dicts else content}
    parts = [] if content is None else [content] if isinstance(content, str) else content
    if role == "system":
        parts = _without_billing(parts)
    hold((2 + parts_as_dicts * len(parts)) * OBJECT_BYTES)
    out: Message = {"role": role}
    if role in ("tool", "system", "developer") and any(_media([message])):
        raise Unrenderable("media in a message that the engine flattens")
    done = [part for part in (_part(part, parts_as_dicts, mark) for part in parts) if part]
    if not parts_as_dicts:
        out["content"] = "\n".join(done)
    elif role == "tool":
        out["content"] = "\n".join(part["text"] for part in done)
    else:
        out["content"] = done
    if role == "assistant":
        if message.get("tool_calls") is not None:
            out |= _tool_calls(message["tool_calls"])
        reasoning = (
            message.get("reasoning") if message.get("reasoning") is not None else message.get("reasoning_content")
        )
        if reasoning is not None:
            out["reasoning"] = out["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        out["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        out["tools"] = message.get("tools")
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            out[name] = message[name]
    return out


def _media(messages: list[Message]) -> Iterator[Message]:
    """Yield the parts that are media."""
    for message in paced(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in _MEDIA_TYPES:
                yield part


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts, or arrays."""
    shorter = min(len(one), len(other))
    return bisect_left(range(shorter), True, key=lambda at: one[: at + 1] != other[: at + 1])


def _part(part: str | dict[str, Any], as_dict: bool, mark: str) -> Any:
    """Return a text part as text or {"type": "text", ...}, or a media part's replacement; None if the part is omitted."""
    if isinstance(part, str):
        return {"type": "text", "text": part} if as_dict else part
    kind = part.get("type")
    if as_dict and isinstance(kind, str) and kind in _MEDIA_TYPES and part.keys() == {"type", kind}:
        return {"type": "text", "text": mark} if mark else {"type": _MEDIA_TYPES[kind]}
    if (
        not isinstance(kind, str)
        or kind not in TEXT_PARTS
        or part.get("uuid") is not None
        or any(name in part for name in _MEDIA_FIELDS)
    ):
        raise Unrenderable("a content part that is not text")
    text = part.get(kind if kind in ("refusal", "thinking") else "text")
    if text is None:
        return None
    if not isinstance(text, str):
        raise Unrenderable("a text part without text")
    if not as_dict or (kind == "text" and len(part) == 2 and next(iter(part)) == "type"):
        return part if as_dict else text
    return {"type": "text", "text": text} | {name: part[name] for name in part if name not in _PART_FIELDS}


def _without_billing(parts: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if part.get("type") == "text" else None
        if not (isinstance(text, str) and text.startswith(_BILLING_HEADER)):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _tool_calls(calls: object) -> Message:
    """Return {"tool_calls": ...} with arguments as objects, as templates expect them; empty without calls."""
    if not isinstance(calls, list):
        raise Unrenderable("tool_calls must be a list")
    done: list[Message] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise Unrenderable("a tool call that is no function")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _loaded(arguments)
        # The engine's own types omit unknown fields and write the others in this order.
        known: Message = {name: call[name] for name in ("id",) if name in call}
        known["function"] = {
            "arguments": arguments if isinstance(arguments, dict) else {},
            "name": function.get("name"),
        }
        done.append(known | {name: call[name] for name in ("type",) if name in call})
        hold(2 * OBJECT_BYTES)
    return {"tool_calls": done} if done else {}


def _loaded(arguments: str) -> Any:
    """Return decoded arguments of a tool call; {} if they are no JSON. Raises ApiRequestError if they are nested too deeply."""
    objects, lists = arguments.count("{"), arguments.count("[")
    memory = objects * OBJECT_BYTES + lists * LIST_BYTES
    memory += arguments.count('"') * STRING_BYTES // 2 + arguments.count(",") * COMMA_BYTES
    hold(memory if memory < _LARGE_ARGUMENTS else memory_of_json(arguments, memory))
    try:
        loaded = json.loads(arguments)
    except ValueError:
        return {}
    except RecursionError:
        raise too_deep("arguments of a tool call are") from None
    if objects + lists > MAX_DEPTH:
        check_depth(loaded, "arguments of a tool call are")
    return loaded


def _tools(tools: object) -> list[dict[str, Any]] | None:
    """Return tools as vLLM's `ChatCompletionToolsParam.model_dump()` writes them: known fields, in its order, null if absent."""
    if tools is None:
        return None
    done: list[dict[str, Any]] = []
    given = tools if isinstance(tools, list) else []
    hold(3 * len(given) * OBJECT_BYTES)
    for tool in given:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise Unrenderable("a tool that is no function")
        known = {name: function.get(name) for name in ("name", "description", "parameters")}
        defer = function.get("defer_loading") if tool.get("defer_loading") is None else tool["defer_loading"]
        extra = {"strict": function.get("strict"), "defer_loading": defer}
        written: dict[str, Any] = {"type": "function"}
        written["function"] = known | {name: value for name, value in extra.items() if value is not None}
        if tool.get("defer_loading") is not None:
            written["defer_loading"] = tool["defer_loading"]
        done.append(written)
    return done


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _merge_system(messages: list[Message]) -> list[Message]:
    """Merge system messages into one at the front if one of them is not first (vLLM's `_consolidate_system_messages`)."""
    if not any(message["role"] == "system" and at > 0 for at, message in enumerate(messages)):
        return messages
    texts = []
    for message in messages:
        if message["role"] == "system":
            content = message["content"]
            texts.append(content if isinstance(content, str) else "\n".join(part["text"] for part in content))
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _open_final_message(messages: list[Message], source: str) -> str:
    """Append a tag to the last message's text; return the original text. Mutates `messages`."""
    last = messages[-1] = dict(messages[-1])
    content = last["content"]
    if "content" not in source:
        raise Unrenderable("the template shows no content to continue")
    if isinstance(content, str):
        last["content"] = content + _TAG
        return content
    for at in reversed(range(len(content))):
        if "text" in content[at]:
            text = str(content[at]["text"])
            last["content"] = [*content[:at], content[at] | {"text": text + _TAG}, *content[at + 1 :]]
            return text
    raise Unrenderable("no text to continue")


def _cut_at_tag(text: str, final: str) -> str:
    bare = _TAG.strip()
    if final.strip() not in text or bare not in text:
        raise Unrenderable("the template drops the message to continue")
    at = text.rindex(bare)
    return text[:at] if text[at : at + len(_TAG)] == _TAG else text[:at].rstrip()


def _loops_over_content(tree: jinja2.nodes.Template) -> bool:
    """Whether the template loops over a message's parts. vLLM then passes parts as dicts ("openai" format), else as text."""
    names = {"content"} & {
        argument.name for macro in tree.find_all(jinja2.nodes.Macro) for argument in macro.args
    }  # as in vLLM, a macro parameter of that name counts as the content

    def shows_content(node: jinja2.nodes.Node | None) -> bool:
        if isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test):
            return shows_content(node.node)
        if isinstance(node, jinja2.nodes.Getitem):
            if isinstance(node.arg, jinja2.nodes.Slice):
                return shows_content(node.node)
            return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
        if isinstance(node, jinja2.nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, jinja2.nodes.Name) and node.name in names

    macros = {macro.name: macro for macro in tree.find_all(jinja2.nodes.Macro)}
    before = -1
    while before != len(names):
        before = len(names)
        for assign in tree.find_all(jinja2.nodes.Assign):
            if isinstance(assign.target, jinja2.nodes.Name) and shows_content(assign.node):
                names.add(assign.target.name)
        for call in tree.find_all(jinja2.nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, jinja2.nodes.Name) else None
            if macro is not None:
                given = list(zip(macro.args, call.args, strict=False))
                names |= {parameter.name for parameter, argument in given if shows_content(argument)}
                by_name = {keyword.key for keyword in call.kwargs if shows_content(keyword.value)}
                names |= by_name & {parameter.name for parameter in macro.args}
    return any(shows_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))
