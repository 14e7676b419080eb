"""The rendered pods as processes: they start, answer, and are replaced under load without a failed request."""

import asyncio
import hashlib
import itertools
import json
import os
import shutil
import socket
import ssl
import subprocess
import time
from dataclasses import dataclass

import httpx
import pytest

import secured
from local_cluster import HANG_S, Cluster, ask, has_namespaces, with_hosts
from rendered import PROGRAM, ROOT, entries, merged, pod_of_helm_test, render, values_files, workloads

# Loopback is fast, so a small load keeps both gateways and both workers busy.
CLIENTS = 3
# Not everybody may listen on port 80.
PORT = 8080
# All clients share a thread with the Services, and on a busy machine they may be late.
PATIENCE = {"config": {"gateway": {"http": {"head_ms_max": 60_000}}}}
VALUES = {"gateway": {"service": {"port": PORT}}, **PATIENCE}
# Answers of each phase that are compared, at least.
ANSWERS_MIN = 40
TABLES = ["orders", "lamps", "books", "trips", "rooms", "songs", "parts", "walks"]


@dataclass
class Answer:
    at: float
    table: str
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    fault: str = ""


class Load:
    """Clients that ask the same questions over and over, each on a new connection, and try nothing twice."""

    def __init__(self, url, key, trusted=None):
        self.url, self.key = url, key
        self.tls = {} if trusted is None else {"verify": trusted}
        # The address is that of a Service; the certificate has to be that of the host that clients call.
        self.extensions = {} if trusted is None else {"sni_hostname": secured.API_HOST}
        self.answers, self.tasks = [], []
        self.turns = itertools.count()

    async def ask(self, turn):
        table = TABLES[turn % len(TABLES)]
        body = {
            "model": "refrain-tiny",
            "temperature": 0,
            "max_tokens": 48,
            "stream": turn % 2 == 0,
            "messages": [
                {"role": "system", "content": "You write SQL. Answer with one statement."},
                {
                    "role": "user",
                    "content": f"CREATE TABLE {table} (\n  id INTEGER PRIMARY KEY,\n  city TEXT,\n  amount INTEGER\n);\n\n"
                    f"What is the average amount of the {table} per city?",
                },
            ],
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        answer = Answer(time.monotonic(), table)
        self.answers.append(answer)
        try:
            async with httpx.AsyncClient(timeout=HANG_S, trust_env=False, **self.tls) as client:
                response = await client.post(
                    f"{self.url}/v1/chat/completions",
                    json=body,
                    headers={"authorization": f"Bearer {self.key}"},
                    extensions=self.extensions,
                )
            if response.status_code != 200:
                answer.fault = f"{response.status_code}: {response.text[:300]}"
                return
            read(answer, response.text, body["stream"])
        except (httpx.HTTPError, ValueError, KeyError) as error:
            answer.fault = f"{type(error).__name__}: {error}"

    async def client(self):
        while True:
            await self.ask(next(self.turns))

    def begin(self):
        self.tasks = [asyncio.create_task(self.client()) for _ in range(CLIENTS)]

    async def end(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        # A request that the end of the test cuts off has no answer.
        self.answers = [answer for answer in self.answers if answer.steps or answer.fault]

    def asked(self, until):
        return sum(answer.at < until for answer in self.answers)

    def between(self, begin, end):
        return [answer for answer in self.answers if begin <= answer.at < end]


def read(answer, text, is_stream):
    """Takes what an answer says of its drafts. A stream that breaks off is a fault."""
    if is_stream:
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        if not events or events[-1] != "[DONE]":
            answer.fault = f"the stream ends with {events[-1:]}"
            return
        parts = [json.loads(event) for event in events[:-1]]
        [broken] = [part for part in parts if "error" in part] or [None]
        if broken:
            answer.fault = str(broken)
            return
    else:
        parts = [json.loads(text)]
    [said] = [part["metrics"]["speculative_decoding"] for part in parts if part.get("metrics")]
    answer.tokens = [part["usage"]["completion_tokens"] for part in parts if part.get("usage")][-1]
    answer.steps, answer.drafted, answer.accepted = said["steps"], said["drafted"], said["accepted"]


def accepted_per_step(answers):
    return sum(answer.accepted for answer in answers) / sum(answer.steps for answer in answers)


def accepted_share(answers):
    """The share of the output that came from drafts."""
    return sum(answer.accepted for answer in answers) / sum(answer.tokens for answer in answers)


def dip(before, during):
    """The part of that share that is missing, against earlier answers to the same questions."""
    usual = [means(before, answer.table) for answer in during]
    expected = sum(accepted for accepted, _ in usual) / sum(tokens for _, tokens in usual)
    return 1 - accepted_share(during) / expected


def means(answers, table):
    """The means of accepted tokens and of tokens of a question."""
    own = [answer for answer in answers if answer.table == table]
    assert own, f"nobody asked for {table}"
    return sum(answer.accepted for answer in own) / len(own), sum(answer.tokens for answer in own) / len(own)


async def smoke(objects, folder, rolls, authority=None, looks=None):
    """Runs the pods under load. With an authority everything has certificates. `looks` is run at the end, if given."""
    cluster = Cluster(objects, folder, keeps_names=authority is not None)
    key = entries(objects, "Secret", "refrain-first-key")["api-key"]
    trusted = None
    if authority is not None:
        trusted = ssl.create_default_context()
        authority.configure_trust(trusted)
    scheme = "http" if trusted is None else "https"
    load = Load(f"{scheme}://{cluster.service_ips['refrain-gateway']}:{PORT}", key, trusted)
    try:
        began = time.monotonic()
        await cluster.start()
        print(f"\n{len(cluster.pods)} pods ready after {time.monotonic() - began:.1f} s")
        # Each question is asked some times before anything counts, so that both workers know the answers.
        for turn in range(4 * len(TABLES)):
            await load.ask(turn)
        load.begin()
        marks = [time.monotonic()]
        async with asyncio.timeout(HANG_S):
            while len(load.answers) - load.asked(marks[-1]) < 2 * ANSWERS_MIN:
                await asyncio.sleep(0.1)
        marks.append(time.monotonic())
        for names in rolls:
            await asyncio.gather(*(cluster.roll(name) for name in names))
            # What follows a roll counts as well: the new pods are alone then.
            await asyncio.sleep(2)
            async with asyncio.timeout(HANG_S):
                while len(load.answers) - load.asked(marks[-1]) < ANSWERS_MIN:
                    await asyncio.sleep(0.1)
            marks.append(time.monotonic())
        await load.end()
        if looks:
            await looks(cluster)
    finally:
        await load.end()
        await cluster.stop()
    return cluster, load, marks


def check(cluster, load, marks, rolls):
    """Answers the dips of the rolls. No request may fail in any of them."""
    before = load.between(marks[0], marks[1])
    usual = accepted_per_step(before)
    print(
        f"before: {len(before)} requests, {100 * accepted_share(before):.1f} % of the output from drafts, "
        f"{usual:.2f} accepted tokens per step"
    )
    dips = []
    for names, begin, end in zip(rolls, marks[1:-1], marks[2:], strict=True):
        during = load.between(begin, end)
        failed = [answer for answer in during if answer.fault]
        well = [answer for answer in during if not answer.fault]
        dips.append(dip(before, well))
        print(
            f"{', '.join(names)}: {end - begin:.1f} s, {len(during)} requests, {len(failed)} failed, "
            f"{100 * accepted_share(well):.1f} % of the output from drafts (dip {100 * dips[-1]:.1f} %), "
            f"{accepted_per_step(well):.2f} accepted tokens per step"
        )
    assert cluster.faults == []
    assert [answer.fault for answer in load.answers if answer.fault] == []
    assert usual > 1, "nothing is drafted, so the test is blind"
    return dips


def test_each_role_is_replaced_under_load_without_a_failed_request(tmp_path):
    objects = render(VALUES)
    names = [workload.name for workload in workloads(objects)]
    assert len(names) == 4
    # At last all at once, as after a new version of the image.
    rolls = [*([name] for name in names), names]
    cluster, load, marks = asyncio.run(smoke(objects, tmp_path, rolls))
    dips = check(cluster, load, marks, rolls)
    # With all at once, a new worker may find no store to read from, and begins cold.
    assert max(dips[:-1]) < 0.10, dips


async def run_helm_test(cluster):
    """Runs the pod of `helm test`, and again while no gateway is ready."""
    said = await cluster.complete(pod_of_helm_test(cluster.objects))
    assert "ready" in said and "repetitive round 1 of 1" in said, said
    for pod in cluster.pods:
        pod.leave_services()
    with pytest.raises(AssertionError, match="does not answer"):
        await cluster.complete(pod_of_helm_test(cluster.objects))


def test_one_pod_with_everything_starts_and_answers_as_helm_test_says(tmp_path):
    objects = render(merged(values_files()["laptop"], VALUES))
    cluster, load, _ = asyncio.run(smoke(objects, tmp_path, [], looks=run_helm_test))
    assert cluster.faults == []
    assert [answer.fault for answer in load.answers if answer.fault] == []
    assert accepted_per_step(load.answers) > 1


def test_models_that_a_container_downloads_are_there_before_their_readers(tmp_path):
    source = ROOT / "services" / "reference-engine" / "model"
    # Another folder stands for what others download from.
    command = ["/bin/sh", "-c", f"mkdir -p $HOME/mine && cp {source}/*.json $TMPDIR/mine && test $COMPONENT = single"]
    values = {
        "models": {"volume": {"emptyDir": {}}, "download": {"image": "fetch:1", "command": command}},
        "config": {"gateway": {"models": [{"id": "refrain-tiny", "files": "/models/mine"}]}},
    }
    objects = render(merged(values_files()["laptop"], merged(VALUES, values)))
    cluster, load, _ = asyncio.run(smoke(objects, tmp_path, []))
    assert cluster.faults == []
    assert [answer.fault for answer in load.answers if answer.fault] == []


async def look_at_trainer(cluster):
    """Sends a rollout as a trainer does, and asks for the weights of all workers."""
    url = f"http://{cluster.service_ips['refrain-trainer']}:8091"
    rollout = {"text": "CREATE TABLE", "sampling_params": {"max_new_tokens": 8, "temperature": 0}, "return_logprob": True}
    async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as client:
        answer = await client.post(f"{url}/generate", json=rollout)
        assert answer.status_code == 200, answer.text
        meta = answer.json()["meta_info"]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] > 0
        workers = sum(pod.workload.component == "worker" for pod in cluster.pods)
        # A replaced worker whose farewell met a scheduler that was replaced as well is known until it is forgotten.
        async with asyncio.timeout(HANG_S):
            while len((await client.get(f"{url}/get_weight_version")).json()["workers"]) != workers:
                await asyncio.sleep(0.5)
    assert workers > 0


async def look_at_roles(cluster):
    """Checks what the certificates and credentials of a running mesh allow."""
    await look_at_trainer(cluster)
    scheduler = cluster.service_ips["refrain-scheduler"]
    # Whoever presents no certificate gets no answer, whatever else it has.
    for has_tls in (False, True):
        assert await ask(scheduler, 8201, "/healthz", 5, has_tls)
    [gateway, *_] = [pod for pod in cluster.pods if pod.workload.component == "gateway"]
    [store] = [pod for pod in cluster.pods if pod.workload.component == "draft-store"]
    config = store.main.mounts["/etc/refrain/config"] / "draft-store.json"
    command = [PROGRAM, "store", "stats", "--config", str(config), "--url", "https://refrain-draft-store:8203"]
    said = {}
    for credential in ("credential", "operator"):
        file = gateway.main.mounts["/etc/refrain/credential"] / credential
        process = await asyncio.create_subprocess_exec(
            *with_hosts(cluster.hosts, [*command, "--credential-file", str(file)]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], **store.main.variables},
        )
        text, _ = await process.communicate()
        said[credential] = (process.returncode, text.decode())
    assert said["operator"][0] == 0, said
    assert "documents" in said["operator"][1]
    assert said["credential"][0] != 0 and "operator" in said["credential"][1], said
    # Engines have asked each other for KV blocks, by certificates and credentials of their own.
    fetched = 0
    for pod in cluster.pods:
        if pod.workload.component == "worker":
            files = pod.main.mounts["/etc/refrain/mesh-tls"]
            context = ssl.create_default_context(cafile=files / "ca.crt")
            context.load_cert_chain(files / "tls.crt", files / "tls.key")
            async with httpx.AsyncClient(verify=context, trust_env=False) as client:
                url = f"https://{pod.ip}:8204/metrics"
                page = await client.get(url, extensions={"sni_hostname": "refrain-worker"})
            lines = [line for line in page.text.splitlines() if line.startswith("refrain_engine_kv_pool_")]
            print("\n".join(line for line in lines if not line.endswith(" 0")))
            fetched += sum(float(line.split()[-1]) for line in lines if "_fetched_total" in line)
    assert fetched > 0


