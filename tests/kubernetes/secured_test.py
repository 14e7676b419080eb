"""Certificates, credentials of roles, and shards, as the objects have them. The rules of chart_test.py hold for these
values as well."""

import json
import re
import urllib.parse

import pytest
from helm_python.errors import HelmError

import schemas
import secured
from examples import SCHEDULERS
from rendered import (
    entries,
    lint_errors,
    merged,
    named,
    notes,
    of_kind,
    render,
    selects,
    values_files,
    workloads,
)

SECURED = secured.VALUES
SHARDED = {"draftStore": {"shards": 3, "replicas": 2}, "nats": {"servers": ["nats://nats:4222"]}}


def configs(objects):
    return {file: json.loads(text) for file, text in entries(objects, "ConfigMap", "refrain").items()}


def workload(objects, name):
    [found] = [workload for workload in workloads(objects) if workload.name == name]
    return found


def volume(workload, name):
    [found] = [volume for volume in workload.pod["volumes"] if volume["name"] == name]
    return found


def mounts(container):
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


def strings(value):
    """All texts in a value, with those of its parts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for part in value for text in strings(part)]
    return [value] if isinstance(value, str) else []


def certificate_hosts(objects):
    """The names in the certificates that processes show to callers, by component."""
    hosts = {}
    for each in workloads(objects):
        name = volume(each, "mesh-tls")["secret"]["secretName"]
        [found] = [c for c in of_kind(objects, "Certificate") if c["spec"]["secretName"] == name]
        hosts[each.component] = found["spec"]["dnsNames"]
    return hosts


@pytest.mark.parametrize(
    "values",
    [SECURED, merged(SECURED, {**SHARDED, **SCHEDULERS})],
    ids=["one of each", "several"],
)
def test_the_certificate_of_each_service_names_the_hosts_at_which_it_is_called(values):
    objects = render(values)
    hosts = certificate_hosts(objects)
    ports = {8201: "scheduler", 8202: "worker", 8203: "draft-store", 8204: "worker"}
    called = set()
    for file, config in configs(objects).items():
        advertised = [
            entry["value"].replace("$(POD_NAME)", f"{each.name}-0").replace("$(POD_IP)", "10.0.0.9")
            for each in workloads(objects)
            for entry in each.main["env"]
            if entry["name"].endswith("ADVERTISE_URL")
        ]
        urls = [text.removeprefix("dns+") for text in strings(config) if "://" in text and "nats:" not in text]
        for url in map(urllib.parse.urlsplit, [*urls, *advertised]):
            assert url.scheme == "https", (file, url)
            component = ports[url.port]
            # Pods are called by addresses, and the engines of a pool by those behind a name.
            by_address = re.fullmatch(r"[0-9.]+", url.hostname) or url.hostname.endswith("-engines")
            host = config["mesh"]["address_name"] if by_address else url.hostname
            assert host in hosts[component], (file, url)
            called.add(component)
        assert config["mesh"].keys() >= {"ca", "certificate", "key"}
    assert called == {"scheduler", "worker", "draft-store"}


def test_listeners_inside_the_mesh_ask_for_certificates_and_are_probed_with_one():
    objects = render(SECURED)
    for file, config in configs(objects).items():
        for section, keys in config.items():
            if section in ("scheduler", "worker", "draft_store", "engine"):
                assert keys["http"]["tls"]["client_ca"] == "/etc/refrain/mesh-tls/ca.crt", (file, section)
    for each in workloads(objects):
        for container in each.containers:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe not in container:
                    continue
                if each.component == "gateway":
                    assert container[probe]["httpGet"]["scheme"] == "HTTPS"
                    continue
                [program, command, *options] = container[probe]["exec"]["command"]
                assert (program, command) == ("/usr/local/bin/refrain", "health")
                assert f"--role={container['args'][0]}" in options
                assert f"--config={container['args'][2]}" in options
                assert ("--alive" in options) == (probe != "readinessProbe")


def test_prometheus_presents_a_certificate_and_knows_whom_it_asks():
    objects = render(SECURED)
    hosts = certificate_hosts(objects)
    [operations] = [c for c in of_kind(objects, "Certificate") if c["metadata"]["name"] == "refrain-operations-tls"]
    endpoints = named(objects, "PodMonitor", "refrain")["spec"]["podMetricsEndpoints"]
    asked = set()
    for endpoint in endpoints:
        assert endpoint["scheme"] == "https"
        name = endpoint["tlsConfig"]["serverName"]
        if endpoint["port"] == "operations":
            assert name in operations["spec"]["dnsNames"]
            continue
        [component] = [rule["regex"] for rule in endpoint["relabelings"] if rule.get("action") == "keep"]
        assert name in hosts[component]
        assert endpoint["tlsConfig"]["cert"]["secret"]["name"] == "refrain-metrics-mesh-tls"
        asked.add(component)
    assert asked == {"scheduler", "worker", "draft-store"}


def test_each_process_has_its_own_credential_only():
    objects = render(SECURED)
    expected = {
        "refrain-gateway": {"credential": ["gateway", "operator"]},
        "refrain-scheduler": {"credential": ["scheduler"]},
        "refrain-draft-store": {"credential": ["draft-store"]},
        "refrain-worker-tiny": {"credential": ["worker-tiny"], "engine-credential": ["engine-tiny"]},
    }
    for each in workloads(objects):
        found = {
            volume["name"]: sorted(item["key"] for item in volume["secret"]["items"])
            for volume in each.pod["volumes"]
            if volume.get("secret", {}).get("secretName") == "refrain-credentials"
        }
        assert found == expected[each.name]
        for container in each.containers:
            own = "engine-credential" if container["name"] == "engine" else "credential"
            assert [name for name in mounts(container) if name.endswith("credential")] == [own]
        # Nobody sees the secret that would allow everything.
        secrets = [volume.get("secret", {}) for volume in each.pod["volumes"]]
        items = [item["key"] for secret in secrets for item in secret.get("items", [])]
        assert "mesh-secret" not in items
    for config in configs(objects).values():
        assert "secret_file" not in config["mesh"]
        assert config["mesh"]["credential_file"] == "/etc/refrain/credential/credential"
    assert configs(objects)["gateway.json"]["gateway"]["operator_credential_file"].endswith("/operator")
    # Operators are a choice.
    without = render(merged(SECURED, {"credentials": {"forOperators": False}}))
    [item] = volume(workload(without, "refrain-gateway"), "credential")["secret"]["items"]
    assert item == {"key": "gateway", "path": "credential"}
    assert "operator_credential_file" not in configs(without)["gateway.json"]["gateway"]


def test_a_mesh_changes_from_the_secret_to_credentials_in_three_steps():
    keys = {"issuerPublicKeys": ["ab" * 32]}
    steps = [
        ({}, (True, False, False)),
        (keys, (True, True, False)),
        ({**keys, "existingSecret": "c", "acceptsMeshSecret": True}, (True, True, True)),
        ({**keys, "existingSecret": "c"}, (False, True, True)),
    ]
    for values, expected in steps:
        objects = render({"credentials": values})
        for config in configs(objects).values():
            mesh = config["mesh"]
            found = tuple(key in mesh for key in ("secret_file", "issuer_public_keys", "credential_file"))
            assert found == expected


def test_an_engine_with_the_package_inside_has_a_credential_and_a_certificate():
    engine = {"kind": "vllm", "model": "refrain-tiny", "files": "builtin:refrain-tiny", "attached": True}
    [pool] = values_files()["team"]["workerPools"]
    pool = {**pool, "engine": engine}
    objects = render(merged(SECURED, {"workerPools": [pool]}))
    [container] = workload(objects, f"refrain-worker-{pool['name']}").pod["initContainers"]
    given = {entry["name"].removeprefix("REFRAIN_CLIENT_"): entry.get("value") for entry in container["env"]}
    assert given["STORE_URL"] == "https://refrain-draft-store:8203"
    assert json.loads(given["MESH__ISSUER_PUBLIC_KEYS"]) == SECURED["credentials"]["issuerPublicKeys"]
    assert given["MESH__CREDENTIAL_FILE"] == "/etc/refrain/credential/credential"
    assert given["MESH__CA"] == "/etc/refrain/mesh-tls/ca.crt"
    assert "MESH__SECRET_FILE" not in given and "MESH__ADDRESS_NAME" not in given
    assert mounts(container)["engine-credential"] == "/etc/refrain/credential"


def test_existing_secrets_need_no_issuer():
    values = {
        "tls": {
            "api": {"existingSecret": "api"},
            "operations": {"existingSecret": "operations"},
            "mesh": {
                "enabled": True,
                "existingSecrets": {"gateway": "g", "scheduler": "s", "draftStore": "d", "worker": "w"},
            },
        }
    }
    assert lint_errors(values) == []
    objects = render(values)
    assert of_kind(objects, "Certificate") == []
    mounted = {each.component: volume(each, "mesh-tls")["secret"]["secretName"] for each in workloads(objects)}
    assert mounted == {"gateway": "g", "scheduler": "s", "draft-store": "d", "worker": "w"}
    gateway = workload(objects, "refrain-gateway")
    assert volume(gateway, "api-tls")["secret"]["secretName"] == "api"
    assert volume(gateway, "operations-tls")["secret"]["secretName"] == "operations"


def test_certificates_given_by_hand_are_probed_right_as_well():
    tls = {"certificate": "/own/tls.crt", "key": "/own/tls.key"}
    objects = render({"config": {"gateway": {"operations_http": {"tls": tls}}}})
    probe = workload(objects, "refrain-gateway").main["readinessProbe"]
    assert probe["httpGet"] == {"path": "/readyz", "port": "operations", "scheme": "HTTPS"}


def test_the_notes_call_the_host_of_the_certificate():
    text = notes(SECURED)
    assert f"https://{secured.API_HOST}:8080" in text
    assert f"--resolve {secured.API_HOST}:8080:127.0.0.1" in text
    assert "http://127.0.0.1:8080" in notes({})


def test_all_shards_are_known_to_their_callers_and_each_to_its_own_replicas():
    objects = render(SHARDED)
    hosts = {
        shard: {
            f"http://refrain-draft-store-shard-{shard}-{number}.refrain-draft-store-shard-{shard}-pods:8203"
            for number in range(2)
        }
        for shard in range(3)
    }
    everywhere = set().union(*hosts.values())
    for file, config in configs(objects).items():
        if file.startswith(("gateway", "worker")):
            assert set(config["urls"]["draft_stores"]) == everywhere
    for shard in range(3):
        feed = configs(objects)[f"draft-store-shard-{shard}.json"]["draft_store"]["feed"]
        assert (feed["shard"], feed["shards"]) == (shard, 3)
        assert set(feed["peers"]) == hosts[shard]
        each = workload(objects, f"refrain-draft-store-shard-{shard}")
        assert each.object["spec"]["replicas"] == 2
        # The name behind which its pods are.
        service = named(objects, "Service", each.object["spec"]["serviceName"])
        found = [other.name for other in workloads(objects) if selects(service["spec"]["selector"], other.labels)]
        assert found == [each.name]
        budget = named(objects, "PodDisruptionBudget", each.name)["spec"]["selector"]["matchLabels"]
        assert [other.name for other in workloads(objects) if selects(budget, other.labels)] == [each.name]
    # Shards of one replica each have a feed as well, since they tell each other who has what.
    single = render({"draftStore": {"shards": 2}, "nats": SHARDED["nats"]})
    assert len(configs(single)["gateway.json"]["urls"]["draft_stores"]) == 2
    # One shard has no number, so that nothing changes for those who have no shards.
    assert "draft-store.json" in configs(render())


def test_reference_engines_take_kv_blocks_from_each_other():
    objects = render({"config": SECURED["config"]})
    engine = configs(objects)["worker-tiny.json"]["engine"]
    assert engine["kv_pool"]["peers"] == ["dns+http://refrain-worker-tiny-engines:8204"]
    service = named(objects, "Service", "refrain-worker-tiny-engines")["spec"]
    assert service["clusterIP"] == "None" and service["ports"][0]["targetPort"] == 8204
    [rule] = [
        rule
        for rule in named(objects, "NetworkPolicy", "refrain-worker")["spec"]["ingress"]
        if rule["ports"][0]["port"] == 8204
    ]
    workers = workload(objects, "refrain-worker-tiny").labels
    assert [selects(peer["podSelector"]["matchLabels"], workers) for peer in rule["from"]] == [True]
    # One engine has nobody to ask, and without a pool there is nothing to ask for.
    alone = {"workerPools": [{"name": "tiny", "referenceEngine": True, "replicas": 1}]}
    for values in (merged({"config": SECURED["config"]}, alone), {}):
        objects = render(values)
        assert "peers" not in configs(objects)["worker-tiny.json"]["engine"].get("kv_pool", {})
        assert "refrain-worker-tiny-engines" not in {s["metadata"]["name"] for s in of_kind(objects, "Service")}


WRONG = {
    "shards without NATS": ({"draftStore": {"shards": 2}}, "nats.servers"),
    "tenants in shards": (merged(SHARDED, {"tenants": {"source": "store"}}), "tenants.source"),
    "certificates of the mesh from nowhere": ({"tls": {"mesh": {"enabled": True}}}, "existingSecrets.gateway"),
    "credentials that nobody can verify": ({"credentials": {"existingSecret": "c"}}, "credentials.issuerPublicKeys"),
    "certificates between services of one process": (
        merged(SECURED, {"mode": "single", "credentials": {"existingSecret": ""}}),
        "tls.mesh.enabled",
    ),
    "credentials of one process": (
        merged(SECURED, {"mode": "single", "tls": {"mesh": {"enabled": False}}}),
        "credentials.existingSecret",
    ),
    "a certificate twice": (
        {
            "tls": {"api": {"existingSecret": "a"}},
            "config": {"gateway": {"http": {"tls": {"certificate": "c", "key": "k"}}}},
        },
        "config.gateway.http.tls",
    ),
    "a pool whose credential is good for another one": (
        merged(
            SECURED,
            {"workerPools": [{"name": name, "referenceEngine": True} for name in ("small", "small-fast")]},
        ),
        "rename one of them",
    ),
    "a credential in the configuration": ({"config": {"mesh": {"credential_file": "/c"}}}, "credential_file"),
    "a key of an issuer that is none": ({"credentials": {"issuerPublicKeys": ["abc"]}}, "issuerPublicKeys"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_with_a_reason(name):
    values, named_in_error = WRONG[name]
    with pytest.raises(HelmError, match=re.escape(named_in_error)):
        render(values)


def test_the_check_of_certificates_finds_faults():
    [certificate, *_] = of_kind(render(SECURED), "Certificate")
    schemas.check(certificate)
    certificate["spec"]["misspelt"] = 1
    with pytest.raises(Exception, match="misspelt"):
        schemas.check(certificate)
