"""A mesh of separate processes with two reference engines, and the trainers' interface of its gateway."""

import concurrent.futures
import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real-engines"))

from engines import Process, call  # noqa: E402

MODEL, TENANT = "policy", "trainer"
MODEL_FOLDER = Path(__file__).resolve().parents[2] / "services/reference-engine/model"
NO_DRAFTS = '[worker.speculation]\nmax_spec_tokens = 0\nfallback = "off"\n'
DRAFTS = '[worker.speculation]\nfallback = "off"\n'
WORKERS = 2
# Requests at once. A trainer sends all of an epoch together, and the mesh holds what it cannot run yet.
CONNECTIONS = 64
# The gateway closes connections that were idle for longer, as between two epochs.
IDLE_S_MAX = 2


def free_ports(count):
    """Ports that nobody uses now, each another one."""
    sockets = [socket.socket() for _ in range(count)]
    for taken in sockets:
        taken.bind(("127.0.0.1", 0))
    ports = [taken.getsockname()[1] for taken in sockets]
    for taken in sockets:
        taken.close()
    return ports


class Mesh:
    """Seven processes: scheduler, draft store, two engines with their workers, gateway."""

    def __init__(self, refrain, work, name, model, worker_settings=""):
        self.refrain, self.name = refrain, name
        self.folder = work / name
        self.folder.mkdir(parents=True)
        keys = subprocess.run([refrain, "keys"], check=True, capture_output=True, text=True).stdout
        scheduler, store, gateway, operations, trainer, *others = free_ports(5 + 2 * WORKERS)
        self.engines, self.workers = others[:WORKERS], others[WORKERS:]
        self.gateway, self.trainer = gateway, trainer
        local = "127.0.0.1"
        urls = f'scheduler = "http://{local}:{scheduler}"\ndraft_store = "http://{local}:{store}"\n'
        self.processes = []
        self.start("scheduler", f'{keys}\n[scheduler]\nlisten = "{local}:{scheduler}"\n', scheduler)
        self.start(
            "draft-store",
            f'{keys}\n[draft_store]\nlisten = "{local}:{store}"\ndata_dir = "{self.folder}/data"\n',
            store,
        )
        for number, (engine, worker) in enumerate(zip(self.engines, self.workers)):
            self.start(
                "reference-engine",
                f'{keys}\n[engine]\nlisten = "{local}:{engine}"\nmodel = "{model}"\nmodel_name = "{MODEL}"\neagle3 = "off"\n',
                engine,
            )
            self.start(
                "worker",
                f'{keys}\n[urls]\n{urls}engine = "http://{local}:{engine}"\n[worker]\nid = "worker-{number}"\n'
                f'listen = "{local}:{worker}"\nadvertise_url = "http://{local}:{worker}"\n{worker_settings}\n',
                worker,
            )
        self.start(
            "gateway",
            f'{keys}\n[urls]\n{urls}[gateway]\nlisten = "{local}:{gateway}"\noperations_listen = "{local}:{operations}"\n'
            f'[gateway.trainer]\nlisten = "{local}:{trainer}"\ntenant = "{TENANT}"\nmodel = "{MODEL}"\n'
            f'[[gateway.models]]\nid = "{MODEL}"\nfiles = "{model}"\n'
            f'[[gateway.keys]]\nkey = "unused"\ntenant = "{TENANT}"\n',
            gateway,
        )
        self.url = f"http://{local}:{trainer}"
        self.pool = concurrent.futures.ThreadPoolExecutor(CONNECTIONS)
        self.connections = threading.local()
        self.await_workers()

    def start(self, role, text, port):
        count = sum(started[0] == role for started in self.processes)
        config = self.folder / f"{role}-{count}.toml"
        config.write_text(text)
        process = Process([self.refrain, role, "--config", config], config.with_suffix(".log"))
        self.processes.append((role, process))
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if process.child.poll() is not None:
                break
            try:
                if call(f"http://127.0.0.1:{port}/healthz", timeout=2)[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise SystemExit(f"{role} does not start: see {process.log}")

    def await_workers(self):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            status, answer = call(self.url + "/get_weight_version")
            if status == 200 and len(answer.get("workers", [])) == WORKERS:
                return
            time.sleep(0.1)
        raise SystemExit(f"the workers of {self.name} do not report")

    def post(self, path, body):
        """A control call. It must succeed on every worker."""
        status, answer = call(self.url + path, body, timeout=600)
        if status != 200:
            raise SystemExit(f"{path} answered {status}: {answer}")
        return answer

    def generate(self, body):
        """One rollout, in the words of SGLang's native interface. Each thread keeps its connection."""
        kept = getattr(self.connections, "kept", None)
        if kept is None or time.monotonic() - self.connections.used > IDLE_S_MAX:
            kept = self.connections.kept = http.client.HTTPConnection("127.0.0.1", self.trainer, timeout=600)
        kept.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
        response = kept.getresponse()
        text = response.read()
        self.connections.used = time.monotonic()
        if response.status != 200:
            raise SystemExit(f"/generate answered {response.status}: {text.decode(errors='replace')[:500]}")
        return json.loads(text)

    def counts(self):
        """Steps, draft tokens and emitted tokens by the text that drafts came from, summed over the workers."""
        sums = {}
        for worker in self.workers:
            _, text = call(f"http://127.0.0.1:{worker}/metrics")
            for kind, labels, value in re.findall(r"^refrain_spec_((?:drafted|accepted)_tokens)_total\{(.*)\} (\S+)$", text, re.M):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', labels))
                name = labels["scope"] if labels["source"] == "suffix" else labels["source"]
                sums.setdefault(name, {})
                sums[name][kind] = sums[name].get(kind, 0.0) + float(value)
        return sums

    def forget(self):
        """Erases everything that the tenant's outputs left, as if no epoch had been before."""
        command = [self.refrain, "store", "erase", "--tenant", TENANT]
        config = self.folder / "draft-store-0.toml"
        done = subprocess.run([*command, "--config", config], capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"refrain store erase failed: {done.stderr}")

    def stop(self):
        self.pool.shutdown()
        for _, process in reversed(self.processes):
            process.stop()
