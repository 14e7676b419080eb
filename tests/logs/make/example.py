"""Writes examples/agent.jsonl: the log of an agent of a shop, each request with its response as OpenAI's API has them.

    python3 tests/logs/make/example.py > examples/agent.jsonl

The texts are written here; nothing is of a real customer or model.
"""

import json
import random

RANDOM = random.Random(7)
SYSTEM = ("You are the clerk of a small shop for garden tools. Look up each order before you answer. Answer in two "
          "sentences, and give the number of the order.")
TOOLS = [{"type": "function", "function": {"name": name, "description": description, "parameters": {
    "type": "object", "properties": properties, "required": list(properties)}}} for name, description, properties in (
    ("lookup_order", "Looks up an order.", {"order_id": {"type": "string"}}),
    ("refund", "Pays back an item of an order.", {"order_id": {"type": "string"}, "item": {"type": "string"},
                                                  "reason": {"type": "string"}}))]
ITEMS = ["spade", "rake", "watering can", "hedge trimmer", "pair of gloves", "wheelbarrow"]
CITIES = ["Bremen", "Ghent", "Leeds", "Lyon", "Turin"]
FAULTS = ["broken handle", "missing screws", "wrong colour", "late delivery"]
QUESTIONS = ["Where is my order {order}? I am waiting for the {item}.",
             "My {item} of order {order} came with a {fault}. I want my money back.",
             "Can you check order {order}, please? It should have a {item}."]


def call(name, arguments):
    return [{"id": f"call_{RANDOM.randrange(10**6)}", "type": "function",
             "function": {"name": name, "arguments": json.dumps(arguments)}}]


def session(number):
    item, city, fault = RANDOM.choice(ITEMS), RANDOM.choice(CITIES), RANDOM.choice(FAULTS)
    order = f"A-{RANDOM.randrange(1000, 9999)}"
    question = RANDOM.choice(QUESTIONS)
    wants_refund = "money" in question
    found = {"order_id": order, "status": "delivered" if wants_refund else "in transit", "city": city,
             "items": [{"name": item, "quantity": 1, "price": RANDOM.randrange(10, 90)}]}
    turns = [("I look up the order first.", call("lookup_order", {"order_id": order}), found)]
    if wants_refund:
        turns.append((f"The {item} was delivered with a {fault}, so I pay it back.",
                      call("refund", {"order_id": order, "item": item, "reason": fault}), {"refund": "accepted"}))
        turns.append((f"I am sorry that the {item} of order {order} came with a {fault}. Your money is on its way back, and "
                      "you have it within five days.", None, None))
    else:
        turns.append((f"Your order {order} with the {item} is on its way to {city}. It arrives within two days.", None, None))
    messages = [{"role": "system", "content": SYSTEM},
                {"role": "user", "content": question.format(order=order, item=item, fault=fault)}]
    at = 1764400000 + 40 * number
    for text, calls, result in turns:
        message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        yield {"session_id": f"customer-{number}", "team_id": "garden-shop", "created_at": at,
               "request": {"model": "example-model", "messages": list(messages), "tools": TOOLS},
               "response": {"id": f"chatcmpl-{number}-{len(messages)}", "object": "chat.completion", "created": at + 1,
                            "model": "example-model", "choices": [{"index": 0, "message": message,
                                                                   "finish_reason": "tool_calls" if calls else "stop"}]}}
        messages.append(message)
        if calls:
            messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": json.dumps(result)})
        at += 4


for number in range(34):
    for record in session(number):
        print(json.dumps(record))