@pytest.mark.skipif(not has_namespaces(), reason="names of hosts need a mount namespace")
def test_a_mesh_with_certificates_and_credentials_answers_and_is_replaced_without_a_failed_request(tmp_path):
    keys, of_roles = secured.credentials(tmp_path)
    values = merged(merged(secured.VALUES, secured.TRAINER), {**VALUES, "credentials": {"issuerPublicKeys": keys}})
    objects = render(values)
    authority = secured.authority()
    objects += [*secured.certificate_secrets(objects, authority), of_roles]
    rolls = [[workload.name for workload in workloads(objects)]]
    cluster, load, marks = asyncio.run(smoke(objects, tmp_path / "cluster", rolls, authority, look_at_roles))
    check(cluster, load, marks, rolls)


def tenants_secret(keys):
    """A Secret with a tenant for each key."""
    lines = []
    for number, key in enumerate(keys):
        hashed = hashlib.sha256(key.encode()).hexdigest()
        lines.append(
            f'[[tenants]]\nname = "t{number}"\n[[tenants.keys]]\nname = "k"\nid = "{key[4:16]}"\nsha256 = "{hashed}"\n'
        )
    return secured.secret("refrain-tenants", {"tenants.toml": "\n".join(lines).encode()})


async def documents(cluster):
    """The documents in each draft store."""
    found = {}
    async with httpx.AsyncClient(trust_env=False) as client:
        for pod in cluster.pods:
            if pod.workload.component == "draft-store":
                page = await client.get(f"http://{pod.ip}:8203/metrics")
                [line] = [line for line in page.text.splitlines() if line.startswith("refrain_draft_store_documents ")]
                found[pod.name] = float(line.split()[-1])
    return found


