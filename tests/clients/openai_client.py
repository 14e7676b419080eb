"""Tests of a mesh with the official OpenAI client.

    openai_client.py URL KEY MODEL
"""

import json
import re
import sys
from typing import Literal

import openai
import pydantic

from forms import CALLS, call_of, check_form
from tasks import TASKS, check, mesh

url, key, model = mesh()
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
messages = [{"role": "user", "content": "Write a short note about a trip to Oslo."}]
settings = {"model": model, "temperature": 0.7, "seed": 11, "max_tokens": 24}


# Chat
answer = client.chat.completions.create(messages=messages, **settings)
text = answer.choices[0].message.content
check(answer.object == "chat.completion" and answer.model == model, answer)
check(answer.choices[0].message.role == "assistant", answer)
check(answer.choices[0].finish_reason in ("stop", "length"), answer)
check(answer.usage.completion_tokens <= 24, answer.usage)
check(answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, answer.usage)
raw = client.chat.completions.with_raw_response.create(messages=messages, **settings)
check(raw.parse().choices[0].message.content == text, "the same seed gave another text")
check(raw.headers.get("x-request-id"), "no request id")

# Several choices, log-probabilities
answer = client.chat.completions.create(messages=messages, n=2, logprobs=True, top_logprobs=2, **settings)
check([choice.index for choice in answer.choices] == [0, 1], answer)
for choice in answer.choices:
    check(all(len(token.top_logprobs) == 2 for token in choice.logprobs.content), choice.logprobs)
    check(all(token.logprob <= 0 for token in choice.logprobs.content), choice.logprobs)

# Streaming
events = list(
    client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **settings
    )
)
pieces = [choice.delta.content or "" for event in events for choice in event.choices]
check("".join(pieces) == text, f"streamed: {''.join(pieces)!r}, whole: {text!r}")
check(len({event.id for event in events}) == 1, "the id changes within a stream")
check(events[-1].choices == [] and events[-1].usage.completion_tokens > 0, events[-1])
check(all(event.usage is None for event in events[:-1]), "usage before the end")
check(events[-2].choices[0].finish_reason in ("stop", "length"), events[-2])
events = list(client.chat.completions.create(messages=messages, stream=True, **settings))
check(all(event.choices for event in events), "an event without choices, though usage was not requested")

# The streaming helper of the client, which reassembles the answer.
with client.chat.completions.stream(messages=messages, **settings) as stream:
    for _ in stream:
        pass
    # Reads the snapshot, since the helper's final answer is an error where the token limit was reached.
    check(stream.current_completion_snapshot.choices[0].message.content == text, "the helper's text differs")

# Tools: each request to its end, whole and through the helper, which reassembles calls.
def tool(name, **parameters):
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}


tools = [
    tool("get_weather", city="string", days="integer"),
    tool("get_stock", item="string"),
    tool("create_order", item="string", count="integer", customer="string"),
]
greedy = {"model": model, "temperature": 0, "max_tokens": 64, "tools": tools}


def whole(history):
    return client.chat.completions.create(messages=history, **greedy).choices[0]


def helped(history):
    with client.chat.completions.stream(messages=history, **greedy) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    if choice.message.tool_calls:
        check("tool_calls.function.arguments.done" in kinds, kinds)
    return choice


def loop(ask, say, result):
    """Returns the calls and the answer in the end."""
    history, called = [{"role": "user", "content": ask}], []
    while True:
        choice = say(history)
        calls = choice.message.tool_calls or []
        check(choice.finish_reason == ("tool_calls" if calls else "stop"), choice)
        if not calls:
            return called, choice.message.content
        check(choice.message.content is None, choice)
        history.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in calls:
            check(call.id.startswith("call_") and call.type == "function", call)
            called.append((call.function.name, json.loads(call.function.arguments)))
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})


for task in TASKS:
    for say in whole, helped:
        called, said = loop(task.ask, say, task.result)
        check(called == [(task.name, task.arguments)], called)
        check(said == task.answer, said)

# Forced calls, whole and streamed
ask = [{"role": "user", "content": "How many lamps are in stock?"}]
named = {"type": "function", "function": {"name": "get_stock"}}
for choice, names, finish in [
    ("required", {"get_weather", "get_stock", "create_order"}, "tool_calls"),
    (named, {"get_stock"}, "stop"),
]:
    forced = greedy | {"tool_choice": choice, "parallel_tool_calls": False}
    answer = client.chat.completions.create(messages=ask, **forced).choices[0]
    call = answer.message.tool_calls[0].function
    check(answer.finish_reason == finish and call.name in names, answer)
    check(isinstance(json.loads(call.arguments), dict), call)
    events = list(client.chat.completions.create(messages=ask, stream=True, **forced))
    parts = [part.function for event in events for part in event.choices[0].delta.tool_calls or []]
    check("".join(part.name or "" for part in parts) == call.name, parts)
    check("".join(part.arguments or "" for part in parts) == call.arguments, parts)
    check(events[-1].choices[0].finish_reason == finish, events[-1])


