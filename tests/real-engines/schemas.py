"""Forms of outputs in front of a real engine: what comes has the form, and what the engine cannot do is refused."""

import json
import re

from engines import call
from mesh import PUBLIC

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOKENS = 160
# The kinds of forms that each kind of engine knows; docs/operations.md has the same table.
KNOWN = {
    "llama-cpp": {"json", "choice", "ebnf"},
    "vllm": {"json", "choice", "ebnf", "regex", "calls"},
    "sglang": {"json", "choice", "ebnf", "regex", "calls"},
}
CITY = {"enum": ["Oslo", "Rome", "Lima"]}


def record(**properties):
    """The schema of an object in which all properties are required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def is_record(value, **checks):
    return isinstance(value, dict) and set(value) == set(checks) and all(ok(value[key]) for key, ok in checks.items())


def is_city(value):
    return value in CITY["enum"]


def is_days(value):
    return type(value) is int and 1 <= value <= 9


SCHEMAS = [
    (record(city=CITY, days={"type": "integer", "minimum": 1, "maximum": 9}),
     lambda value: is_record(value, city=is_city, days=is_days)),
    (record(stops={"type": "array", "items": record(city=CITY), "minItems": 1, "maxItems": 3}),
     lambda value: is_record(value, stops=lambda stops: 1 <= len(stops) <= 3
                             and all(is_record(stop, city=is_city) for stop in stops))),
    (record(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, ok={"type": "boolean"}),
     lambda value: is_record(value, code=lambda text: bool(re.fullmatch("[A-Z]{2}-[0-9]{3}", text)),
                             ok=lambda flag: type(flag) is bool)),
    ({"anyOf": [record(a={"const": 1}), record(b={"type": "null"})]},
     lambda value: value in ({"a": 1}, {"b": None})),
]  # fmt: skip

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMAS[0][0]}}


def cases():
    """The kind of form, the route, the fields of the body, and the check of the answer's text or call."""
    for schema, holds in SCHEMAS:
        format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        yield "json", CHAT, {"response_format": format}, lambda text, holds=holds: holds(json.loads(text))
        yield "json", TEXT, {"guided_json": schema}, lambda text, holds=holds: holds(json.loads(text))
    words = ["sunny", "it \"rains\""]
    yield "choice", CHAT, {"structured_outputs": {"choice": words}}, lambda text: text in words
    yield "ebnf", CHAT, {"ebnf": 'root ::= "a" [0-9] [0-9] "!"'}, lambda text: bool(re.fullmatch("a[0-9]{2}!", text))
    yield "regex", TEXT, {"guided_regex": "[a-c]{3}-[0-9]{2}"}, lambda text: bool(re.fullmatch("[a-c]{3}-[0-9]{2}", text))
    for choice in "required", {"type": "function", "function": {"name": "get_weather"}}:
        yield "calls", CHAT, {"tools": [TOOL], "tool_choice": choice}, lambda text: SCHEMAS[0][1](json.loads(text))


def said(answer):
    """The text of an answer, or the arguments of its call."""
    choice = answer["choices"][0]
    message = choice.get("message")
    if message is None:
        return choice["text"]
    calls = message.get("tool_calls")
    return calls[0]["function"]["arguments"] if calls else message["content"]


def is_cut(answer):
    return answer["choices"][0]["finish_reason"] == "length"


def check(table, engine, mesh):
    """Asks for each form at temperature 0 and 1. An answer that came to its limit is counted, and not judged: some
    engines allow any white space in JSON, in which a small model stays."""
    faults, held, cut, refused = [], 0, 0, 0
    for kind, path, fields, holds in cases():
        for temperature in 0, 1:
            body = {"model": PUBLIC, "max_tokens": TOKENS, "temperature": temperature, "seed": 7, **fields}
            ask = "What is the weather in Oslo for 2 days?"
            body |= {"messages": [{"role": "user", "content": ask}]} if path == CHAT else {"prompt": ask}
            status, answer = call(mesh.url + path, body, 120)
            try:
                if kind not in KNOWN[engine.kind]:
                    is_right = status == 400 and answer["error"]["code"] == "unsupported_by_engine"
                    refused += is_right
                elif status == 200 and is_cut(answer):
                    is_right = True
                    cut += 1
                else:
                    is_right = status == 200 and holds(said(answer))
                    held += is_right
            except (ValueError, TypeError, KeyError) as error:
                is_right, answer = False, f"{error!r} {answer}"
            if not is_right:
                faults.append(f"{kind} at {temperature}: {status} {answer}")
    detail = f"{held} answers have their form, {cut} came to their limit, {refused} forms refused by name"
    if faults:
        detail += f"; {len(faults)} are wrong, first {faults[0]}"
    table.row(engine.kind, "forms of outputs", held > 0 and not faults, detail)
