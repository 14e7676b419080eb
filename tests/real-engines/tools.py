"""Tools in front of a real engine: the same calls as the engine's own parser gives, whole and streamed."""

import itertools
import json
import pathlib

from engines import SERVED, call
from mesh import PUBLIC, Stream

PATH = "/v1/chat/completions"
TOKENS = 64
VLLM_OPTIONS = [
    "--enable-auto-tool-choice", "--tool-parser-plugin", pathlib.Path(__file__).with_name("bare_json.py"),
    "--tool-call-parser", "bare_json",
]  # fmt: skip


def tool(name, **parameters):
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}


TOOLS = [
    tool("get_weather", city="string", days="integer"),
    tool("get_stock", item="string"),
    tool("create_order", item="string", count="integer", customer="string"),
    tool("send_mail", to="string", subject="string"),
    tool("set_light", room="string", level="integer"),
]


def first_turns():
    """Requests that each need one tool, of the kinds that the shipped model was trained on."""
    cities = ["Oslo", "Reykjavik", "Tallinn", "Porto", "Rome", "Zurich"]
    things = ["lamp", "chair", "table", "book", "bottle", "door"]
    people = ["Anna", "Omar", "Lucia", "Piotr", "Chen", "Maria"]
    rooms = ["kitchen", "office", "garage", "hall", "bedroom", "kitchen"]
    for number, (city, thing, person, room) in enumerate(zip(cities, things, people, rooms)):
        yield f"What is the weather in {city} for {number + 2} days?"
        yield f"How many {thing}s are in stock?"
        yield f"Order {7 * number + 3} {thing}s for {person}."
        yield f"Send a mail to {person} about the {thing}."
        yield f"Set the light in the {room} to {13 * number + 5}."


def chats(ask):
    """The chats that are compared: requests, the turns after a call's result, and chats that need no call.

    `ask` gets a body's fields and returns the answer of the engine, whose calls make the history.
    """
    turns = [[{"role": "user", "content": text}] for text in first_turns()]
    for messages in turns:
        yield {"messages": messages, "tools": TOOLS}
    for messages in turns[::3]:
        said = ask({"messages": messages, "tools": TOOLS})["choices"][0]["message"]
        calls = said.get("tool_calls") or []
        results = [
            {"role": "tool", "tool_call_id": one["id"], "content": json.dumps({"status": "ok", "id": 100 + number})}
            for number, one in enumerate(calls)
        ]
        said = {"role": "assistant", "content": said.get("content"), **({"tool_calls": calls} if calls else {})}
        again = {"role": "user", "content": "How many lamps are in stock?"}
        yield {"messages": [*messages, said, *results], "tools": TOOLS}
        yield {"messages": [*messages, said, *results, {"role": "assistant", "content": "Done."}, again], "tools": TOOLS}
    for messages in turns[:4]:
        yield {"messages": messages}


def body(fields, model, stream):
    return {**fields, "model": model, "temperature": 0, "max_tokens": TOKENS, "stream": stream}


def summary(content, calls, finish):
    """An answer without ids. Arguments count by their values, since parsers may lay JSON out anew."""
    read = []
    for name, arguments in calls:
        try:
            read.append((name, json.dumps(json.loads(arguments), sort_keys=True)))
        except ValueError:
            read.append((name, f"no JSON: {arguments}"))
    return {"content": (content or "").strip(), "calls": read, "finish": finish}


def whole(url, fields, model):
    status, answer = call(url + PATH, body(fields, model, False), timeout=120)
    if status != 200:
        return {"error": f"status {status}: {answer}"}
    choice = answer["choices"][0]
    said = choice["message"]
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in said.get("tool_calls") or []]
    return summary(said.get("content"), calls, choice["finish_reason"])


def streamed(url, fields, model):
    content, names, arguments, finish, ended = "", {}, {}, None, False
    for event in Stream(url, PATH, body(fields, model, True)):
        ended = event == b"[DONE]"
        if ended:
            break
        event = json.loads(event)
        if "error" in event:
            return {"error": event["error"]}
        for choice in event["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                at, function = part["index"], part["function"]
                names[at] = names.get(at, "") + (function.get("name") or "")
                arguments[at] = arguments.get(at, "") + (function.get("arguments") or "")
            finish = choice.get("finish_reason") or finish
    if not ended:
        return {"error": "the stream has no end"}
    return summary(content, [(names[at], arguments[at]) for at in sorted(names)], finish)


def check(table, engine, mesh):
    """Sends each chat to the engine and through Refrain, whole and streamed, and compares the four answers."""

    def ask(fields):
        status, answer = call(engine.url + PATH, body(fields, SERVED, False), timeout=120)
        if status != 200:
            raise SystemExit(f"{engine.kind} refuses tools: {status} {answer}")
        return answer

    asked = list(chats(ask))
    ways = {"whole": whole, "streamed": streamed}
    answers = {
        (side, name): [way(url, fields, model) for fields in asked]
        for name, way in ways.items()
        for side, url, model in [("engine", engine.url, SERVED), ("Refrain", mesh.url, PUBLIC)]
    }
    engine_whole, engine_streamed = answers["engine", "whole"], answers["engine", "streamed"]
    # llama-server answers with status 500 where an output does not fit its grammar of calls.
    failed = {at for at, answer in enumerate(engine_whole) if "error" in answer or "error" in engine_streamed[at]}
    # Where the limit cuts an output off, vLLM loses text after calls, and says `tool_calls` all the same.
    cut = {at for at, answer in enumerate(answers["Refrain", "whole"]) if answer.get("finish") == "length"} - failed
    # Where text follows a call, vLLM's parser finds other calls whole than streamed. Then neither is the truth.
    unclear = {at for at in range(len(asked)) if engine_whole[at] != engine_streamed[at]} - failed - cut
    compared = [at for at in range(len(asked)) if at not in failed | cut | unclear]
    for name in ways:
        direct, through = answers["engine", name], answers["Refrain", name]
        different = [at for at in compared if direct[at] != through[at]]
        calls = sum(len(direct[at]["calls"]) for at in compared)
        detail = (
            f"{len(compared) - len(different)} of {len(compared)} answers equal, {calls} calls; left out: "
            f"{len(cut)} cut off, {len(failed)} fail in the engine, {len(unclear)} differ there when streamed"
        )
        if different:
            at = different[0]
            detail += f"; chat {at}: engine {direct[at]}, Refrain {through[at]}"
        # An engine that finds no calls, or contradicts itself often, shows nothing.
        holds = not different and calls >= 30 and len(compared) >= 0.9 * len(asked)
        table.row(engine.kind, f"the engine's tool calls, {name}", holds, detail)
    pairs = itertools.starmap(dict.__eq__, zip(answers["Refrain", "whole"], answers["Refrain", "streamed"]))
    same = sum(pairs)
    table.row(engine.kind, "tool calls whole as streamed", same == len(asked), f"{same} of {len(asked)} answers")
