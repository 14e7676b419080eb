"""Renders chat templates with transformers and with Refrain, and compares text and token ids.

    compare.py RENDERER TOKENIZER WORK FOLDER...

RENDERER is the program of shared/tokenization/examples/render_chats.rs and TOKENIZER a tokenizer.json. Every FOLDER is
searched for *.jinja. The exit status is 0 only if every case has one of these outcomes:

equal           Text and token ids are those of transformers.
another form    transformers fails, shows nothing, or prints a list as Python writes it, because the template wants the
                chat in another form: content as one text or as a list of parts, content that is not missing, or
                arguments as text. Refrain finds the form by itself, and its prompt is equal to that of transformers for
                that form.
carried         transformers refuses the chat, or its prompt lacks the text of a message. Refrain's prompt has all texts.
both refuse     Neither renders the chat, with any form.

Then every template renders conversations of random roles, orders and forms of content. Each is refused, or its prompt
has the text of every message. A template that shows a system message and several turns refuses none of those that
agents send.

The last answer of each conversation is then taken for one that was sampled, with tokens of its own. What Refrain puts
behind it has to be the end of the prompt, tokens and text: all of what came after the answer, and nothing of it.
"""

import copy
import datetime
import itertools
import json
import os
import pathlib
import random
import re
import subprocess
import sys

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from transformers import PreTrainedTokenizerFast  # noqa: E402
from transformers.utils import chat_template_utils  # noqa: E402

from chats import AGENTS, CHATS, WEATHER, call  # noqa: E402

TEMPLATES_MIN = 60
GENERATED = 60
NOW = datetime.datetime(2026, 3, 4, 5, 6, 7)
NAMES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
# Markers as models write them. They become special tokens of the tokenizer, so that their ids are compared too.
MARKER = re.compile(r'<\|[^<>|\n]{1,40}\|>|<｜[^<>|\n]{1,40}｜>|</?s>|</?[a-z_]{3,30}>|<\|[a-z_"]{1,30}>|<[a-z_]{3,30}\|>|\[/?[A-Z_]{3,30}\]')
# The chats contain these. A special token in the text of a user is a token for transformers, and never for Refrain.
IN_CHATS = {"<think>", "</think>"}


class FixedDate(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def tokenizer_with(source, markers):
    """The tokenizer with further special tokens."""
    tokenizer = json.loads(source)
    known = {token["content"] for token in tokenizer["added_tokens"]}
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    for number, content in enumerate(sorted(markers - known), start=max(ids) + 1):
        tokenizer["added_tokens"].append({
            "id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        })
    return json.dumps(tokenizer)


def by_transformers(tokenizer, template, chat):
    messages, tools, further = chat
    further = {"add_generation_prompt": True, **further}
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False, **further)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)}


def other_forms(chat):
    """The chat in all other forms that a template may want."""
    messages, tools, further = chat

    def content(message, form):
        text = message.get("content")
        if form == "joined" and isinstance(text, list):
            return "\n".join(part["text"] for part in text)
        if form == "one part" and isinstance(text, list):
            text = "\n".join(part["text"] for part in text)
        if form in ("parts", "one part") and isinstance(text, str):
            return [{"type": "text", "text": text}]
        return text

    for form, filled, textual in itertools.product(("sent", "joined", "parts", "one part", "mixed"), (False, True), (False, True)):
        changed = copy.deepcopy(messages)
        for message in changed:
            if filled and message.get("content") is None:
                message["content"] = ""
            of_user = "sent" if form == "mixed" and message["role"] == "user" else form
            message["content"] = content(message, "one part" if of_user == "mixed" else of_user)
            for call in message.get("tool_calls") or [] if textual else []:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        if changed != messages:
            yield changed, tools, further


def sampled(messages):
    """The place of the last answer that others follow."""
    places = [place for place, message in enumerate(messages[:-1]) if message["role"] == "assistant"]
    return places[-1] if places else None


