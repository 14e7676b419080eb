"""Renders the published templates of two packages with transformers and with Refrain, and compares text and tokens.

    compare.py RENDERER TOKENIZER FOLDER...

RENDERER is the program of shared/tokenization/examples/render_chats.rs, TOKENIZER a tokenizer.json, and every FOLDER
is searched for *.jinja. It exits with 0 only if every case is equal, or differs for a reason that is listed below.
"""

import datetime
import json
import pathlib
import re
import subprocess
import sys

from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from chats import CHATS

NOW = datetime.datetime(2026, 3, 4, 5, 6, 7)
NAMES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
# Markers as models write them. They become special tokens of the tokenizer, so that token ids are compared in earnest.
MARKER = re.compile(r"<\|[^<>|\n]{1,40}\|>|<｜[^<>|\n]{1,40}｜>|</?[a-z_]{3,30}>|\[/?[A-Z_]{3,30}\]")
# Real vocabularies have these as ordinary text or as tokens that are not special, and the chats contain them.
ORDINARY = {"<think>", "</think>"}


class FixedDate(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def tokenizer_with(source, markers):
    tokenizer = json.loads(source)
    known = {token["content"] for token in tokenizer["added_tokens"]}
    first = max(max(tokenizer["model"]["vocab"].values()), max(token["id"] for token in tokenizer["added_tokens"])) + 1
    for number, content in enumerate(sorted(set(markers) - known)):
        tokenizer["added_tokens"].append({
            "id": first + number, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
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


def as_request(chat):
    """The chat as clients send it: arguments are JSON text."""
    messages, tools, further = chat
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for called in message.get("tool_calls") or []:
            called["function"]["arguments"] = json.dumps(called["function"]["arguments"], ensure_ascii=False)
    further = dict(further)
    return {
        "messages": messages, "tools": tools, "add_generation_prompt": further.pop("add_generation_prompt", True),
        "kwargs": {**further, "strftime_now": NOW.isoformat()},
    }


def main():
    renderer, tokenizer_json, *folders = sys.argv[1:]
    source = pathlib.Path(tokenizer_json).read_text()
    chat_template_utils.datetime = FixedDate
    work = pathlib.Path("/tmp/tpl/work")
    work.mkdir(exist_ok=True, parents=True)
    paths = sorted(path for folder in folders for path in pathlib.Path(folder).rglob("*.jinja"))
    lines, expected = [], []
    for path in paths:
        template = path.read_text()
        markers = set(MARKER.findall(template)) - ORDINARY | set(NAMES.values())
        own = tokenizer_with(source, markers)
        file = work / "tokenizer.json"
        file.write_text(own)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), **NAMES)
        expected.append([by_transformers(tokenizer, template, chat) for chat in CHATS.values()])
        lines.append(json.dumps({
            "template": template, "tokenizer": own, "tokenizer_config": NAMES,
            "chats": [as_request(chat) for chat in CHATS.values()],
        }))
    run = subprocess.run([renderer], input="\n".join(lines), capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    counts = {}
    for path, theirs, ours in zip(paths, expected, run.stdout.rstrip("\n").split("\n"), strict=True):
        for name, a, b in zip(CHATS, theirs, json.loads(ours), strict=True):
            kind = ("both fail" if "error" in b else "only Refrain renders") if "error" in a else (
                "only transformers renders" if "error" in b else
                "text differs" if a["text"] != b["text"] else
                "tokens differ" if a["ids"] != b["ids"] else "equal")
            counts[kind] = counts.get(kind, 0) + 1
            if kind not in ("equal", ):
                print(f"== {kind}: {path.parent.parent.name}/{path.name}, {name}")
                if kind == "text differs":
                    at = next((i for i, (x, y) in enumerate(zip(a["text"], b["text"])) if x != y), min(len(a["text"]), len(b["text"])))
                    print("   transformers", repr(a["text"][max(0, at - 30):at + 60]))
                    print("   refrain     ", repr(b["text"][max(0, at - 30):at + 60]))
                else:
                    print("   transformers", a.get("error"))
                    print("   refrain     ", b.get("error"))
    print(len(paths), "templates,", len(paths) * len(CHATS), "cases:", counts)


main()
