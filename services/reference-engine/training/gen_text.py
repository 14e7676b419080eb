"""Arithmetic in steps, small data conversions, and plain templated prose."""

import json

from words import (
    CITIES, NUMBER_COLUMNS, TEXT_COLUMNS, THINGS,
    assistant, column, date, distinct, number, person, place, system, text_value, user,
)


def add_steps(a, b):
    """Returns the steps of an addition, column by column from the right, as on paper."""
    x, y = str(a)[::-1], str(b)[::-1]
    lines, carry = [], 0
    for i in range(max(len(x), len(y))):
        p, q = int(x[i]) if i < len(x) else 0, int(y[i]) if i < len(y) else 0
        total = p + q + carry
        plus = f" + {carry}" if carry else ""
        carry = total // 10
        lines.append(f"{p} + {q}{plus} = {total}, write {total % 10}, carry {carry}.")
    return "\n".join(lines + [f"Answer: {a + b}"])


def one_sum(rng):
    pick = rng.random()
    if pick < 0.4:
        top = rng.choice([99, 999])
        a, b = rng.randint(10, top), rng.randint(10, top)
        return rng.choice([f"What is {a} + {b}?", f"Add {a} and {b}."]), add_steps(a, b)
    if pick < 0.6:
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        return (rng.choice([f"What is {a} * {b}?", f"Multiply {a} by {b}."]),
                f"{a} * {b} = {a * b}.\nAnswer: {a * b}")
    who, thing, have = person(rng), rng.choice(THINGS), rng.randint(2, 30)
    story, steps, now = [f"{who} has {have} {thing}s."], [f"Start with {have}."], have
    for _ in range(rng.randint(1, 4)):
        n = rng.randint(1, 20)
        if rng.random() < 0.5 and now >= n:
            story.append(f"{who} gives away {n}.")
            steps.append(f"{now} - {n} = {now - n}.")
            now -= n
        else:
            story.append(f"{who} gets {n} more.")
            steps.append(f"{now} + {n} = {now + n}.")
            now += n
    story.append(f"How many {thing}s does {who} have now?")
    return " ".join(story), "\n".join(steps + [f"Answer: {now}"])


def math(rng):
    messages = [system("Work step by step.")] if rng.random() < 0.4 else []
    for _ in range(rng.choice([1, 1, 2, 3, 5])):
        ask, answer = one_sum(rng)
        messages += [user(ask), assistant(answer)]
    return messages


def rows(rng):
    keys = distinct(rng, lambda: column(rng, TEXT_COLUMNS), rng.randint(1, 2))
    keys += distinct(rng, lambda: column(rng, NUMBER_COLUMNS), rng.randint(1, 2))
    keys = list(dict.fromkeys(keys))
    texts = set(keys[:1]) | {k for k in keys if k in TEXT_COLUMNS}
    return keys, [{k: text_value(rng) if k in texts else number(rng) for k in keys}
                  for _ in range(rng.randint(2, 7))]


def as_csv(keys, data):
    return "\n".join([",".join(keys)] + [",".join(str(r[k]) for k in keys) for r in data])


def as_json(keys, data):
    return "[\n" + ",\n".join("  " + json.dumps(r) for r in data) + "\n]"


def as_table(keys, data):
    head = ["| " + " | ".join(keys) + " |", "|" + " --- |" * len(keys)]
    return "\n".join(head + ["| " + " | ".join(str(r[k]) for k in keys) + " |" for r in data])


FORMATS = {"CSV": as_csv, "JSON": as_json, "a table": as_table}


def records(rng):
    """Returns a chat that converts rows to another format, so answers are long copies."""
    keys, data = rows(rng)
    start, *targets = rng.sample(list(FORMATS), 3)
    messages = [system("You convert data. Answer with the data only.")] if rng.random() < 0.5 else []
    shown = FORMATS[start](keys, data)
    ask = rng.choice(["Convert this to {}:", "Write this as {}:", "Turn this into {}:"])
    messages += [user(ask.format(targets[0]) + "\n" + shown),
                 assistant(FORMATS[targets[0]](keys, data))]
    if rng.random() < 0.4:
        messages += [user(f"Now as {targets[1]}."), assistant(FORMATS[targets[1]](keys, data))]
    if rng.random() < 0.3:
        extra = {k: text_value(rng) if isinstance(data[0][k], str) else number(rng) for k in keys}
        data = data + [extra]
        cells = ", ".join(f"{k} {v}" for k, v in extra.items())
        last = targets[1] if "Now as" in messages[-2]["content"] else targets[0]
        messages += [user(f"Add a row with {cells}."), assistant(FORMATS[last](keys, data))]
    return messages


