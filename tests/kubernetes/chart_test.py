"""The chart: lint, rendering, schemas, and the rules that its objects keep."""

import base64
import copy
import json
import pathlib
import re
import shutil
import subprocess

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import Chart, package

import schemas
import secured
from examples import EXTERNAL, MODELS, NATS, OFFER, SIZES, pool
from rendered import (
    CHART,
    PROGRAM,
    ROOT,
    container_port,
    entries,
    lint_errors,
    merged,
    named,
    notes,
    of_kind,
    pod_of_helm_test,
    render,
    selects,
    workloads,
)


@pytest.fixture(scope="module", params=SIZES)
def size(request):
    return request.param


@pytest.fixture(scope="module")
def objects(size):
    return render(SIZES[size])


def test_lint_finds_nothing(size):
    assert lint_errors(SIZES[size]) == []


def test_every_object_follows_the_schema_of_its_kind(objects):
    assert len(objects) > 5
    for object in objects:
        schemas.check(object)


def test_the_check_of_schemas_finds_faults():
    objects = render(SIZES["fleet"])
    for kind, path in [
        ("Deployment", ("spec", "template", "spec")),
        ("NetworkPolicy", ("spec",)),
        ("ScaledObject", ("spec", "scaleTargetRef")),
        ("PodMonitor", ("spec",)),
        ("HTTPRoute", ("spec",)),
    ]:
        broken = copy.deepcopy(of_kind(objects, kind)[0])
        inner = broken
        for key in path:
            inner = inner[key]
        inner["misspelt"] = 1
        with pytest.raises(Exception, match="misspelt"):
            schemas.check(broken)
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        schemas.check({"apiVersion": "example.com/v1", "kind": "Unknown", "metadata": {"name": "a"}})


def image_of(objects, name):
    return [workload.main["image"] for workload in workloads(objects) if workload.name == name][0]


def spec(objects, kind, name):
    return named(objects, kind, name)["spec"]


def workload(objects, name):
    return [workload for workload in workloads(objects) if workload.name == name][0]


def config(objects, role):
    return json.loads(entries(objects, "ConfigMap", "refrain")[f"{role}.json"])


def kinds(objects):
    return {object["kind"] for object in objects}


TESTER = {
    "app.kubernetes.io/name": "refrain",
    "app.kubernetes.io/instance": "refrain",
    "app.kubernetes.io/component": "test",
}


def callers(objects):
    """Who may call the API, as the policy of the gateways says."""
    return spec(objects, "NetworkPolicy", "refrain-gateway")["ingress"][0]["from"]


