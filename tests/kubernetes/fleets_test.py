"""Engines that come and go, and schedulers that stand by: what their processes may do in the cluster, and how they
are reached. The rules of chart_test.py hold for them as well."""

import asyncio
import contextlib
import json
import subprocess
import time

import httpx
import pytest

import schemas
import secured
from cluster_api import ACCOUNT_FOLDER, ClusterApi
from examples import DOWNLOAD, FOUND, OFFER, SCHEDULERS, SERVICE, pool
from local_cluster import HANG_S, Cluster, has_namespaces
from rendered import PROGRAM, RELEASE, entries, lint_errors, merged, named, of_kind, render, selects, workloads
from smoke_test import PORT, VALUES, Load

LIST_PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
LIST_ENDPOINTS = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}


def get_pool(name):
    kind = {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"]}
    return {**kind, "resourceNames": [name], "verbs": ["get"]}


def checked(values):
    assert lint_errors(values) == []
    objects = render(values)
    for object in objects:
        if object["kind"] != "Secret":
            schemas.check(object)
    return objects


def found(sources, **keys):
    """A pool whose engines these sources name: its values, objects, and the workload."""
    values = {**OFFER, **pool(**merged(FOUND, keys), sources=sources)}
    objects = checked(values)
    [worker] = [each for each in workloads(objects) if each.component == "worker"]
    return objects, worker


@pytest.mark.parametrize(
    "sources, expected",
    [
        ([SERVICE], {"llm": [LIST_ENDPOINTS]}),
        (["kubernetes://inference/pods?port=8000&selector=app=vllm"], {"inference": [LIST_PODS]}),
        (["kubernetes://inference/inferencepools/v.1"], {"inference": [LIST_PODS, get_pool("v.1")]}),
        (
            [
                SERVICE,
                "kubernetes://llm/services/others?port=8000",
                "kubernetes://a/pods?port=8000&selector=app=vllm,role=decode",
                "kubernetes://a/inferencepools/b",
                "dns+http://vllm:8000",
            ],
            {"llm": [LIST_ENDPOINTS], "a": [LIST_PODS, get_pool("b")]},
        ),
        (["dns+http://vllm:8000", "file:///engines.txt"], {}),
    ],
)
def test_a_pool_may_read_what_its_sources_need_and_nothing_else(sources, expected):
    objects, worker = found(sources)
    roles = {role["metadata"]["namespace"]: role for role in of_kind(objects, "Role")}
    assert {namespace: role["rules"] for namespace, role in roles.items()} == expected
    account = worker.pod["serviceAccountName"]
    # Other pools of workers have another account.
    assert account == (f"{RELEASE}-worker-tiny" if expected else f"{RELEASE}-worker")
    assert named(objects, "ServiceAccount", account)
    for binding in of_kind(objects, "RoleBinding"):
        role = roles.pop(binding["metadata"]["namespace"])
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "llm"}]
    assert not roles


def test_only_the_container_that_asks_the_cluster_has_the_token():
    values = merged({**OFFER, **pool(**FOUND, sources=[SERVICE])}, {"models": {"download": DOWNLOAD}})
    [worker] = [each for each in workloads(render(values)) if each.component == "worker"]
    have_it = [
        container["name"]
        for container in worker.containers
        if ACCOUNT_FOLDER in [mount["mountPath"] for mount in container["volumeMounts"]]
    ]
    assert len(worker.containers) == 2 and have_it == ["worker"]
    [volume] = [volume["projected"] for volume in worker.pod["volumes"] if "projected" in volume]
    files = [
        path
        for source in volume["sources"]
        for entry in source.values()
        for path in ([entry["path"]] if "path" in entry else [item["path"] for item in entry["items"]])
    ]
    assert sorted(files) == ["ca.crt", "namespace", "token"]


@pytest.mark.parametrize("engines_max", [None, 3])
def test_gateways_reach_the_workers_of_all_engines(engines_max):
    objects, worker = found([SERVICE], **({"enginesMax": engines_max} if engines_max else {}))
    config = entries(objects, "ConfigMap", "refrain")["worker-tiny.json"]
    adoption = json.loads(config)["worker"]["adoption"]
    count = engines_max or 16
    assert adoption == {"sources": [SERVICE], "engines_max": count, "first_port": 8210}
    assert "engine" not in json.loads(config)["urls"]
    rules = named(objects, "NetworkPolicy", "refrain-worker")["spec"]["ingress"]
    [range] = [rule for rule in rules if "endPort" in rule["ports"][0]]
    assert range["ports"] == [{"protocol": "TCP", "port": 8210, "endPort": 8209 + count}]
    callers = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in range["from"]]
    assert callers == ["gateway"]
    # A second process would drive the same engines, so there is none while pods are replaced either.
    assert worker.object["spec"]["replicas"] == 1
    assert worker.object["spec"]["strategy"] == {"type": "Recreate"}


def test_engines_of_a_known_kind_are_not_asked_for_it():
    objects, _ = found([SERVICE], engine={"kind": "sglang"})
    worker = json.loads(entries(objects, "ConfigMap", "refrain")["worker-tiny.json"])["worker"]
    assert worker["adoption"]["finds_kind"] is False and worker["engine"]["kind"] == "sglang"