def behind_answer(messages, ours):
    """What is wrong with the tokens behind a sampled answer, `None` if nothing is, or "anew" if there are none."""
    ended, cut = ours["behind"]
    if ended is None or cut is None:
        return "anew"
    if not cut["text"].endswith(ended["text"]):
        return "lacks a part of what an answer without an end needs"
    place = sampled(messages)
    if not has_all(ended["text"], messages[place + 1:]):
        return f"lacks a message: {ended['text']!r}"
    answer = [text for text in texts(messages[place:place + 1]) if len(text) > 8]
    if any(text in cut["text"] for text in answer):
        return f"repeats the answer: {cut['text']!r}"
    # Templates of Gemma write the text of an answer behind the results of its calls. It was sampled before them.
    next_text = next(texts(messages[place + 1:]))
    if any(ours["text"].rfind(text) > ours["text"].rfind(next_text) for text in answer):
        return None
    for one in (ended, cut):
        if not ours["text"].endswith(one["text"]):
            return f"is not the end of the prompt: {one['text']!r}"
    # A special token ends the answer, so that no token of the prompt reaches over that place.
    if ours["ids"][len(ours["ids"]) - len(ended["ids"]):] != ended["ids"]:
        return "has other tokens than the prompt"
    return None


def as_request(chat):
    """The chat as clients send it: arguments are JSON text."""
    messages, tools, further = copy.deepcopy(chat)
    answered = sampled(messages)
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {
        "messages": messages, "tools": tools, "answered": answered, "add_generation_prompt": further.pop("add_generation_prompt", True),
        "kwargs": {**further, "strftime_now": NOW.isoformat()},
    }


def texts(messages):
    """The texts of a conversation that a prompt must have. Templates cut reasoning."""
    for message in messages:
        content = message.get("content") or ""
        for text in [content] if isinstance(content, str) else [part["text"] for part in content]:
            yield text.rsplit("</think>")[-1].strip()


def has_all(prompt, messages):
    """Whether a prompt has all texts. It may write them as JSON."""
    return all(text in prompt or json.dumps(text, ensure_ascii=False)[1:-1] in prompt for text in texts(messages))


def outcome(tokenizer, template, chat, ours):
    theirs = by_transformers(tokenizer, template, chat)
    if "error" not in ours:
        if ours == theirs:
            return "equal", theirs
        for form in other_forms(chat):
            if ours == by_transformers(tokenizer, template, form):
                return "another form", theirs
        lacks = "error" in theirs or not has_all(theirs["text"], chat[0])
        if lacks and has_all(ours["text"], chat[0]):
            return "carried", theirs
    elif all("error" in by_transformers(tokenizer, template, form) for form in [chat, *other_forms(chat)]):
        return "both refuse", theirs
    return "DIFFERENT", theirs


def generated():
    """Conversations of random roles, orders and forms of content. Each text is of its own."""
    chance = random.Random(7)
    for _ in range(GENERATED):
        messages = []
        for place in range(chance.randint(1, 7)):
            text = "".join(chance.choice("bcdfghjklmnpqrstvwxz") for _ in range(12)) + f" {place}."
            role = chance.choice(["system", "developer", "user", "user", "assistant", "assistant", "tool"])
            form = chance.choice(["text", "text", "parts", "blanks"])
            content = {"text": text, "blanks": f"  {text}\n"}.get(form, [
                {"type": "text", "text": text}, {"type": "text", "text": text[::-1]},
            ])
            message = {"role": role, "content": content}
            if role == "assistant" and chance.random() < 0.4:
                message["tool_calls"] = [call("get_weather", {"city": "Oslo"}, place)]
            if role == "tool":
                message |= {"tool_call_id": f"call{place - 1:05d}", "name": "get_weather"}
            messages.append(message)
        tools = [WEATHER] if any("tool_calls" in message for message in messages) else None
        yield messages, tools, {}


def excerpt(theirs, ours):
    if "error" in theirs or "error" in ours or theirs["text"] == ours["text"]:
        return theirs.get("error", "tokens"), ours.get("error", "tokens")
    pairs = enumerate(itertools.zip_longest(theirs["text"], ours["text"]))
    at = next(at for at, (a, b) in pairs if a != b)
    return tuple(repr(one["text"][max(0, at - 30):at + 60]) for one in (theirs, ours))