# Values, and what they have to change. Each is rendered, linted and checked against the schemas as well.
VARIATIONS = {
    "image.tag": (
        {"image": {"tag": "v2"}},
        lambda o: image_of(o, "refrain-gateway") == "refrain:v2",
    ),
    "image.digest": (
        {"image": {"digest": "sha256:" + "a" * 64}},
        lambda o: image_of(o, "refrain-scheduler") == "refrain@sha256:" + "a" * 64,
    ),
    "image.pullSecrets": (
        {"image": {"pullSecrets": ["mine"]}},
        lambda o: all(w.pod["imagePullSecrets"] == [{"name": "mine"}] for w in workloads(o)),
    ),
    "nameOverride": (
        {"nameOverride": "mesh"},
        lambda o: named(o, "Deployment", "refrain-mesh-gateway") is not None,
    ),
    "fullnameOverride": (
        {"fullnameOverride": "drafts"},
        lambda o: "http://drafts-scheduler:8201" in named(o, "ConfigMap", "drafts")["data"]["gateway.json"],
    ),
    "config.drain_grace_ms": (
        {"config": {"drain_grace_ms": 120500}},
        lambda o: workload(o, "refrain-gateway").pod["terminationGracePeriodSeconds"] == 136
        and config(o, "gateway")["drain_grace_ms"] == 120500,
    ),
    "config.gateway": (
        {"config": {"gateway": {"requests_in_flight_max": 9}}},
        lambda o: config(o, "gateway")["gateway"]["requests_in_flight_max"] == 9,
    ),
    "config.draft_store": (
        {"config": {"draft_store": {"bytes_max": 12000000000}}},
        lambda o: config(o, "draft-store")["draft_store"]["bytes_max"] == 12000000000
        and "draft_store" not in config(o, "gateway"),
    ),
    "keys.existingSecret": (
        {"keys": {"existingSecret": "mine"}},
        lambda o: not [s for s in of_kind(o, "Secret") if s["metadata"]["name"] == "refrain-keys"]
        and all(v["secret"]["secretName"] == "mine" for v in volumes(o, "keys")),
    ),
    "tenants.existingSecret": (
        {"tenants": {"existingSecret": "mine"}},
        lambda o: [v["secret"]["secretName"] for v in volumes(o, "tenants")] == ["mine"]
        and len(of_kind(o, "Secret")) == 1,
    ),
    "tenants.source store": (
        {"tenants": {"source": "store"}},
        lambda o: config(o, "gateway")["gateway"]["tenants_in_store"] and not volumes(o, "tenants"),
    ),
    "tenants.source config": (
        {"tenants": {"source": "config"}, "config": {"gateway": {"anonymous_tenant": "all"}}},
        lambda o: "tenants_file" not in config(o, "gateway")["gateway"],
    ),
    "tenants.name": (
        {"tenants": {"name": "acme"}},
        lambda o: 'name = "acme"' in entries(o, "Secret", "refrain-tenants")["tenants.toml"],
    ),
    "nats.servers": (
        {"nats": NATS, "draftStore": {"replicas": 3}},
        lambda o: config(o, "draft-store")["draft_store"]["feed"]["servers"] == NATS["servers"]
        and len(config(o, "gateway")["urls"]["draft_stores"]) == 3,
    ),
    "nats.serversSecret": (
        {"nats": {"serversSecret": {"name": "nats"}}, "draftStore": {"replicas": 2}},
        lambda o: env(workload(o, "refrain-draft-store").main, "REFRAIN_DRAFT_STORE__FEED__SERVERS")["secretKeyRef"]
        == {"name": "nats", "key": "servers"},
    ),
    "redis.passwordSecret": (
        {"redis": {"passwordSecret": {"name": "r"}}, "config": {"gateway": {"limits_redis": {"url": "redis://r:1"}}}},
        lambda o: config(o, "gateway")["gateway"]["limits_redis"]
        == {"url": "redis://r:1", "password_file": "/etc/refrain/redis/password"},
    ),
    "models.volume": (
        MODELS,
        lambda o: len(volumes(o, "models")) == 2,
    ),
    "gateway.replicas": (
        {"gateway": {"replicas": 5}},
        lambda o: spec(o, "Deployment", "refrain-gateway")["replicas"] == 5,
    ),
    "gateway.replicas divide limits": (
        {"gateway": {"replicas": 4}},
        lambda o: config(o, "gateway")["gateway"]["limit_share"] == 0.25,
    ),
    "gateway.limit_share": (
        {"config": {"gateway": {"limit_share": 0.7}}},
        lambda o: config(o, "gateway")["gateway"]["limit_share"] == 0.7,
    ),
    "gateway.autoscaling": (
        {"gateway": {"autoscaling": {"enabled": True, "maxReplicas": 7}}},
        lambda o: spec(o, "HorizontalPodAutoscaler", "refrain-gateway")["maxReplicas"] == 7
        and "replicas" not in spec(o, "Deployment", "refrain-gateway"),
    ),
    "gateway.service.type": (
        {"gateway": {"service": {"type": "LoadBalancer", "annotations": {"a": "b"}}}},
        lambda o: spec(o, "Service", "refrain-gateway")["type"] == "LoadBalancer"
        and spec(o, "Service", "refrain-gateway-operations")["type"] == "ClusterIP",
    ),
    "gateway.preStopSeconds": (
        {"gateway": {"preStopSeconds": 0}},
        lambda o: "lifecycle" not in workload(o, "refrain-gateway").main,
    ),
    "gateway.extraEnv": (
        {"gateway": {"extraEnv": [{"name": "A", "value": "b"}]}},
        lambda o: {"name": "A", "value": "b"} in workload(o, "refrain-gateway").main["env"],
    ),
    "scheduler.nodeSelector": (
        {"scheduler": {"nodeSelector": {"disk": "fast"}, "priorityClassName": "high"}},
        lambda o: workload(o, "refrain-scheduler").pod["nodeSelector"] == {"disk": "fast"},
    ),
    "draftStore.persistence": (
        {"draftStore": {"persistence": {"size": "7Gi", "storageClassName": "fast"}}},
        lambda o: spec(o, "StatefulSet", "refrain-draft-store")["volumeClaimTemplates"][0]["spec"]["storageClassName"]
        == "fast",
    ),
    "workerPools.url": (
        {**OFFER, **pool(**EXTERNAL, engineKeySecret={"name": "k", "key": "token"})},
        lambda o: config(o, "worker-tiny")["urls"]["engine"] == "http://vllm:8000"
        and env(workload(o, "refrain-worker-tiny").main, "REFRAIN_WORKER__ENGINE__API_KEY")["secretKeyRef"]["name"] == "k",
    ),
    "workerPools.config": (
        pool(config={"worker": {"running_max": 3, "evacuate_after_ms": 60000}}),
        lambda o: config(o, "worker-tiny")["worker"]["running_max"] == 3
        and workload(o, "refrain-worker-tiny").pod["terminationGracePeriodSeconds"] == 90,
    ),
    "workerPools.tolerations": (
        pool(tolerations=[{"key": "gpu", "operator": "Exists"}]),
        lambda o: workload(o, "refrain-worker-tiny").pod["tolerations"][0]["key"] == "gpu",
    ),
    "workerDefaults.startupSeconds": (
        {"workerDefaults": {"startupSeconds": 1800}},
        lambda o: workload(o, "refrain-worker-tiny").main["startupProbe"]["failureThreshold"] == 1800,
    ),
    "workerDefaults.autoscaling": (
        {"workerDefaults": {"autoscaling": {"enabled": True}}},
        lambda o: len(spec(o, "ScaledObject", "refrain-worker-tiny")["triggers"]) == 1
        and "replicas" not in spec(o, "Deployment", "refrain-worker-tiny"),
    ),
    "topologySpread": (
        {"topologySpread": False},
        lambda o: not any("topologySpreadConstraints" in w.pod for w in workloads(o)),
    ),
    "disruptionBudgets": (
        {"disruptionBudgets": False},
        lambda o: "PodDisruptionBudget" not in kinds(o),
    ),
    "networkPolicies.enabled": (
        {"networkPolicies": {"enabled": False}},
        lambda o: "NetworkPolicy" not in kinds(o),
    ),
    "networkPolicies.clients": (
        {"networkPolicies": {"clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}},
        lambda o: callers(o) == [{"ipBlock": {"cidr": "10.0.0.0/8"}}, {"podSelector": {"matchLabels": TESTER}}]
        # Where clients are known, the pod of `helm test` is one of them.
        and selects(TESTER, pod_of_helm_test(o).labels),
    ),
    "networkPolicies.clients without a test": (
        {"networkPolicies": {"clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}, "test": {"enabled": False}},
        lambda o: callers(o) == [{"ipBlock": {"cidr": "10.0.0.0/8"}}] and "Pod" not in kinds(o),
    ),
    "networkPolicies.engines": (
        {"networkPolicies": {"engines": [{"podSelector": {"matchLabels": {"app": "vllm"}}}]}},
        lambda o: {"podSelector": {"matchLabels": {"app": "vllm"}}}
        in spec(o, "NetworkPolicy", "refrain-draft-store")["ingress"][0]["from"],
    ),
    "metrics.annotations": (
        {"metrics": {"annotations": False}},
        lambda o: not any("prometheus.io/scrape" in w.template["metadata"]["annotations"] for w in workloads(o)),
    ),
    "metrics.podMonitor": (
        {"metrics": {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}},
        lambda o: named(o, "PodMonitor", "refrain")["metadata"]["labels"]["release"] == "prometheus",
    ),
    "metrics.serviceMonitor": (
        {"metrics": {"serviceMonitor": {"enabled": True, "interval": "5s", "labels": {"release": "prometheus"}}}},
        lambda o: named(o, "ServiceMonitor", "refrain")["metadata"]["labels"]["release"] == "prometheus"
        and [endpoint["interval"] for endpoint in spec(o, "ServiceMonitor", "refrain")["endpoints"]] == ["5s", "5s"],
    ),
    "metrics.rules": (
        {"metrics": {"rules": {"enabled": True, "labels": {"release": "prometheus"}}}},
        lambda o: named(o, "PrometheusRule", "refrain")["metadata"]["labels"]["release"] == "prometheus",
    ),
    "trainer": (
        {**secured.TRAINER, "gateway": {"replicas": 4}},
        lambda o: config(o, "trainer")["gateway"]["trainer"]
        == {"tenant": "default", "listen": "0.0.0.0:8091", "allows_other_machines": True}
        # Clients of the API do not reach the trainer's gateway, and its limits are not divided.
        and config(o, "trainer")["gateway"]["listen"] == "127.0.0.1:8080"
        and "limit_share" not in config(o, "trainer")["gateway"]
        # Calls to other names are refused.
        and "refrain-trainer" in config(o, "trainer")["gateway"]["allowed_hosts"]
        and "refrain-gateway-operations" in config(o, "gateway")["gateway"]["allowed_hosts"]
        and config(o, "gateway")["gateway"]["limit_share"] == 0.25
        and "trainer" not in config(o, "gateway")["gateway"]
        and spec(o, "Deployment", "refrain-trainer")["strategy"] == {"type": "Recreate"},
    ),
    "ingress": (
        {"ingress": {"enabled": True, "host": "llm.example.com", "className": "nginx", "tlsSecret": "tls"}},
        lambda o: spec(o, "Ingress", "refrain-gateway")["tls"][0]["hosts"] == ["llm.example.com"],
    ),
    "httpRoute": (
        {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "timeout": "2h"}},
        lambda o: spec(o, "HTTPRoute", "refrain-gateway")["rules"][0]["timeouts"]["request"] == "2h",
    ),
}


def volumes(objects, name):
    return [v for w in workloads(objects) for v in w.pod["volumes"] if v["name"] == name]


def env(container, name):
    [found] = [entry for entry in container["env"] if entry["name"] == name]
    return found.get("valueFrom") or found["value"]


@pytest.mark.parametrize("name", VARIATIONS)
def test_a_value_has_its_effect(name):
    values, has_effect = VARIATIONS[name]
    assert lint_errors(values) == []
    objects = render(values)
    for object in objects:
        if object["kind"] != "Secret":
            schemas.check(object)
    assert has_effect(objects)


def test_every_example_in_the_values_is_valid():
    text = (CHART / "values.yaml").read_text()
    begin = text.index("#  - name: llama")
    example = "".join(line[1:] + "\n" for line in text[begin:].split("\n\n")[0].splitlines())
    pools = yaml.safe_load(example)
    offered = {"id": pools[0]["engine"]["model"], "files": pools[0]["engine"]["files"]}
    objects = render({**MODELS, "config": {"gateway": {"models": [offered]}}, "workerPools": pools})
    for pool in ("llama", "found"):
        assert config(objects, f"worker-{pool}")["worker"]["engine"]["served_model"] == "org/My-Model"


def test_each_role_gets_a_configuration_that_the_program_accepts(objects, tmp_path):
    """Reads each configuration by the program itself, with the variables of its container."""
    checked = 0
    leaf = secured.authority().issue_cert("localhost")
    certificates = tmp_path / "certificates"
    certificates.mkdir()
    leaf.cert_chain_pems[0].write_to_path(str(certificates / "tls.crt"))
    leaf.private_key_pem.write_to_path(str(certificates / "tls.key"))
    for each in workloads(objects):
        for container in each.containers:
            if container["args"][1:2] != ["--config"]:
                continue
            role, file = container["args"][0], pathlib.Path(container["args"][2]).name
            path = tmp_path / file
            # At this port nobody listens.
            text = re.sub(r"0\.0\.0\.0:\d+", "127.0.0.1:1", entries(objects, "ConfigMap", "refrain")[file])
            path.write_text(text.replace("/etc/refrain/mesh-tls", str(certificates)))
            # The check fails since nobody listens. It gets that far only with a configuration without faults.
            said = subprocess.run(
                [PROGRAM, "health", "--role", role, "--config", str(path), "--timeout-ms", "1000"],
                env={entry["name"]: variable(entry) for entry in container["env"]},
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert said.returncode == 1
            assert "does not answer" in said.stderr, said.stderr
            checked += 1
    assert checked >= 1


def variable(entry):
    """A value of the right form for a variable of a container."""
    if entry["name"].endswith("PUBLIC_KEY"):
        return "ab" * 32
    if entry["name"].endswith("SERVERS"):
        return '["nats://user:password@nats:4222"]'
    return entry.get("value", "x").replace("$(POD_NAME)", "pod-0").replace("$(POD_IP)", "10.0.0.9")


# The rules for containers: those of kube-linter that concern this chart.


def test_no_container_is_root_or_may_become_it(objects):
    for each in workloads(objects):
        pod = each.pod["securityContext"]
        assert pod["runAsNonRoot"] and pod["runAsUser"] > 0 and pod["runAsGroup"] > 0
        assert pod["seccompProfile"]["type"] == "RuntimeDefault"
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            assert key not in each.pod
        for container in each.containers:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False and own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in own and "runAsUser" not in own


def test_no_pod_reaches_into_its_node(objects):
    for each in workloads(objects):
        assert not [volume["name"] for volume in each.pod["volumes"] if "hostPath" in volume]
        for container in each.containers:
            for port in container["ports"]:
                assert port["containerPort"] >= 1024 and "hostPort" not in port


def test_every_image_has_a_version(objects):
    for each in workloads(objects):
        for container in each.containers:
            version = re.search(r"[:@]([^/]+)$", container["image"])
            assert version and version[1] != "latest", container["image"]


def test_every_container_has_requests_and_a_limit_of_memory(objects):
    for each in workloads(objects):
        for container in each.containers:
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys()
            assert "memory" in resources["limits"]


def test_only_pods_that_ask_the_cluster_have_rights_and_a_token(objects):
    assert not kinds(objects) & {"ClusterRole", "ClusterRoleBinding"}
    accounts = {account["metadata"]["name"]: account for account in of_kind(objects, "ServiceAccount")}
    have_rights = {subject["name"] for binding in of_kind(objects, "RoleBinding") for subject in binding["subjects"]}
    for each in workloads(objects):
        account = each.pod["serviceAccountName"]
        # What mounts tokens into all containers of a pod.
        assert each.pod["automountServiceAccountToken"] is False
        assert accounts[account]["automountServiceAccountToken"] is False
        has_token = any("projected" in volume for volume in each.pod.get("volumes", []))
        assert has_token == (account in have_rights)


def test_the_pod_of_helm_test_keeps_these_rules_as_well(objects):
    # As a workload it is looked at by the same tests.
    accounts = of_kind(objects, "ServiceAccount")
    pod = pod_of_helm_test(objects).object
    as_workload = {**pod, "kind": "Deployment", "spec": {"template": pod}}
    for rule in (
        test_no_container_is_root_or_may_become_it,
        test_every_image_has_a_version,
        test_every_container_has_requests_and_a_limit_of_memory,
        test_only_pods_that_ask_the_cluster_have_rights_and_a_token,
    ):
        rule([as_workload, *accounts])


@pytest.mark.parametrize(
    "values, asked",
    [
        ({}, "http://refrain-gateway:80 refrain-first-key"),
        ({"tenants": {"existingSecret": "t"}}, None),
        ({"tenants": {"existingSecret": "t"}, "test": {"apiKeySecret": {"name": "k"}}}, "http://refrain-gateway:80 k"),
        ({"tls": {"api": {"existingSecret": "c"}}}, None),
        ({"config": {"gateway": {"http": {"tls": {"certificate": "/c", "key": "/k"}}}}}, None),
        (
            {"tls": {"api": {"existingSecret": "c"}}, "test": {"url": "https://llm.example.com"}},
            "https://llm.example.com refrain-first-key",
        ),
    ],
)
def test_helm_test_sends_a_request_where_there_is_a_key_and_an_address(values, asked):
    pod = pod_of_helm_test(render(values))
    [health, url, *_] = pod.containers[0]["args"]
    scheme = "https" if "tls" in json.dumps(values) else "http"
    assert (health, url) == ("health", f"--url={scheme}://refrain-gateway:80")
    requests = pod.containers[1:]
    assert len(requests) == (asked is not None)
    for request in requests:
        assert request["args"][0] == "bench"
        [key] = request["env"]
        secret = key["valueFrom"]["secretKeyRef"]["name"]
        assert f"{request['args'][1].removeprefix('--url=')} {secret}" == asked
    assert pod.object["metadata"]["annotations"]["helm.sh/hook"] == "test"


def test_secrets_are_in_secrets_only(objects):
    secrets = [
        value
        for secret in of_kind(objects, "Secret")
        for value in entries(objects, "Secret", secret["metadata"]["name"]).values()
        if "\n" not in value
    ]
    others = json.dumps([object for object in objects if object["kind"] != "Secret"])
    assert not [value for value in secrets if value in others]
    for each in workloads(objects):
        for container in each.containers:
            for entry in container["env"]:
                is_secret = re.search("SECRET$|SIGNING_KEY$|API_KEY$|PASSWORD$|TOKEN$", entry["name"])
                assert not is_secret or "value" not in entry, entry["name"]
        # Only gateways sign.
        keys = [volume for volume in each.pod["volumes"] if volume["name"] == "keys"]
        items = [item["path"] for volume in keys for item in volume["secret"]["items"]]
        assert ("namespace-signing-key" in items) == (each.component in ("gateway", "trainer", "single"))


def test_each_volume_is_there_and_is_used(objects):
    for each in workloads(objects):
        claims = each.object["spec"].get("volumeClaimTemplates", [])
        there = {volume["name"] for volume in each.pod["volumes"]} | {claim["metadata"]["name"] for claim in claims}
        used = {mount["name"] for container in each.containers for mount in container.get("volumeMounts", [])}
        assert there == used, each.name


def test_probes_ask_for_different_things(objects):
    for each in workloads(objects):
        main = each.main
        for probe, path in [("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")]:
            if "exec" in main[probe]:
                assert ("--alive" in main[probe]["exec"]["command"]) == (path == "/healthz")
                continue
            asked = main[probe]["httpGet"]
            assert asked["path"] == path
            assert container_port(main, asked["port"]) > 0
        # A process that is busy is taken out of service long before it is restarted. A gateway that waits for the
        # scheduler is in service for longer than its requests wait.
        patience = {
            name: main[name]["periodSeconds"] * main[name]["failureThreshold"]
            for name in ("readinessProbe", "livenessProbe")
        }
        assert patience["livenessProbe"] >= 8 * patience["readinessProbe"]
        assert patience["readinessProbe"] > 10
        for container in each.containers:
            assert {"startupProbe", "livenessProbe"} <= container.keys()


def test_a_pod_may_end_before_it_is_killed(objects):
    for each in workloads(objects):
        grace = each.pod["terminationGracePeriodSeconds"]
        [role, _, file] = each.main["args"]
        own = json.loads(entries(objects, "ConfigMap", "refrain")[pathlib.Path(file).name])
        sleep = each.main.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if role in ("gateway", "up"):
            needed = sleep + own.get("drain_grace_ms", 30_000) / 1000 + 2
        elif role == "worker":
            # Chunks, then twice the time for outputs to reach the store.
            needed = own["worker"].get("evacuate_after_ms", 20_000) / 1000 + 10
        else:
            needed = 5
        assert grace >= needed + 5, each.name


def test_services_lead_to_ports_that_exist(objects):
    for service in of_kind(objects, "Service"):
        found = [w for w in workloads(objects) if selects(service["spec"]["selector"], w.labels)]
        assert found, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert all(container_port(w.main, port["targetPort"]) for w in found)


def test_selectors_find_the_pods_of_one_workload(objects):
    for each in workloads(objects):
        selector = each.object["spec"]["selector"]["matchLabels"]
        found = [other.name for other in workloads(objects) if selects(selector, other.labels)]
        assert found == [each.name]


def test_budgets_and_spread_name_pods_that_exist(objects):
    pods = [each.labels for each in workloads(objects)]
    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert any(selects(budget["spec"]["selector"]["matchLabels"], labels) for labels in pods)
    for each in workloads(objects):
        for constraint in each.pod.get("topologySpreadConstraints", []):
            assert selects(constraint["labelSelector"]["matchLabels"], each.labels)


def allowed(objects, port):
    """Who may call whom at a port, by components, as the policies say."""
    pods = workloads(objects)
    calls = set()
    for policy in of_kind(objects, "NetworkPolicy"):
        [callee] = {w.component for w in pods if selects(policy["spec"]["podSelector"]["matchLabels"], w.labels)}
        for rule in policy["spec"]["ingress"]:
            if [entry["port"] for entry in rule["ports"]] != [port]:
                continue
            if "from" not in rule:
                calls.add(("anybody", callee))
            for peer in rule.get("from", []):
                labels = peer.get("podSelector", {}).get("matchLabels")
                if labels == secured.TRAINER_PODS["podSelector"]["matchLabels"]:
                    calls.add(("trainers", callee))
                elif labels:
                    calls |= {(w.component, callee) for w in pods if selects(labels, w.labels)}
                else:
                    calls.add(("operators", callee))
    return calls


def test_only_those_who_need_it_may_call():
    objects = render()
    assert allowed(objects, "http") == {("anybody", "gateway")}
    assert allowed(objects, "operations") == {("operators", "gateway")}
    operators = {("operators", callee) for callee in ("scheduler", "worker", "draft-store")}
    assert allowed(objects, "internal") == operators | {
        ("gateway", "scheduler"),
        ("worker", "scheduler"),
        ("gateway", "worker"),
        ("gateway", "draft-store"),
        ("worker", "draft-store"),
        ("draft-store", "draft-store"),
    }


def test_a_trainer_calls_its_own_gateway_only():
    without, objects = render(), render(secured.TRAINER)
    assert allowed(objects, "trainer") == {("trainers", "trainer")}
    assert allowed(objects, "http") == allowed(without, "http")
    # Its gateway calls what the others call.
    more = {("trainer", callee) for caller, callee in allowed(without, "internal") if caller == "gateway"}
    assert allowed(objects, "internal") == allowed(without, "internal") | more
    assert allowed(objects, "operations") == {("operators", "gateway"), ("operators", "trainer")}


def test_each_pod_has_a_policy():
    objects = render(merged(SIZES["fleet"], secured.TRAINER))
    for each in workloads(objects):
        policies = of_kind(objects, "NetworkPolicy")
        found = [p for p in policies if selects(p["spec"]["podSelector"]["matchLabels"], each.labels)]
        assert len(found) == 1, each.name


def test_schedulers_never_give_the_same_slots_away(objects):
    for each in workloads(objects):
        if each.component == "scheduler" and config(objects, "scheduler")["scheduler"].get("standby") is None:
            assert each.object["spec"]["replicas"] == 1
            assert each.object["spec"]["strategy"] == {"type": "Recreate"}


def test_a_change_restarts_only_the_pods_that_read_it():
    def checksums(values):
        return {w.name: w.template["metadata"]["annotations"]["refrain/config"] for w in workloads(render(values))}

    before, after = checksums({}), checksums({"config": {"gateway": {"threads": 3}}})
    assert {name for name in before if before[name] != after[name]} == {"refrain-gateway"}
    after = checksums(pool(config={"worker": {"running_max": 3}}))
    assert {name for name in before if before[name] != after[name]} == {"refrain-worker-tiny"}


@pytest.mark.parametrize("values", [{}, merged(secured.VALUES, secured.TRAINER)], ids=["plain", "secured"])
def test_a_service_monitor_asks_the_same_pods_as_a_pod_monitor(values):
    def monitored(kind):
        monitors = {"podMonitor": {"enabled": kind == "pod"}, "serviceMonitor": {"enabled": kind == "service"}}
        return render(merged(values, {"metrics": monitors}))

    by_pods = spec(monitored("pod"), "PodMonitor", "refrain")
    objects = monitored("service")
    by_service = spec(objects, "ServiceMonitor", "refrain")
    assert by_service.pop("endpoints") == by_pods.pop("podMetricsEndpoints")
    selector = by_service.pop("selector")["matchLabels"]
    [service] = [s for s in of_kind(objects, "Service") if selects(selector, s["metadata"]["labels"])]
    assert service["spec"]["selector"] == by_pods.pop("selector")["matchLabels"]
    assert by_service == by_pods
    for each in workloads(objects):
        assert selects(service["spec"]["selector"], each.labels)
        # One port of the Service leads to the port with the metrics of each pod.
        metrics = each.main["ports"][-1]["name"]
        assert metrics in [port["targetPort"] for port in service["spec"]["ports"]]


def test_alerts_and_dashboards_are_those_of_the_repository():
    objects = render(SIZES["team"])
    files = [ROOT / "deploy" / "observability" / name for name in ("alerts.yml", "slo.yml")]
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    assert spec(objects, "PrometheusRule", "refrain") == {"groups": groups}
    # They look for jobs whose names begin so.
    for endpoint in spec(objects, "PodMonitor", "refrain")["podMetricsEndpoints"]:
        [relabeling] = endpoint["relabelings"]
        assert (relabeling["targetLabel"], relabeling["replacement"]) == ("job", "refrain-$1")
    shown = {
        key: json.loads(value)
        for object in of_kind(objects, "ConfigMap")
        if "grafana_dashboard" in object["metadata"]["labels"]
        for key, value in object["data"].items()
    }
    files = {path.name: json.loads(path.read_text()) for path in (ROOT / "dashboards").glob("*.json")}
    assert shown == files
    for object in of_kind(objects, "ConfigMap"):
        # The limit of Kubernetes for an object.
        assert len(json.dumps(object)) < 1_000_000


def test_a_package_of_the_chart_is_whole_and_small(tmp_path):
    file = package(str(CHART), destination=str(tmp_path))
    # A release keeps its chart in a Secret, which takes a megabyte.
    assert pathlib.Path(file).stat().st_size < 500_000
    with Chart.load(file) as chart:
        texts = chart.render(SIZES["team"], name="refrain", namespace="llm")
    objects = [object for path, text in texts.items() if path.endswith(".yaml") for object in yaml.safe_load_all(text)]
    names = [object["metadata"]["name"] for object in objects if object]
    assert sorted(names) == sorted(object["metadata"]["name"] for object in render(SIZES["team"]))


def test_the_keys_that_are_made_are_of_the_form_that_the_program_expects():
    objects, others = render(), render()
    keys = entries(objects, "Secret", "refrain-keys")
    assert keys.keys() == {"mesh-secret", "namespace-signing-key", "namespace-public-key"}
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in keys.values())
    assert entries(others, "Secret", "refrain-keys") != keys
    api_key = entries(objects, "Secret", "refrain-first-key")["api-key"]
    assert re.fullmatch(r"rfk-[0-9a-f]{12}-[A-Za-z0-9_-]{43}", api_key)
    for secret in of_kind(objects, "Secret"):
        assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_an_upgrade_keeps_the_keys_that_are_there(tmp_path):
    """Without a cluster `lookup` finds nothing, so a copy of the chart looks among the values."""
    copied = shutil.copytree(CHART, tmp_path / "refrain")
    template = copied / "templates" / "secrets.yaml"
    text, replaced = re.subn(
        r'lookup "v1" "Secret" \.Release\.Namespace (\$\w+)', r"get .Values.global.existing \1", template.read_text()
    )
    assert replaced == 3
    template.write_text(text)

    def secrets(existing):
        with Chart.load(str(copied)) as chart:
            texts = chart.render({"global": {"existing": existing}}, name="refrain", namespace="llm")
        return list(yaml.safe_load_all(texts["refrain/templates/secrets.yaml"]))

    def stored(secret):
        """As the cluster keeps a Secret, and gives it back."""
        plain = {key: base64.b64encode(text.encode()).decode() for key, text in secret.get("stringData", {}).items()}
        return {"data": {**secret.get("data", {}), **plain}}

    installed = {secret["metadata"]["name"]: stored(secret) for secret in secrets({})}
    upgraded = {secret["metadata"]["name"]: stored(secret) for secret in secrets(installed)}
    assert upgraded == installed and len(upgraded) == 3
    # Tenants that an operator edited since stay as they are.
    installed["refrain-tenants"]["data"]["tenants.toml"] = base64.b64encode(b"# edited").decode()
    again = {secret["metadata"]["name"]: stored(secret) for secret in secrets(installed)}
    assert again == installed


def test_the_notes_show_a_first_call_for_the_first_model():
    text = notes(merged(SIZES["laptop"], {"config": {"gateway": {"models": [{"id": "a", "files": "builtin:a"}]}}}))
    assert '"model": "a"' in text and "service/refrain-gateway 8080:80" in text
    assert "refrain-first-key" in text and "refrain-first-key" not in notes(SIZES["fleet"])
