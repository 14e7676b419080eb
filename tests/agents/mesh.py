"""A mesh in front of the scripted engine, with one of the chat templates."""

import http.client
import json
import shutil
import socket
import subprocess
import time
from pathlib import Path

from engine import CONTEXT_TOKENS
from programs import KEY

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "services/reference-engine/model"
TEMPLATES = Path(__file__).parent / "templates"


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def model_files(folder, template):
    """Writes the files of a model that has the shipped tokenizer, this template and a long context."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(SHIPPED / name, folder / name)
    shutil.copy(TEMPLATES / f"{template}.jinja", folder / "chat_template.jinja")
    config = json.loads((SHIPPED / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    config["model_max_length"] = CONTEXT_TOKENS
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    config = json.loads((SHIPPED / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT_TOKENS
    (folder / "config.json").write_text(json.dumps(config))


class Mesh:
    """`refrain up` with one model, whose name is that of its template."""

    def __init__(self, refrain, work, engine_url, template):
        self.log = work / "refrain.log"
        self.port = free_port()
        model_files(work / "model", template)
        config = work / "refrain.toml"
        config.write_text(f"""
[urls]
engine = "{engine_url}"

[gateway]
listen = "127.0.0.1:{self.port}"

[[gateway.models]]
id = "{template}"
files = "{work}/model"
also = ["gpt-*", "claude-*"]

[[gateway.keys]]
key = "{KEY}"
tenant = "me"

[draft_store]
data_dir = "{work}/data"

[worker.engine]
kind = "vllm"
model = "{template}"
served_model = "{template}"
files = "{work}/model"
""")
        with self.log.open("w") as log:
            self.process = subprocess.Popen([refrain, "up", "--config", config], stdout=log, stderr=log, cwd=work)

    def await_ready(self, seconds=60):
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.poll() is None:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
                connection.request("GET", "/readyz")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise SystemExit(f"Refrain is not ready: see {self.log}")

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
