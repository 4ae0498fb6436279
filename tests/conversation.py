"""A conversation through PyPI's `openai`, as an application would have it: with the real engine, and with its stand-in.

Both say the two sentences of the lab's checkpoint, so words are compared.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

THOUGHT = "The question does not matter: these weights know one answer."
ANSWER = "Hello from the lab: a real engine produced every word of this."
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def hold(client: openai.OpenAI, model: str) -> None:
    """Ask, follow up with a stream, have a tool called and a form filled."""
    assert [entry.id for entry in client.models.list()] == [model]

    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
    answer = client.chat.completions.create(model=model, messages=messages)
    message = answer.choices[0].message
    assert (str(message.content).strip(), str(message.model_dump()["reasoning"]).strip()) == (ANSWER, THOUGHT)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 25

    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "Again"}]
    said = {"reasoning": "", "content": ""}
    pieces, reasons = 0, []
    for chunk in client.chat.completions.create(model=model, messages=messages, stream=True):
        delta = chunk.choices[0].delta.model_dump()
        pieces += bool(delta.get("content"))
        for name in said:
            said[name] += delta.get(name) or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert (said["content"].strip(), said["reasoning"].strip()) == (ANSWER, THOUGHT)
    assert pieces > 1
    assert [reason for reason in reasons if reason] == ["stop"]

    tool: ChatCompletionToolParam = {
        "type": "function",
        "function": {"name": "weather", "strict": True, "parameters": PLACE},
    }
    forced = client.chat.completions.create(
        model=model, messages=messages, tools=[tool], tool_choice="required", temperature=0
    )
    (call,) = forced.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})

    form = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": PLACE}},
    )
    assert json.loads(str(form.choices[0].message.content)) == {"city": "Oslo"}


def be_refused(client: openai.OpenAI, model: str) -> None:
    """See what the library makes of a key that nobody knows, and of a model that nobody serves."""
    stranger = client.with_options(api_key="a-key-that-nobody-was-given")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello"}], stream=True)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=[{"role": "user", "content": "Hello"}])
