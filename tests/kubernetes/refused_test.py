"""Values that the chart refuses, by a sentence that says what to do."""

import copy
import re

import pytest
from helm_python.errors import HelmError

import secured
from examples import DOWNLOAD, ENGINE, EXTERNAL, FOUND, MODELS, NATS, OFFER, SERVICE, SIZES, pool
from rendered import lint_errors, merged, render, workloads


def gateway_files(files):
    return {"config": {"gateway": {"models": [{"id": "m", "files": files}]}}}


def homeless():
    """The size of a team, whose engine has no home."""
    size = copy.deepcopy(SIZES["team"])
    size["workerPools"][0]["sidecar"]["env"] = [{"name": "A", "value": "b"}]
    return size


OWN_VOLUME = {
    "extraVolumes": [{"name": "own", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "own", "mountPath": "/own/"}],
}

WRONG = {
    "a key that does not exist": ({"gatway": {}}, "gatway"),
    "a key of the configuration that does not exist": ({"config": {"gateway": {"modles": []}}}, "modles"),
    "a value of a wrong type": ({"config": {"drain_grace_ms": "30s"}}, "drain_grace_ms"),
    "a secret in the configuration": ({"config": {"mesh": {"secret": "x" * 40}}}, "secret"),
    "an API key in the configuration": ({"config": {"gateway": {"keys": [{"key": "k", "tenant": "t"}]}}}, "key"),
    "a password of Redis": ({"config": {"gateway": {"limits_redis": {"password": "p"}}}}, "password"),
    "a password of NATS": ({"nats": {"servers": ["nats://a:b@nats:4222"]}}, "servers"),
    "a key of an engine": (pool(engine={"api_key": "k"}), "api_key"),
    "an address that the chart sets": ({"config": {"gateway": {"listen": "0.0.0.0:1"}}}, "listen"),
    "the tag latest": ({"image": {"tag": "latest"}}, "tag"),
    "a download of the tag latest": ({"models": {"download": {"image": "fetch:latest"}}}, "download"),
    "a source of an unknown kind": (pool(**FOUND, sources=["http://vllm:8000"]), "sources"),
    "a pool for no engine": (pool(**FOUND, sources=[SERVICE], enginesMax=0), "enginesMax"),
    "an engine of an unknown kind": (pool(**{**EXTERNAL, "engine": {"kind": "vlm"}}), "kind"),
}