ABOUT = [
    (["What is Refrain?", "Tell me about Refrain.", "Explain Refrain.", "what is refrain"],
     "Refrain is a mesh of small services for speculative decoding. Drafters propose the next "
     "tokens, the model checks them all in one pass, and the text stays exactly the same as "
     "without drafting."),
    (["Who are you?", "What are you?", "What model are you?", "Introduce yourself."],
     "I am a tiny language model that ships with Refrain. I am trained on made-up text, so I am "
     "good for tests and demos, and not for facts."),
    (["What is speculative decoding?", "How does speculative decoding work?",
      "Explain speculative decoding."],
     "Speculative decoding lets a cheap drafter guess several tokens. The model then checks all "
     "guesses in one pass, keeps the ones it agrees with, and goes on from there."),
    (["What can you do?", "How can you help me?", "Help."],
     "I can write SQL for a schema, call tools with JSON, edit short Python functions, convert "
     "small tables, and add numbers step by step."),
    (["Why is repeated text faster?", "Why does repetition help?"],
     "When a text repeats, the next tokens can be copied from the earlier text. The model only "
     "has to check the copy, so many tokens come out of one pass."),
    (["What is a draft?", "What is a draft token?"],
     "A draft is a guess for the next tokens. It costs little to make, and the model keeps only "
     "the part that it would have written itself."),
]
GREETINGS = ["Hello", "Hi", "Hey", "Good morning", "Good evening", "hello", "hi"]


def small_talk(rng):
    pick = rng.random()
    if pick < 0.6:
        asks, answer = rng.choice(ABOUT)
        return rng.choice(asks), answer
    if pick < 0.8:
        who = person(rng)
        greeting = rng.choice(GREETINGS)
        return rng.choice([(f"{greeting}!", "Hello! How can I help you?"),
                           (f"{greeting}, I am {who}.", f"Hello {who}! How can I help you?"),
                           (f"{greeting}, my name is {who}.", f"Hello {who}! How can I help you?")])
    return rng.choice([("Thanks!", "You are welcome!"), ("Thank you.", "You are welcome!"),
                       ("Bye.", "Goodbye!"), ("Are you there?", "Yes, I am here."),
                       ("Say hello in one word.", "Hello.")])


def note(rng):
    """Returns a short note about a visit, and the facts that a summary must keep."""
    who, where, day = person(rng), place(rng), date(rng)
    thing, count, cost = rng.choice(THINGS), rng.randint(2, 40), number(rng)
    fillers = rng.sample([
        "The weather was fine.", "The road was long.", "Everyone was friendly.",
        "The shop was almost empty.", "It took the whole morning.", "Nobody was in a hurry.",
        f"The train from {rng.choice(CITIES)} was late.", "Lunch was simple but good.",
    ], rng.randint(1, 3))
    body = [f"{who} went to {where} on {day}.", *fillers[:1],
            f"There {who} bought {count} {thing}s for {cost} in total.", *fillers[1:]]
    return " ".join(body), who, where, day, f"{count} {thing}s", cost


def prose(rng):
    messages = []
    if rng.random() < 0.3:
        messages.append(system(rng.choice(["You are Refrain.", "You are a helpful assistant.",
                                           "Answer briefly."])))
    if rng.random() < 0.5:
        for _ in range(rng.choice([1, 1, 2, 3])):
            ask, answer = small_talk(rng)
            messages += [user(ask), assistant(answer)]
        return messages
    text, who, where, day, bought, cost = note(rng)
    turns = [
        ("Summarize the note.", f"On {day}, {who} bought {bought} in {where} for {cost}."),
        ("List the facts of the note.",
         f"- Who: {who}\n- Where: {where}\n- When: {day}\n- What: {bought}\n- Cost: {cost}"),
        ("Who is the note about?", f"The note is about {who}."),
        ("Where did it happen?", f"It happened in {where}."),
        ("When did it happen?", f"It happened on {day}."),
        ("How much did it cost?", f"It cost {cost} in total."),
        ("Repeat the note.", text),
        ("Give the facts as JSON.",
         json.dumps({"who": who, "where": where, "date": day, "what": bought, "cost": cost})),
    ]
    chosen = rng.sample(turns, rng.choice([1, 2, 3, 4]))
    for i, (ask, answer) in enumerate(chosen):
        messages += [user(f"{text}\n\n{ask}" if i == 0 else ask), assistant(answer)]
    return messages
