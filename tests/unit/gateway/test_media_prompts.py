"""A prompt with media is known up to the first of them, and no further."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman_gateway.core.api import Endpoint, parse
from pointsman_gateway.core.tokens import encoders
from pointsman_gateway.core.tokens.chat_template import ChatTemplate
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer, Prompt
from pointsman_gateway.core.tokens.render_budget import Unrenderable
from pointsman_gateway.core.tokens.token_cache import TokenCache
from tests.support import tokenizer_families

# Qwen 2 VL's: media where they stand.
IN_PLACE = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}{{- '<|im_start|>assistant\\n' }}"""
# Another kind of template: a text in front depends on the number of media.
IN_FRONT = """{%- set seen = namespace(images=0) %}{%- for message in messages %}{%- for part in message.content %}
{%- if part.type == 'image' %}{%- set seen.images = seen.images + 1 %}{%- endif %}{%- endfor %}{%- endfor %}
{{- 'Track 1 with ' ~ seen.images ~ ' pictures' }}
{%- for message in messages %}{%- for part in message.content %}{{- part.text }}{%- endfor %}{%- endfor %}"""
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
OTHER = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}


def model(source: str, *added: str) -> tuple[ModelTokenizer, ChatTemplate]:
    tokenizer = tokenizer_families.qwen()
    tokenizer.add_special_tokens(list(added))
    template = ChatTemplate(source, {}, lambda: datetime(2026, 3, 4))
    return ModelTokenizer(tokenizer, template, None, cache=TokenCache(1 << 20)), template


def read(tokenizer: ModelTokenizer, messages: list[Any]) -> Prompt:
    return tokenizer.prompt(parse(Endpoint.CHAT, json.dumps({"model": "m", "messages": messages}).encode()))


def user(*parts: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts],
    }


def engines_text(template: ChatTemplate, messages: list[Any]) -> str:
    return template.read({"messages": messages}).text


@pytest.fixture(scope="module")
def qwen_vl() -> tuple[ModelTokenizer, ChatTemplate]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoders.FastEncoder, "least_chars", 1)
        return model(IN_PLACE, "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


TEXTS = st.text(st.sampled_from("ab \n./é你<|>im_startMEDIATG"), max_size=30)


@settings(max_examples=300)
@given(st.lists(TEXTS, max_size=3), TEXTS, st.lists(TEXTS | st.just(OTHER), max_size=3))
def test_all_tokens_before_the_first_image_are_known(
    qwen_vl: tuple[ModelTokenizer, ChatTemplate], before: list[str], last: str, after: list[Any]
) -> None:
    tokenizer, template = qwen_vl
    messages = [*(user(text) for text in before), user(last, IMAGE, *after), user("Next.")]
    prompt = read(tokenizer, messages)
    whole = tokenizer.whole(engines_text(template, messages))
    assert prompt.media
    assert prompt.ids == whole[: len(prompt.ids)]
    if "MEDIA_TAG" not in "".join([*before, last]):
        start = tokenizer.whole("<|vision_start|>")[0]
        assert whole[len(prompt.ids)] == start
        assert start not in prompt.ids


def test_a_placeholder_that_is_text_may_change_what_is_before_it() -> None:
    tokenizer, template = model(IN_PLACE.replace("<|vision_start|><|image_pad|><|vision_end|>", "(a picture)"))
    messages = [user("x" * 500), user("the points", IMAGE)]
    prompt = read(tokenizer, messages)
    whole = tokenizer.whole(engines_text(template, messages))
    assert 0 < len(prompt.ids) < len(whole)
    assert prompt.ids == whole[: len(prompt.ids)]
    assert len(prompt.ids) <= len(tokenizer.whole("<|im_start|>user\n" + "x" * 500 + "<|im_end|>\n"))


def test_a_template_that_tells_of_images_in_front_leaves_nothing_to_know() -> None:
    tokenizer, _ = model(IN_FRONT)
    assert len(read(tokenizer, [user("the points " * 100, IMAGE)]).ids) == 0


def test_the_first_image_names_what_goes_on_from_it(qwen_vl: tuple[ModelTokenizer, ChatTemplate]) -> None:
    tokenizer, _ = qwen_vl
    one, same, other = (read(tokenizer, [user("a", image), user("b")]) for image in (IMAGE, IMAGE, OTHER))
    assert one.media == same.media != other.media
    assert one.ids == other.ids


@pytest.mark.parametrize(
    "message",
    [
        user({**IMAGE, "uuid": "1"}),
        user({"type": "image_embeds", "image_embeds": "x"}),
        {"role": "tool", "tool_call_id": "1", "content": [IMAGE]},
        {"role": "system", "content": [IMAGE]},
    ],
)
def test_other_media_cannot_be_rendered(qwen_vl: tuple[ModelTokenizer, ChatTemplate], message: dict[str, Any]) -> None:
    with pytest.raises(Unrenderable):
        read(qwen_vl[0], [message])


def test_media_that_the_engine_puts_into_the_text_cannot_be_rendered() -> None:
    """Where a template shows a message's content as one text, the engine's model class decides how media stand in it."""
    tokenizer, _ = tokenizer_families.model("qwen", TokenCache(1 << 20))
    with pytest.raises(Unrenderable):
        read(tokenizer, [user("x", IMAGE)])
