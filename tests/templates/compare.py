"""Renders chat templates with transformers and with Refrain, and compares text and token ids.

    compare.py RENDERER TOKENIZER WORK FOLDER...

RENDERER is the program of shared/tokenization/examples/render_chats.rs and TOKENIZER a tokenizer.json. Every FOLDER is
searched for *.jinja. The exit status is 0 only if every case has one of these outcomes:

equal           Text and token ids are those of transformers.
another form    transformers fails, shows nothing, or prints a list as Python writes it, because the template wants the
                chat in another form: content as one text or as a list of parts, content that is not missing, or
                arguments as text. Refrain finds the form by itself, and its prompt is equal to that of transformers for
                that form.
both refuse     Neither renders the chat, with any form.
"""

import copy
import datetime
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from transformers import PreTrainedTokenizerFast  # noqa: E402
from transformers.utils import chat_template_utils  # noqa: E402

from chats import CHATS  # noqa: E402

TEMPLATES_MIN = 60
NOW = datetime.datetime(2026, 3, 4, 5, 6, 7)
NAMES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
# Markers as models write them. They become special tokens of the tokenizer, so that their ids are compared too.
MARKER = re.compile(r"<\|[^<>|\n]{1,40}\|>|<｜[^<>|\n]{1,40}｜>|</?[a-z_]{3,30}>|\[/?[A-Z_]{3,30}\]")
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


def as_request(chat):
    """The chat as clients send it: arguments are JSON text."""
    messages, tools, further = copy.deepcopy(chat)
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {
        "messages": messages, "tools": tools, "add_generation_prompt": further.pop("add_generation_prompt", True),
        "kwargs": {**further, "strftime_now": NOW.isoformat()},
    }


def outcome(tokenizer, template, chat, ours):
    theirs = by_transformers(tokenizer, template, chat)
    if "error" not in ours:
        if ours == theirs:
            return "equal", theirs
        for form in other_forms(chat):
            if ours == by_transformers(tokenizer, template, form):
                return "another form", theirs
    elif all("error" in by_transformers(tokenizer, template, form) for form in [chat, *other_forms(chat)]):
        return "both refuse", theirs
    return "DIFFERENT", theirs


def excerpt(theirs, ours):
    if "error" in theirs or "error" in ours or theirs["text"] == ours["text"]:
        return theirs.get("error", "tokens"), ours.get("error", "tokens")
    pairs = enumerate(itertools.zip_longest(theirs["text"], ours["text"]))
    at = next(at for at, (a, b) in pairs if a != b)
    return tuple(repr(one["text"][max(0, at - 30):at + 60]) for one in (theirs, ours))


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
            "chats": [as_request(chat) for chat in CHATS.values()],
        }))
    run = subprocess.run([renderer], input="\n".join(jobs), capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{renderer}: {run.stderr}")
    answers = [json.loads(line) for line in run.stdout.rstrip("\n").split("\n")]
    counts = dict.fromkeys(("equal", "another form", "both refuse", "DIFFERENT"), 0)
    for path, tokenizer, answer in zip(paths, tokenizers, answers, strict=True):
        template = path.read_text()
        for (name, chat), ours in zip(CHATS.items(), answer, strict=True):
            kind, theirs = outcome(tokenizer, template, chat, ours)
            counts[kind] += 1
            if kind == "DIFFERENT":
                print(f"{kind}: {path.parent.name}/{path.name}, {name}")
                print("   transformers", *excerpt(theirs, ours)[:1])
                print("   refrain     ", *excerpt(theirs, ours)[1:])
    print(f"{len(paths)} templates, {len(CHATS)} chats each:", ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    if len(paths) < TEMPLATES_MIN:
        sys.exit(f"only {len(paths)} templates were found, and {TEMPLATES_MIN} are wanted")
    sys.exit(1 if counts["DIFFERENT"] else 0)


main()
