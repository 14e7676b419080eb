"""JSON tool calls, tool results, and answers built from the results."""

import json

from gen_code import edit, path_of, source
from words import (
    NOUNS, THINGS, VERBS,
    assistant, date, distinct, entity, made_up, number, person, place, system, text_value, tool, user,
)

INTRO = "You can call these tools:"
RULE = 'To call a tool, answer with one JSON object: {"name": ..., "arguments": {...}}'


def call(name, /, **arguments):
    return assistant(json.dumps({"name": name, "arguments": arguments}))


def spec(name, /, **parameters):
    return json.dumps({"name": name, "parameters": parameters})


# Each maker returns (request, tool name, arguments, result, final answer).
def weather(rng):
    city, days = place(rng), rng.randint(1, 9)
    temp, sky = rng.randint(1, 35), rng.choice(["rain", "sun", "snow", "wind", "fog", "clouds"])
    ask = rng.choice([f"What is the weather in {city} for {days} days?",
                      f"Weather for {city}, next {days} days please.",
                      f"Will it rain in {city} in the next {days} days?"])
    return (ask, "get_weather", {"city": city, "days": days},
            {"city": city, "temperature": temp, "sky": sky},
            f"The weather in {city}: {temp} degrees with {sky}.")


def mail(rng):
    who, about = person(rng), f"{rng.choice(VERBS)} {rng.choice(NOUNS)}"
    key = rng.randint(100, 999)
    return (f"Send a mail to {who} about {about}.", "send_mail", {"to": who, "subject": about},
            {"status": "sent", "id": key}, f"I sent the mail to {who}. Its id is {key}.")


def meeting(rng):
    who, day, hour = person(rng), date(rng), rng.randint(8, 18)
    return (rng.choice([f"Book a meeting with {who} on {day} at {hour}.",
                        f"I want to meet {who} on {day} at {hour}."]),
            "book_meeting", {"person": who, "date": day, "hour": hour},
            {"status": "booked", "room": f"R{rng.randint(1, 40)}"}, None)


def stock(rng):
    thing, left = rng.choice(THINGS), rng.randint(0, 200)
    return (rng.choice([f"How many {thing}s are in stock?", f"Do we have a {thing} in stock?"]),
            "get_stock", {"item": thing}, {"item": thing, "count": left},
            f"There are {left} of {thing} in stock.")


def order(rng):
    thing, count, who = rng.choice(THINGS), rng.randint(1, 50), person(rng)
    key = rng.randint(1000, 9999)
    return (f"Order {count} {thing}s for {who}.", "create_order",
            {"item": thing, "count": count, "customer": who},
            {"order_id": key, "status": "created"},
            f"Order {key} for {who} is created: {count} of {thing}.")


def lookup(rng):
    one, many = entity(rng)
    key, value = number(rng), text_value(rng)
    return (rng.choice([f"What is the status of {one} {key}?", f"Look up {one} {key}."]),
            "lookup", {"kind": one, "id": key},
            {"kind": one, "id": key, "status": value}, f"The status of {one} {key} is {value}.")


def light(rng):
    room = rng.choice(["kitchen", "office", "garage", "hall", "bedroom", made_up(rng)])
    level = rng.randint(0, 100)
    return (rng.choice([f"Set the light in the {room} to {level}.",
                        f"Dim the {room} to {level} percent."]),
            "set_light", {"room": room, "level": level},
            {"room": room, "level": level}, f"The light in the {room} is at {level}.")


def convert(rng):
    amount, a, b = number(rng), *rng.sample(["EUR", "USD", "JPY", "GBP", "NOK", "CHF"], 2)
    got = number(rng)
    return (f"Convert {amount} {a} to {b}.", "convert_money",
            {"amount": amount, "from": a, "to": b}, {"amount": got, "unit": b},
            f"{amount} {a} is {got} {b}.")


def search(rng):
    what = f"{rng.choice(VERBS)} {made_up(rng) if rng.random() < 0.4 else rng.choice(NOUNS)}"
    limit = rng.randint(1, 10)
    hit = path_of(rng)
    return (rng.choice([f"Search for {what}, {limit} results.", f"Find {limit} pages on {what}."]),
            "search", {"query": what, "limit": limit}, {"results": [hit]},
            f"The first result is {hit}.")


def free_form(rng):
    """Returns a request for a made-up tool, so that the model must copy every name."""
    name = f"{rng.choice(VERBS)}_{made_up(rng)}"
    keys = distinct(rng, lambda: made_up(rng, 2), rng.randint(1, 3))
    arguments = {k: (number(rng) if rng.random() < 0.5 else text_value(rng)) for k in keys}
    given = " and ".join(f"{k} {v}" for k, v in arguments.items())
    status = rng.choice(["ok", "done", "failed"])
    return (rng.choice([f"Call {name} with {given}.", f"Use {name} with {given}."]),
            name, arguments, {"status": status}, f"{name} returned {status}.")


MAKERS = [weather, mail, meeting, stock, order, lookup, light, convert, search,
          free_form, free_form]


def type_name(value):
    return "integer" if isinstance(value, int) else "string"


def tools(rng):
    """Returns a chat of one to four requests, after a system prompt that lists the tools."""
    turns = [rng.choice(MAKERS)(rng) for _ in range(rng.choice([1, 1, 2, 2, 3, 4]))]
    listed = {}
    for ask, name, arguments, *_ in turns + [rng.choice(MAKERS)(rng) for _ in range(rng.randint(0, 2))]:
        listed[name] = spec(name, **{k: type_name(v) for k, v in arguments.items()})
    specs = list(listed.values())
    rng.shuffle(specs)
    messages = [system("\n".join([INTRO] + specs + [RULE]))]
    for ask, name, arguments, result, answer in turns:
        answer = answer or f"The meeting is booked in room {result.get('room')}."
        messages += [user(ask), call(name, **arguments), tool(json.dumps(result)), assistant(answer)]
    return messages


AGENT = [
    spec("list_files", folder="string"), spec("read_file", path="string"),
    spec("edit_file", path="string", old="string", new="string"), spec("run_tests", path="string"),
]


def agent(rng, limit=None):
    """Returns a long chat of a coding agent: it lists, reads, edits, tests and reports."""
    paths = distinct(rng, lambda: path_of(rng), rng.randint(2, 4))
    files = {p: source(rng, rng.choice([1, 1, 2])) for p in paths}
    messages = [system("\n".join([INTRO] + AGENT + [RULE]))]
    for _ in range(limit or rng.choice([1, 1, 2, 2, 3])):
        path = rng.choice(paths)
        text = "\n\n".join(f.text() for f in files[path])
        request, before, after = edit(rng, rng.choice(files[path]))
        messages.append(user(f"{request} The file is {path}."))
        if rng.random() < 0.3:
            folder = path.split("/")[0]
            here = [p for p in paths if p.startswith(folder)]
            messages += [call("list_files", folder=folder), tool(json.dumps({"files": here}))]
        passed = rng.randint(1, 60)
        messages += [
            call("read_file", path=path), tool(text),
            call("edit_file", path=path, old=before, new=after), tool(json.dumps({"status": "ok"})),
            call("run_tests", path=path), tool(json.dumps({"passed": passed, "failed": 0})),
            assistant(f"I changed {path}. All {passed} tests pass."),
        ]
    return messages


def long_agent(rng):
    return agent(rng, rng.randint(4, 9))
