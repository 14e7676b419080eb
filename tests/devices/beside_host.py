"""Compares the drafts of the kernels with those of the host, on a recording: for the same contexts, how many tokens of
either are right. The kernels run in Triton's interpreter, which takes a tenth of a second for each step.

    beside_host.py REFRAIN MODEL CALLS [KNOWN [JUDGED]]

CALLS is a recording, JSON lines with `prompt_token_ids` and `output_token_ids`. The first KNOWN (100) outputs are
remembered. Then JUDGED (10) calls are replayed, one at a time; each draft has up to eight tokens. Run it with the
Python of target/devices, which tests/devices/run makes, and with tests/python in PYTHONPATH.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
CALLS, KNOWN, JUDGED = [*sys.argv[3:], *("", "100", "10")[len(sys.argv) - 3 :]]

import json
import tempfile
from itertools import islice
from os.path import commonprefix
from types import SimpleNamespace as Namespace
from unittest import mock

import torch
from client import Mesh, wait_until
from refrain_client import Client
from refrain_client.v2.drafter import DeviceDrafter
from refrain_client.v2.news import StepNews

PLACES = 8
PROMPT_MAX, TEXT_MAX = 512, 2048
DEPTH = 32


def text(call):
    prompt = call["prompt_token_ids"][-PROMPT_MAX:]
    return prompt, call["output_token_ids"][: TEXT_MAX - len(prompt) - PLACES]


class Compared:
    def __init__(self, folder):
        with mock.patch("client.Client", lambda: Client(devices=True)):
            self.client = Mesh(folder).client(DEVICE__FOLDER=folder)
        self.states = Namespace(
            max_num_reqs=1, max_model_len=TEXT_MAX, req_id_to_index={},
            all_token_ids=Namespace(gpu=torch.zeros(1, TEXT_MAX, dtype=torch.int32)),
            total_len=Namespace(gpu=torch.zeros(1, dtype=torch.int32)),
            last_sampled_tokens=torch.zeros(1, 1, dtype=torch.int64),
        )  # fmt: skip
        self.drafter = DeviceDrafter(self.states, PLACES, 20_000_000, "cpu", segments_max=64)
        self.emitted = self.steps = 0
        self.right = {"host": 0, "device": 0}

    def remember(self, number, call):
        prompt, output = text(call)
        self.client.start(f"known {number}", prompt)
        self.namespace, _ = self.client.place(f"known {number}")
        self.client.extend(f"known {number}", output)
        self.client.finish(f"known {number}", "stop")
        self.emitted += len(output)

    def update(self):
        """Brings all outputs to the device."""

        def is_there():
            news = StepNews(commands=self.client.device_commands(), odds=self.client.match_odds(DEPTH))
            self.drafter.take_step([], news)
            if news.has_loads():
                self.client.devices_have_loaded()
            return self.client.stats()["device_tokens"] >= self.emitted

        wait_until("the outputs on the device", is_there)

    def judge(self, number, call):
        prompt, output = text(call)
        name, everything = f"judged {number}", torch.tensor(prompt + output, dtype=torch.int32)
        self.client.start(name, prompt)
        self.drafter.rows.begin(0, self.namespace, -1, len(prompt))
        self.drafter.take_step([], None)
        self.states.all_token_ids.gpu[0, : len(everything)] = everything
        self.client.extend(name, output[:1])
        at, one = 1, torch.ones(1, dtype=torch.int32)
        while at < len(output):
            self.states.total_len.gpu[0] = len(prompt) + at
            self.states.last_sampled_tokens[0] = output[at - 1]
            host = self.client.propose([(name, PLACES)], padded=True)[0][0]
            device = self.drafter.propose(torch.zeros(1, dtype=torch.int64), one, self.states.last_sampled_tokens)
            device = device[0, : int(self.drafter.index.drafted[0])].tolist()
            came = output[at : at + PLACES]
            right = {kind: len(commonprefix([draft, came])) for kind, draft in (("host", host), ("device", device))}
            for kind, tokens in right.items():
                self.right[kind] += tokens
            self.steps += 1
            # The text goes on as with the host's drafts.
            step = min(right["host"] + 1, len(output) - at)
            self.client.extend(name, output[at : at + step])
            at += step
        self.client.finish(name, "stop")
        self.emitted += len(output)


def main():
    known = int(KNOWN)
    with open(CALLS) as file:
        calls = [json.loads(line) for line in islice(file, known + int(JUDGED))]
    with tempfile.TemporaryDirectory() as folder:
        compared = Compared(folder)
        for number, call in enumerate(calls[:known]):
            compared.remember(number, call)
        for number, call in enumerate(calls[known:]):
            compared.update()
            compared.judge(number, call)
    means = ", ".join(f"{kind} {1 + right / compared.steps:.3f}" for kind, right in compared.right.items())
    print(f"tokens a step on {compared.steps} contexts: {means}")


main()
