"""A mesh in front of a scripted engine with Refrain's plugin inside: rules of tenants reach the plugin's drafts. vLLM
is not needed.

    attached.py REFRAIN MODEL

REFRAIN is the binary, and MODEL the folder of the shipped model.
"""

import json
import subprocess
import threading
import unittest
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from client import MODEL, PROMPT, REFRAIN, WithMesh, emit, free_port, undisturbed, wait_until
from refrain_client.ending import Ending
from refrain_client.suffix import TREE_DEPTH, SuffixDecodingCache

# What the engine answers to every prompt, whatever is drafted. No part of it comes twice.
TEXT = [300 + at * 37 % 150 for at in range(100)]


class Engine(ThreadingHTTPServer):
    """The routes of vLLM that a worker calls, and the calls of its SuffixDecodingProposer."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Routes)
        vocabulary = json.loads((Path(MODEL) / "tokenizer.json").read_text())["model"]["vocab"]
        self.words = {token: word for word, token in vocabulary.items()}
        self.cache, self.lock = None, threading.Lock()
        # The lengths of the drafts of each step of the last request.
        self.drafted = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def generate(self, asked):
        """Emits the text. Returns it as an event of vLLM."""
        with self.lock:
            cache, req_id, self.drafted = self.cache, asked["request_id"], []
            cache.announce(req_id, asked["vllm_xargs"], Ending())
            cache.start_request(req_id, asked["prompt"])
            emitted, at = TEXT[:1], 1
            while True:
                cache.add_active_response(req_id, emitted)
                if at == len(TEXT):
                    break
                draft = cache.speculate(req_id, [], max_spec_tokens=TREE_DEPTH).token_ids
                self.drafted.append(len(draft))
                kept = 0
                while kept < min(len(draft), len(TEXT) - at - 1) and draft[kept] == TEXT[at + kept]:
                    kept += 1
                emitted, at = TEXT[at : at + kept + 1], at + kept + 1
            cache.stop_request(req_id)
        return {"choices": [{"index": 0, "token_ids": TEXT, "finish_reason": "length"}]}


class Routes(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/v1/models":
            self.answer({"data": [{"id": "tiny", "max_model_len": 1024}]})
        else:
            self.answer({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/detokenize":
            self.answer({"prompt": "".join(self.server.words[token] for token in asked["tokens"])})
        else:
            event = json.dumps(self.server.generate(asked))
            self.answer(f"data: {event}\n\ndata: [DONE]\n\n", "text/event-stream")

    def answer(self, body, kind="application/json"):
        body = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Logs nothing."""


class Rules(WithMesh):
    def test_rules_of_a_request_come_before_arguments_and_the_configuration(self):
        client = self.mesh.client(SPECULATION__ALPHA=1.0, SPECULATION__MAX_SPEC_TOKENS=20)
        emit(client, "first", TEXT)
        cache = SuffixDecodingCache(client=client)
        for req_id, fields, tokens in (
            # The match has the last 16 tokens of the prompt and 10 of the output.
            ("none", {}, 20),
            ("alpha", {"refrain_alpha": 0.5}, 13),
            ("unlikely", {"refrain_min_token_prob": 1.0}, 0),
            ("most", {"refrain_max_spec_tokens": 5}, 5),
            ("off", {"refrain_max_spec_tokens": 0}, 0),
            ("large", {"refrain_alpha": 9, "refrain_max_spec_tokens": 2**63 - 1}, 20),
            # A worker of a later version may set more.
            ("unknown", {"refrain_later": "?"}, 20),
        ):
            cache.announce(req_id, fields, Ending())
            cache.start_request(req_id, PROMPT)
            cache.add_active_response(req_id, TEXT[:10])
            draft = undisturbed(client, lambda: cache.speculate(req_id, [], max_spec_tokens=24, max_spec_factor=3.0))
            self.assertEqual(draft.token_ids, TEXT[10 : 10 + tokens], req_id)
            cache.stop_request(req_id)
        self.assertEqual(client.stats()["refused_fields"], 0)


class Attached(WithMesh):
    def setUp(self):
        super().setUp()
        self.engine = Engine()
        self.addCleanup(self.engine.server_close)
        self.addCleanup(self.engine.shutdown)
        self.engine.cache = SuffixDecodingCache(client=self.mesh.client(TOKEN=None))

    def start(self, **tenants):
        """Starts a mesh with these tenants, each with options of `refrain tenants add`. Returns their keys."""
        folder, self.port, keys = self.mesh.folder, free_port(), {}
        for name, options in tenants.items():
            self.run_refrain("tenants", "add", name, *options)
            keys[name] = self.run_refrain("keys", "add", name, "--name", "test")
        (folder / "mesh.toml").write_text(
            f'{self.mesh.keys}\n[telemetry]\nlog = "error"\n'
            f'[urls]\nengine = "http://127.0.0.1:{self.engine.server_port}"\n'
            f'[draft_store]\nlisten = "127.0.0.1:{self.mesh.port}"\ndata_dir = "{folder}/store"\n'
            f'[gateway]\nlisten = "127.0.0.1:{self.port}"\ntenants_file = "{folder}/tenants.toml"\n'
            f'[[gateway.models]]\nid = "tiny"\nfiles = "{MODEL}"\n'
            f'[worker.engine]\nkind = "vllm"\nmodel = "tiny"\nfiles = "{MODEL}"\nattached = true\n'
        )
        command = [REFRAIN, "up", "--config", folder / "mesh.toml"]
        self.mesh.store = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        wait_until("the mesh is ready", self.is_ready)
        return keys

    def run_refrain(self, *command):
        command = [REFRAIN, *command, "--file", self.mesh.folder / "tenants.toml"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def is_ready(self):
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz").status == 200
        except OSError:
            return False

    def ask(self, key, **fields):
        """The lengths of the drafts of each step of a request."""
        body = {"model": "tiny", "prompt": "SELECT", "max_tokens": len(TEXT), "temperature": 0, **fields}
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        usage = json.load(urllib.request.urlopen(request))["usage"]
        self.assertEqual(usage["completion_tokens"], len(TEXT))
        return self.engine.drafted

    def longest(self, key, due):
        """Asks until the longest draft has the due length: a step that finds an index busy goes without drafts."""
        wait_until(f"drafts of {due} tokens", lambda: max(self.ask(key)) == due)

    def test_rules_of_tenants_hold_in_the_engine(self):
        keys = self.start(
            free=(), short=("--max-spec-tokens", "3"), off=("--max-spec-tokens", "0"),
            # The longest match counts as one of 64 tokens.
            low=("--alpha", "0.25"), sure=("--min-token-prob", "0.99"),
        )  # fmt: skip
        self.longest(keys["free"], TREE_DEPTH)
        self.longest(keys["short"], 3)
        for _ in range(3):
            self.assertEqual(max(self.ask(keys["short"])), 3)
        self.longest(keys["low"], 16)
        # Others have drafts after as many requests.
        for name in ("off", "sure"):
            for _ in range(4):
                self.assertEqual(max(self.ask(keys[name])), 0, name)
        # A request can turn drafts off for itself.
        self.assertEqual(max(self.ask(keys["free"], speculation="off")), 0)
        self.longest(keys["free"], TREE_DEPTH)
        self.assertEqual(self.engine.cache.client.stats()["refused_fields"], 0)


if __name__ == "__main__":
    import sys

    unittest.main(argv=sys.argv[:1])
