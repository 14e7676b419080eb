"""Engines that come and go: what the one process in front of them may do, and how it is reached."""

import json

import pytest

import schemas
from examples import DOWNLOAD, FOUND, OFFER, SERVICE, pool
from rendered import RELEASE, entries, lint_errors, merged, named, of_kind, render, workloads

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
LIST_PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
LIST_ENDPOINTS = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}


def get_pool(name):
    kind = {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"]}
    return {**kind, "resourceNames": [name], "verbs": ["get"]}


def found(sources, **keys):
    """A pool whose engines these sources name: its values, objects, and the workload."""
    values = {**OFFER, **pool(**merged(FOUND, keys), sources=sources)}
    assert lint_errors(values) == []
    objects = render(values)
    for object in objects:
        if object["kind"] != "Secret":
            schemas.check(object)
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
        if ACCOUNT in [mount["mountPath"] for mount in container["volumeMounts"]]
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
