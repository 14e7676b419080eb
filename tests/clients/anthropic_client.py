"""Tests of a mesh with Anthropic's official client.

    anthropic_client.py URL KEY MODEL
"""

import json
import sys

import anthropic

from tasks import TASKS, check, mesh

url, key, model = mesh()
client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
messages = [{"role": "user", "content": "Write a short note about a trip to Oslo."}]
# This version of the client has no field for the temperature.
sampling = {"extra_body": {"temperature": 0}}
settings = {"model": model, "max_tokens": 24} | sampling


# Whole and streamed
answer = client.messages.create(messages=messages, **settings)
check(answer.type == "message" and answer.role == "assistant" and answer.model == model, answer)
check(answer.stop_reason in ("end_turn", "max_tokens"), answer)
check([block.type for block in answer.content] == ["text"], answer)
check(0 < answer.usage.output_tokens <= 24, answer.usage)
text = answer.content[0].text
with client.messages.stream(messages=messages, **settings) as stream:
    streamed = "".join(stream.text_stream)
    final = stream.get_final_message()
check(streamed == text and final.content[0].text == text, f"streamed: {streamed!r}, whole: {text!r}")
check(final.stop_reason == answer.stop_reason, final)
check(final.usage.output_tokens == answer.usage.output_tokens, final.usage)
kinds = [event.type for event in client.messages.create(messages=messages, stream=True, **settings)]
check(kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], kinds)

# A system prompt, blocks, and a stop text
blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
parts = [{"role": "user", "content": [{"type": "text", "text": "Write a short note."}]}]
answer = client.messages.create(
    system=blocks, messages=parts, stop_sequences=["e"], metadata={"user_id": "u"},
    thinking={"type": "disabled"}, **settings
)
check(answer.stop_reason == "stop_sequence" and answer.stop_sequence == "e", answer)
check("e" not in answer.content[0].text, answer)

# Tokens
counted = client.messages.count_tokens(messages=messages, model=model)
usage = client.messages.create(messages=messages, **settings).usage
check(counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage))


# Tools: each request to its end, whole and streamed
def tool(name, **parameters):
    properties = {field: {"type": kind} for field, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"name": name, "description": "A tool.", "input_schema": schema}


tools = [
    tool("get_weather", city="string", days="integer"),
    tool("get_stock", item="string"),
    tool("create_order", item="string", count="integer", customer="string"),
]
greedy = {"model": model, "max_tokens": 64, "tools": tools} | sampling


def whole(history):
    return client.messages.create(messages=history, **greedy)


def helped(history):
    with client.messages.stream(messages=history, **greedy) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


def loop(ask, say, result):
    """Returns the calls and the answer in the end."""
    history, called = [{"role": "user", "content": ask}], []
    while True:
        answer = say(history)
        calls = [block for block in answer.content if block.type == "tool_use"]
        check(answer.stop_reason == ("tool_use" if calls else "end_turn"), answer)
        if not calls:
            return called, "".join(block.text for block in answer.content)
        history.append({"role": "assistant", "content": answer.content})
        results = []
        for call in calls:
            called.append((call.name, call.input))
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": result})
        history.append({"role": "user", "content": results})


for task in TASKS:
    for say in whole, helped:
        called, said = loop(task.ask, say, task.result)
        check(called == [(task.name, task.arguments)], called)
        check(said == task.answer, said)

# Forced calls, and an answer that a schema binds
lamps = [{"role": "user", "content": "How many lamps are in stock?"}]
for choice in {"type": "any"}, {"type": "tool", "name": "get_stock"}:
    answer = client.messages.create(messages=lamps, **greedy | {"tool_choice": choice})
    check(answer.stop_reason == "tool_use" and answer.content[-1].type == "tool_use", answer)
    check(choice.get("name", answer.content[-1].name) == answer.content[-1].name, answer)
schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
          "additionalProperties": False}
bound = {"temperature": 0, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
answer = client.messages.create(messages=messages, **settings | {"max_tokens": 64, "extra_body": bound})
check(json.loads(answer.content[0].text)["city"] in ("Oslo", "Rome"), answer)


# Errors
def refused(error, call):
    try:
        call()
    except error as caught:
        check(caught.body["type"] == "error" and caught.body["error"]["message"], caught)
        return caught.body["error"]["type"]
    sys.exit(f"the call raised no {error.__name__}")


stranger = anthropic.Anthropic(base_url=url, api_key="nobody", max_retries=0)
kind = refused(anthropic.AuthenticationError, lambda: stranger.messages.create(messages=messages, **settings))
check(kind == "authentication_error", kind)
unknown = settings | {"model": "nobody"}
kind = refused(anthropic.NotFoundError, lambda: client.messages.create(messages=messages, **unknown))
check(kind == "not_found_error", kind)
unforced = settings | {"tool_choice": {"type": "any"}}
kind = refused(anthropic.BadRequestError, lambda: client.messages.create(messages=messages, **unforced))
check(kind == "invalid_request_error", kind)
image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}]}]
kind = refused(anthropic.BadRequestError, lambda: client.messages.create(messages=image, **settings))
check(kind == "invalid_request_error", kind)
bearer = anthropic.Anthropic(base_url=url, auth_token=key, api_key=None, max_retries=0)
check(bearer.messages.create(messages=messages, **settings).content[0].text == text, "a bearer token")