async def spread(objects, folder, keys):
    cluster = Cluster(objects, folder)
    loads = [Load(f"http://{cluster.service_ips['refrain-gateway']}:{PORT}", key) for key in keys]
    try:
        await cluster.start()
        for turn in range(3):
            await asyncio.gather(*(load.ask(turn) for load in loads))
        # A worker uploads outputs once they have ended.
        until = time.monotonic() + HANG_S
        while time.monotonic() < until and not all((await documents(cluster)).values()):
            await asyncio.sleep(0.2)
        return cluster, loads, await documents(cluster)
    finally:
        await cluster.stop()


@pytest.mark.skipif(not shutil.which("nats-server"), reason="there is no nats-server")
def test_outputs_of_several_tenants_are_spread_over_the_shards(tmp_path):
    # The names of tenants are fixed, and so are their shards. Both shards have some of eight.
    keys = [f"rfk-{number:012x}-{'k' * 43}" for number in range(8)]
    address = "127.0.0.2"
    with socket.create_server((address, 0)) as free:
        port = free.getsockname()[1]
    values = {
        "draftStore": {"shards": 2},
        # A broker sets the bytes of its streams aside, and this disk may be small.
        "config": {"draft_store": {"feed": {"max_bytes": 1 << 26}}},
        "nats": {"servers": [f"nats://{address}:{port}"]},
        "tenants": {"existingSecret": "refrain-tenants"},
        "workerPools": [{"name": "tiny", "referenceEngine": True}],
    }
    objects = [*render(merged(VALUES, values)), tenants_secret(keys)]
    broker = ["nats-server", "--addr", address, "--port", str(port), "--jetstream", "--store_dir", str(tmp_path / "n")]
    with subprocess.Popen(broker, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            cluster, loads, found = asyncio.run(spread(objects, tmp_path / "cluster", keys))
        finally:
            process.terminate()
    assert cluster.faults == []
    assert [answer.fault for load in loads for answer in load.answers if answer.fault] == []
    assert len(found) == 2 and all(found.values()), found