def test_schedulers_that_stand_by_are_called_by_their_names_and_may_write_their_lease_only():
    objects = checked(SCHEDULERS)
    [scheduler] = [each for each in workloads(objects) if each.component == "scheduler"]
    assert scheduler.kind == "StatefulSet" and scheduler.object["spec"]["replicas"] == 2
    service = named(objects, "Service", scheduler.object["spec"]["serviceName"])["spec"]
    # Also one that is not ready hears of the workers.
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
    assert selects(service["selector"], scheduler.labels)
    expected = [f"http://refrain-scheduler-{number}.refrain-scheduler-pods:8201" for number in range(2)]
    files = {file: json.loads(text) for file, text in entries(objects, "ConfigMap", "refrain").items()}
    for file in ("gateway.json", "worker-tiny.json"):
        assert files[file]["urls"]["schedulers"] == expected
        assert "scheduler" not in files[file]["urls"]
    lease = files["scheduler.json"]["scheduler"]["standby"]["kubernetes_lease"]
    [id] = [entry["value"] for entry in scheduler.main["env"] if entry["name"] == "REFRAIN_SCHEDULER__STANDBY__ID"]
    assert id == "$(POD_NAME)"
    [role] = of_kind(objects, "Role")
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    named_lease = {**leases, "resourceNames": [lease], "verbs": ["get", "update"]}
    assert role["rules"] == [{**leases, "verbs": ["create"]}, named_lease]
    assert role["metadata"]["namespace"] == "llm"
    budget = named(objects, "PodDisruptionBudget", "refrain-scheduler")["spec"]
    assert selects(budget["selector"]["matchLabels"], scheduler.labels)


def test_one_scheduler_needs_no_rights_and_no_lease():
    objects = render()
    assert not of_kind(objects, "Role")
    assert named(objects, "Deployment", "refrain-scheduler") and named(objects, "Service", "refrain-scheduler")
    assert "standby" not in json.loads(entries(objects, "ConfigMap", "refrain")["scheduler.json"])["scheduler"]


@contextlib.contextmanager
def engine_at(ip, objects, folder):
    """A reference engine that belongs to no pod of the chart."""
    keys = entries(objects, "Secret", "refrain-keys")
    mesh = {"secret": keys["mesh-secret"], "namespace_public_key": keys["namespace-public-key"]}
    file = folder / f"{ip}.json"
    file.write_text(json.dumps({"engine": {"listen": f"{ip}:8204"}, "mesh": mesh}))
    command = [PROGRAM, "reference-engine", "--config", str(file)]
    with subprocess.Popen(command, env={}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


async def wait_for(holds):
    until = time.monotonic() + HANG_S
    while not await holds():
        assert time.monotonic() < until, holds.__name__
        await asyncio.sleep(0.1)


async def metric(pod, port, name):
    """The sum of a metric of a pod."""
    async with httpx.AsyncClient(trust_env=False) as client:
        page = (await client.get(f"http://{pod.ip}:{port}/metrics")).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{")))


async def replace_everything(objects, folder):
    """Takes one engine for another, and replaces the schedulers, while clients ask."""
    cluster = Cluster(objects, folder / "cluster", keeps_names=True)
    first, second = cluster.address(), cluster.address()
    api = cluster.api = ClusterApi(objects, secured.authority(), cluster.address())
    key = entries(objects, "Secret", "refrain-first-key")["api-key"]
    load = Load(f"http://{cluster.service_ips['refrain-gateway']}:{PORT}", key)

    def pods(component):
        return [pod for pod in cluster.pods if pod.workload.component == component]

    async def one_leads():
        return sum([await metric(pod, 8201, "refrain_scheduler_leads") for pod in pods("scheduler")]) == 1

    async def all_are_driven():
        driven = await metric(pods("worker")[0], 8202, "refrain_worker_adopted_engines")
        return driven == len(api.endpoints["engines"])

    async def further_answers():
        return load.answers[answered:] and load.answers[answered].tokens

    api.endpoints["engines"] = [first]
    with engine_at(first, objects, folder), engine_at(second, objects, folder):
        try:
            await cluster.start()
            await wait_for(one_leads)
            load.begin()
            for engines in ([first, second], [second]):
                api.endpoints["engines"] = engines
                await wait_for(all_are_driven)
            await cluster.roll("refrain-scheduler")
            await wait_for(one_leads)
            answered = len(load.answers)
            await wait_for(further_answers)
        finally:
            await load.end()
            await cluster.stop()
            api.close()
    return cluster, load


@pytest.mark.skipif(not has_namespaces(), reason="the files of an account need a mount namespace")
def test_engines_and_schedulers_are_exchanged_with_the_rights_that_the_chart_gives(tmp_path):
    engine = {"kind": "refrain", "model": "refrain-tiny", "files": "builtin:refrain-tiny"}
    pools = [{"name": "found", "engine": engine, "sources": ["kubernetes:///services/engines?port=8204"]}]
    objects = render(merged(VALUES, {**SCHEDULERS, "workerPools": pools}))
    cluster, load = asyncio.run(replace_everything(objects, tmp_path))
    assert cluster.api.refused == [] and cluster.faults == []
    assert load.answers and [answer.fault for answer in load.answers if answer.fault] == []