def shows_users(plain):
    """Whether a template is one of chats at all."""
    return "error" not in plain["user"] and has_all(plain["user"]["text"], CHATS["user"][0])


def main():
    renderer, tokenizer_json, work, *folders = sys.argv[1:]
    source = pathlib.Path(tokenizer_json).read_text()
    chat_template_utils.datetime = FixedDate
    paths = sorted(path for folder in folders for path in pathlib.Path(folder).rglob("*.jinja"))
    tokenizers, jobs = [], []
    for path in paths:
        template = path.read_text()
        own = tokenizer_with(source, set(MARKER.findall(template)) - IN_CHATS | set(NAMES.values()))
        file = pathlib.Path(work) / "tokenizer.json"
        file.write_text(own)
        tokenizers.append(PreTrainedTokenizerFast(tokenizer_file=str(file), **NAMES))
        jobs.append(json.dumps({
            "template": template, "tokenizer": own, "tokenizer_config": NAMES,
            "chats": [as_request(chat) for chat in [*CHATS.values(), *AGENTS.values(), *generated()]],
        }))
    run = subprocess.run([renderer], input="\n".join(jobs), capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{renderer}: {run.stderr}")
    answers = [json.loads(line) for line in run.stdout.rstrip("\n").split("\n")]
    counts = dict.fromkeys(("equal", "another form", "carried", "both refuse", "DIFFERENT"), 0)
    wrong = refused = rendered = 0
    turns = {"continued": 0, "rendered anew": 0, "WRONG": 0}
    for path, tokenizer, answer in zip(paths, tokenizers, answers, strict=True):
        template = path.read_text()
        plain = dict(zip(CHATS, answer))
        is_chat = all("error" not in plain[name] and has_all(plain[name]["text"], CHATS[name][0])
                      for name in ("system", "several turns"))
        further = [*((name, chat, is_chat) for name, chat in AGENTS.items()),
                   *((f"generated {number}", chat, False) for number, chat in enumerate(generated()))]
        for (name, chat, is_needed), ours in zip(further, answer[len(CHATS):], strict=True):
            is_lost = "error" not in ours and not has_all(ours["text"], chat[0])
            refused += "error" in ours
            rendered += "error" not in ours
            if shows_users(plain) and is_lost or is_needed and "error" in ours:
                wrong += 1
                print(f"{'LOST' if is_lost else 'REFUSED'}: {path.parent.name}/{path.name}, {name}")
                print("   ", json.dumps(chat[0])[:700])
                print("   ", ours.get("error") or ours["text"])
        for (name, chat, _), ours in zip([*((name, chat, 0) for name, chat in CHATS.items()), *further], answer):
            if "behind" not in ours:
                continue
            fault = behind_answer(chat[0], ours)
            kind = {None: "continued", "anew": "rendered anew"}.get(fault, "WRONG")
            turns[kind] += 1
            if kind == "WRONG" or os.environ.get("SHOW_ANEW") and kind == "rendered anew":
                print(f"BEHIND AN ANSWER: {path.parent.name}/{path.name}, {name}: {fault}")
                print("   ", ours["text"][-700:])
        for (name, chat), ours in zip(CHATS.items(), answer):
            ours.pop("behind", None)
            kind, theirs = outcome(tokenizer, template, chat, ours)
            counts[kind] += 1
            if kind == "DIFFERENT":
                print(f"{kind}: {path.parent.name}/{path.name}, {name}")
                print("   transformers", *excerpt(theirs, ours)[:1])
                print("   refrain     ", *excerpt(theirs, ours)[1:])
    print(f"{len(paths)} templates, {len(CHATS)} chats each:", ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    print(f"further conversations: {rendered} with all texts, {refused} refused, {wrong} wrong")
    print("sampled answers:", ", ".join(f"{n} {kind}" for kind, n in turns.items()))
    if len(paths) < TEMPLATES_MIN:
        sys.exit(f"only {len(paths)} templates were found, and {TEMPLATES_MIN} are wanted")
    sys.exit(1 if counts["DIFFERENT"] or wrong or turns["WRONG"] or not turns["continued"] else 0)


main()
