"""Measures the turns of agents whose tools take their time: as sessions, and as chats without a session name.

    python3 tests/rl/turns.py --refrain target/release/refrain --work target/rl

Each agent asks a question per turn, gets a call of a tool, and waits as long as the tool takes.
Then it sends its whole history with the result and the next question, and reads the answer as a stream.
Half of the agents have a session at the trainers' listener. The others send the same to the listener of clients.
All are at work at the same time, on the same two engines.
"""

import argparse
import concurrent.futures
import http.client
import itertools
import json
import random
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from agent_task import KINDS, LOOKUPS, STATES, schema  # noqa: E402
from mesh import DRAFTS, MODEL, MODEL_FOLDER, Mesh  # noqa: E402

TOKENS_MAX = 48
ARMS = ("session", "plain")
FUNCTION = {"name": "lookup", "description": "A tool.", "parameters": schema("lookup")}
LOOKUP = {"type": "function", "function": FUNCTION}
# Other tokens than the model's own text, as the output of a tool is.
NOTE = ["Norway", "steel", "drama", "winter", "support", "history", "glass", "jazz", "summer", "design"]


@dataclass
class Turn:
    """Tokens of a turn's prompt, those of them that were cached, and seconds to the first token."""

    prompt: int
    cached: int
    first: float


class Agent:
    """An agent that keeps its history. Both arms have the same seeds, so they say the same."""

    def __init__(self, mesh, arm, number, options):
        self.options, self.rng = options, random.Random(f"{options.seed}/{number}")
        self.port = mesh.trainer if arm == "session" else mesh.gateway
        self.path = f"/sessions/turns-{number}/v1/chat/completions" if arm == "session" else "/v1/chat/completions"
        self.model = MODEL
        # Each has a beginning of its own, so that no arm finds the prompts of the other in the cache.
        self.messages = [{"role": "system", "content": f"Agent {arm} {self.rng.randint(10**8, 10**9)}."}]

    def run(self, turns, seconds):
        """All turns of the agent; the pause is between each two."""
        done = []
        for turn in range(turns):
            if turn:
                time.sleep(seconds)
                self.observe()
            kind, key = self.rng.choice(KINDS), self.rng.randint(1, 9999)
            self.messages.append({"role": "user", "content": LOOKUPS[3].format(kind=kind, id=key)})
            done.append(self.ask())
        return done

    def observe(self):
        """Takes the result of the tool into the history."""
        words = self.rng.choices(NOTE, k=self.options.result_words)
        result = json.dumps({"status": self.rng.choice(STATES), "note": " ".join(words)})
        calls = self.messages[-1].get("tool_calls")
        if calls:
            self.messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": result})
        else:
            self.messages.append({"role": "user", "content": result})

    def ask(self):
        """Sends the history, and takes the answer into it."""
        body = {
            "model": self.model, "messages": self.messages, "tools": [LOOKUP], "temperature": 0, "stream": True,
            "max_tokens": TOKENS_MAX, "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        began = time.monotonic()
        connection.request("POST", self.path, json.dumps(body),
                           {"content-type": "application/json", "authorization": "Bearer unused"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{self.path} answered {response.status}: {response.read().decode()[:500]}")
        first, usage, message = None, None, {"role": "assistant", "content": ""}
        for line in response:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            # The gateway answers with the first token, not before.
            first = first or time.monotonic() - began
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                join(message, choice["delta"])
        connection.close()
        self.messages.append(message)
        return Turn(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], first)


def join(message, delta):
    """Adds a delta of a stream to a message."""
    message["content"] += delta.get("content") or ""
    for part in delta.get("tool_calls") or []:
        calls = message.setdefault("tool_calls", [])
        if len(calls) <= part["index"]:
            calls.append({"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}})
        for key, text in part["function"].items():
            calls[part["index"]]["function"][key] += text or ""


def measure(mesh, options, seconds, turns):
    """The turns of all agents, by arm. All of them run at once."""
    with concurrent.futures.ThreadPoolExecutor(2 * options.agents) as pool:
        jobs = {
            arm: [pool.submit(Agent(mesh, arm, f"{seconds:g}-{number}", options).run, turns, seconds)
                  for number in range(options.agents)]
            for arm in ARMS
        }
        return {arm: [job.result() for job in made] for arm, made in jobs.items()}


def medians(turns):
    """Of turns: tokens of the prompt, prefilled ones, and milliseconds to the first token, each the median."""
    return (
        statistics.median(turn.prompt for turn in turns),
        statistics.median(turn.prompt - turn.cached for turn in turns),
        1000 * statistics.median(turn.first for turn in turns),
    )


def print_table(seconds, agents_by_arm, options):
    print(f"\ntool of {seconds:g} s, {options.agents} agents at once of each way; medians over the agents")
    print("turn      prompt   prefilled, session   plain     first token ms, session   plain")
    count = len(agents_by_arm["session"][0])
    for at in range(count):
        print_line(str(at + 1), [[agent[at] for agent in agents_by_arm[arm]] for arm in ARMS])
    print_line("2 on", [[turn for agent in agents_by_arm[arm] for turn in agent[1:]] for arm in ARMS])
    counts = ", ".join("{}: {} of {}".format(arm, *missed(agents_by_arm[arm])) for arm in ARMS)
    print(f"turns that did not find the prompt of the turn before in a cache: {counts}", flush=True)


def missed(agents):
    """Turns that did not find the prompt of the turn before in the cache, and the number of all that could."""
    pairs = [pair for agent in agents for pair in itertools.pairwise(agent)]
    return sum(later.cached < earlier.prompt for earlier, later in pairs), len(pairs)


def print_line(name, turns_by_arm):
    (prompt, new, first), (_, new_plain, first_plain) = (medians(turns) for turns in turns_by_arm)
    line = f"{name:<8} {prompt:>7.0f}   {new:>18.0f}   {new_plain:>5.0f}     {first:>23.1f}   {first_plain:>5.1f}"
    print(line, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refrain", required=True)
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--tool-seconds", type=float, nargs="+", default=[0.1, 5, 60])
    parser.add_argument("--turns", type=int, nargs="+", default=[20, 20, 5], help="for each time of the tool")
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--result-words", type=int, default=30)
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args()
    if len(options.turns) != len(options.tool_seconds):
        raise SystemExit("--turns needs a number for each of --tool-seconds")
    run = options.work / "turns"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    mesh = Mesh(options.refrain, run, "mesh", MODEL_FOLDER, DRAFTS)
    for seconds, turns in zip(options.tool_seconds, options.turns):
        print_table(seconds, measure(mesh, options, seconds, turns), options)
    mesh.stop()


if __name__ == "__main__":
    main()
