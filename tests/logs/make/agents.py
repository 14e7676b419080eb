"""Copies what coding agents left on disk after a run against the scripted server, without the agents' own texts.

    python3 tests/logs/make/agents.py FROM FOLDER

FROM has the home and the repository of the agents: Codex's `.codex`, Claude Code's `.claude`, aider's histories, and
mini-swe-agent's `mini.traj.json`.
"""

import json
import pathlib
import sys

FROM, OUT = map(pathlib.Path, sys.argv[1:])
# Longer texts are prompts and templates of the agents, which are not ours.
LONG = 300


def short(value):
    if isinstance(value, str):
        if len(value) > LONG:
            return "Text of the agent, left out here."
        return value.replace(str(FROM.resolve()), "/home/me")
    if isinstance(value, list):
        return [short(item) for item in value[:20]]
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    return value


def copy(name, file, source, lines=True):
    text = source.read_text()
    if lines:
        text = "".join(json.dumps(short(json.loads(line))) + "\n" for line in text.splitlines())
    else:
        text = json.dumps(short(json.loads(text)), indent=2)
    path = OUT / name / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


copy("codex", "rollout-2026-11-30.jsonl", next(FROM.glob("home/.codex/sessions/**/*.jsonl")))
copy("claude-code", "session.jsonl", next(FROM.glob("home/.claude/projects/*/*.jsonl")))
copy("mini-swe-agent", "task.traj.json", FROM / "mini.traj.json", lines=False)
for name, file in (("aider", ".aider.chat.history.md"), ("aider-calls", ".aider.llm.history")):
    (OUT / name).mkdir(parents=True, exist_ok=True)
    kept, system = [], False
    for line in (FROM / "repo" / file).read_text().splitlines(keepends=True):
        # One line stands for aider's instructions.
        if "venv" in line:
            continue
        if not line.startswith("SYSTEM ") or not system:
            kept.append("SYSTEM Text of the agent, left out here.\n" if line.startswith("SYSTEM ") else line)
        system = line.startswith("SYSTEM ")
    (OUT / name / file).write_text("".join(kept).replace(str(FROM.resolve()), "/home/me"))