# Answers that a schema binds
class Stop(pydantic.BaseModel):
    city: Literal["Oslo", "Rome"]
    days: int = pydantic.Field(ge=1, le=9)


class Trip(pydantic.BaseModel):
    stops: list[Stop] = pydantic.Field(min_length=1, max_length=2)
    by_train: bool
    note: Literal["none", "short"] | None


bound = settings | {"max_tokens": 128}
parsed = client.chat.completions.parse(messages=messages, response_format=Trip, **bound).choices[0]
check(parsed.finish_reason == "stop" and isinstance(parsed.message.parsed, Trip), parsed)
with client.chat.completions.stream(messages=messages, response_format=Trip, **bound) as stream:
    streamed = stream.until_done().get_final_completion().choices[0].message.parsed
check(streamed == parsed.message.parsed, streamed)
answer = client.responses.parse(model=model, input="A trip to Oslo.", text_format=Trip, max_output_tokens=128)
check(isinstance(answer.output_parsed, Trip), answer)

# Strict tools, whose arguments the client parses
strict = greedy | {"tools": [openai.pydantic_function_tool(call) for call in CALLS], "parallel_tool_calls": False}
for task in TASKS:
    named = {"type": "function", "function": {"name": task.name}}
    for choice in "auto", "required", named:
        asked = {"messages": [{"role": "user", "content": task.ask}], "tool_choice": choice}
        answer = client.chat.completions.parse(**asked, **strict).choices[0].message
        with client.chat.completions.stream(**asked, **strict) as stream:
            streamed = stream.until_done().get_final_completion().choices[0].message
        for message in answer, streamed:
            check(len(message.tool_calls) == 1, message)
            check_form(message.tool_calls[0].function.parsed_arguments, call_of(task))

# Choices and expressions
words = {"guided_choice": ["sunny", "it rains"]}
answer = client.chat.completions.create(messages=messages, extra_body=words, **bound)
check(answer.choices[0].message.content in words["guided_choice"], answer)
pattern = {"structured_outputs": {"regex": "[A-Z]{2}-[0-9]{3}"}}
answer = client.completions.create(prompt="SELECT", extra_body=pattern, **bound)
check(re.fullmatch("[A-Z]{2}-[0-9]{3}", answer.choices[0].text), answer)

# Text completions
answer = client.completions.create(prompt="SELECT", **settings)
check(answer.object == "text_completion" and isinstance(answer.choices[0].text, str), answer)
ids = client.completions.create(prompt=[5, 6, 7], logprobs=1, **settings)
check(ids.usage.prompt_tokens == 3, ids.usage)
check(len(ids.choices[0].logprobs.tokens) == ids.usage.completion_tokens, ids.choices[0].logprobs)
several = client.completions.create(prompt=["one", "two"], **settings)
check([choice.index for choice in several.choices] == [0, 1], several)
pieces = client.completions.create(prompt=[5, 6, 7], stream=True, **settings)
streamed = "".join(choice.text for event in pieces for choice in event.choices)
check(streamed == ids.choices[0].text, "a streamed completion differs")

# Models
check([entry.id for entry in client.models.list()] == [model], "the list of models")
check(client.models.retrieve(model).id == model, "one model")


# Errors
def refused(error, call):
    try:
        call()
    except error as caught:
        check(caught.body and caught.body["message"], caught)
        return caught
    sys.exit(f"the call raised no {error.__name__}")


stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="nobody", max_retries=0)
refused(openai.AuthenticationError, lambda: stranger.models.list())
unknown = settings | {"model": "nobody"}
caught = refused(openai.NotFoundError, lambda: client.chat.completions.create(messages=messages, **unknown))
check(caught.code == "model_not_found", caught)
hot = settings | {"temperature": 9}
caught = refused(openai.BadRequestError, lambda: client.chat.completions.create(messages=messages, **hot))
check(caught.param == "temperature", caught)
unforced = settings | {"tool_choice": "required"}
caught = refused(openai.BadRequestError, lambda: client.chat.completions.create(messages=messages, **unforced))
check(caught.param == "tool_choice", caught)
bad = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"properties": {"a": {"not": {}}}}}}
odd = settings | {"response_format": bad}
caught = refused(openai.BadRequestError, lambda: client.chat.completions.create(messages=messages, **odd))
check(caught.param == "response_format.json_schema.schema.properties.a.not", caught)
long = [{"role": "user", "content": "one two three " * 4000}]
caught = refused(openai.BadRequestError, lambda: client.chat.completions.create(messages=long, **settings))
check(caught.code == "context_length_exceeded", caught)