# What no schema can say. `helm template` and `helm install` refuse it, and `helm lint` lets it pass.
CONTRADICTIONS = {
    "a pool without an engine": (pool(referenceEngine=False), "needs one engine"),
    "a pool with two engines": (pool(url="http://a"), "needs one engine"),
    "two workers in front of one engine": (pool(**{**EXTERNAL, "replicas": 2}), "set replicas: 1"),
    "two workers by the defaults": (
        {"workerDefaults": {"replicas": 2}, "workerPools": [{"name": "a", "url": "http://a", "engine": ENGINE}]},
        "set replicas: 1",
    ),
    "one engine that grows": (pool(**EXTERNAL, autoscaling={"enabled": True}), "without autoscaling"),
    "an engine and sources of engines": (pool(**EXTERNAL, sources=[SERVICE]), "needs one engine"),
    "two processes for the engines of sources": (
        pool(**{**FOUND, "replicas": 2}, sources=[SERVICE]),
        "enginesMax for more engines",
    ),
    "sources that grow": (pool(**FOUND, sources=[SERVICE], autoscaling={"enabled": True}), "without autoscaling"),
    "sources that two pools have": (
        {
            **OFFER,
            "workerPools": [
                {**FOUND, "name": name, "sources": [f"kubernetes://{namespace}/services/vllm?port=8000"]}
                for name, namespace in (("a", ""), ("b", "llm"))
            ],
        },
        "name it once",
    ),
    "sources in the configuration": (
        {**MODELS, **pool(config={"worker": {"adoption": {"engines_max": 4}}})},
        "set sources and enginesMax",
    ),
    "a sidecar without a home": (homeless(), "add {name: HOME, value: /tmp} to sidecar.env"),
    "no model": ({"config": {"gateway": {"models": []}}}, "name at least one model"),
    "files of a model in no volume": (gateway_files("/models/x"), "models.volume"),
    "files of a model that are a URL": (gateway_files("https://models/x"), "models.volume"),
    "files of a model beside its volume": ({**MODELS, **gateway_files("/models-of-others/x")}, "models.volume"),
    "files of a model in the volume of another role": (
        {**gateway_files("/own/x"), "scheduler": OWN_VOLUME},
        "extraVolumeMounts of gateway",
    ),
    "files of a model in one pod with everything": (
        merged(SIZES["laptop"], {**gateway_files("/own/x"), "gateway": OWN_VOLUME}),
        "extraVolumeMounts of single",
    ),
    "files of an engine in no volume": (pool(**EXTERNAL), "models.volume"),
    "a pool whose model nobody offers": ({**MODELS, **pool(**EXTERNAL)}, "config.gateway.models"),
    "files of an engine in the configuration of its pool": (
        pool(config={"worker": {"engine": {"files": "/x"}}}),
        "extraVolumeMounts of the pool",
    ),
    "a download without a volume": ({"models": {"download": DOWNLOAD}}, "emptyDir: {}"),
    "a download into a volume to read": (
        {"models": {"volume": {"persistentVolumeClaim": {"claimName": "m", "readOnly": True}}, "download": DOWNLOAD}},
        "leave readOnly out",
    ),
    "a download without an image": (
        {"models": {"volume": {"emptyDir": {}}, "download": {"command": ["fetch"]}}},
        "models.download.image",
    ),
    "two pools of one name": ({"workerPools": [*pool()["workerPools"], *pool()["workerPools"]]}, "two pools"),
    "replicas of the store without NATS": ({"draftStore": {"replicas": 2}}, "nats.servers"),
    "tenants in replicas of a store": (
        {"draftStore": {"replicas": 2}, "nats": NATS, "tenants": {"source": "store"}},
        "tenants.source",
    ),
    "a trainer without a tenant": (
        merged(secured.TRAINER, {"config": {"gateway": {"trainer": {"tenant": ""}}}}),
        "config.gateway.trainer.tenant",
    ),
    "a trainer that everybody may call": (
        merged(secured.TRAINER, {"networkPolicies": {"trainers": []}}),
        "networkPolicies.trainers",
    ),
    "a trainer in one pod with everything": (merged(secured.TRAINER, {"mode": "single"}), "trainer.enabled"),
    "settings of a trainer without its gateway": (
        merged(secured.TRAINER, {"trainer": {"enabled": False}}),
        "trainer.enabled",
    ),
    "each pod scraped twice": (
        {"metrics": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}},
        "enable one of them",
    ),
    "an Ingress without a host": ({"ingress": {"enabled": True}}, "ingress.host"),
    "a route without a Gateway": ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_by_its_name(name):
    values, named_in_error = WRONG[name]
    with pytest.raises(HelmError, match=re.escape(named_in_error)):
        render(values)
    # `helm lint` says so too.
    assert any(named_in_error in error for error in lint_errors(values))


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_values_that_contradict_each_other_are_refused_with_a_reason(name):
    values, named_in_error = CONTRADICTIONS[name]
    with pytest.raises(HelmError, match=re.escape(named_in_error)):
        render(values)


@pytest.mark.parametrize(
    "source",
    [
        "kubernetes://llm",
        "kubernetes://llm/nodes/a",
        "kubernetes://llm/services/vllm",
        "kubernetes://llm/services/vllm?port=0",
        "kubernetes://llm/services/a/b?port=8000",
        "kubernetes://llm/pods?port=8000",
        "kubernetes://LLM/inferencepools/vllm",
        "kubernetes://llm/inferencepools/..",
    ],
)
def test_a_source_that_names_no_place_is_refused(source):
    with pytest.raises(HelmError, match="names no place in a cluster; write kubernetes://NAMESPACE/services/NAME"):
        render({**OFFER, **pool(**FOUND, sources=[source])})


@pytest.mark.parametrize("role", ["gateway", "single"])
def test_files_of_models_may_be_in_a_volume_of_their_role(role):
    mode = "single" if role == "single" else "mesh"
    objects = render({"mode": mode, **gateway_files("/own/x"), role: OWN_VOLUME})
    [edge] = [each for each in workloads(objects) if each.component == role]
    assert OWN_VOLUME["extraVolumeMounts"][0] in edge.main["volumeMounts"]
