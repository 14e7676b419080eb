"""Settings of pods: each role takes all of them, and they go over those of all pods."""

import pytest

import schemas
import secured
from examples import DOWNLOAD, MODELS
from rendered import lint_errors, merged, named, pod_of_helm_test, render, workloads

# The keys of the values that have settings, and the component of each.
ROLES = {
    "gateway": "gateway",
    "trainer": "trainer",
    "scheduler": "scheduler",
    "draftStore": "draft-store",
    "workerDefaults": "worker",
    "single": "single",
}
LABELS = {"matchLabels": {"a": "b"}}
CONTAINER = {"name": "mine", "image": "mine:1", "resources": {}}
SPREAD = {"topologyKey": "rack", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
# What each setting is in the pod, or a part of it.
SETTINGS = {
    "imagePullSecrets": ["mine"],
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [{**SPREAD, "labelSelector": LABELS}],
    "priorityClassName": "high",
    "initContainers": [CONTAINER],
    "extraContainers": [CONTAINER],
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "mine", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "mine", "mountPath": "/mine"}],
    "podLabels": {"team": "search", "app.kubernetes.io/component": "other"},
    "podAnnotations": {"b": "c"},
    "serviceAccountAnnotations": {"identity": "mine"},
}


def of_role(role, settings):
    """The pods of a role with settings, and all objects."""
    values = merged({"single": {"mode": "single"}, "trainer": secured.TRAINER}.get(role, {}), settings)
    assert lint_errors(values) == []
    objects = render(values)
    for object in objects:
        if object["kind"] != "Secret":
            schemas.check(object)
    [found] = [each for each in workloads(objects) if each.component == ROLES[role]]
    return found, objects


def check_settings(role, found, objects):
    pod, main = found.pod, found.main
    assert pod["imagePullSecrets"] == [{"name": "mine"}]
    for key in ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "priorityClassName"):
        assert pod[key] == SETTINGS[key], key
    assert pod["initContainers"][0] == CONTAINER and pod["containers"][1:] == [CONTAINER]
    assert SETTINGS["extraEnv"][0] in main["env"]
    assert SETTINGS["extraVolumes"][0] in pod["volumes"]
    assert SETTINGS["extraVolumeMounts"][0] in main["volumeMounts"]
    # The labels by which the chart finds its pods stay as they are.
    assert found.labels["team"] == "search" and found.component == ROLES[role]
    assert found.template["metadata"]["annotations"]["b"] == "c"
    account = named(objects, "ServiceAccount", pod["serviceAccountName"])
    assert account["metadata"]["annotations"] == SETTINGS["serviceAccountAnnotations"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("owner", ["role", "podDefaults"])
def test_each_role_takes_all_settings(role, owner):
    check_settings(role, *of_role(role, {role if owner == "role" else owner: SETTINGS}))


def test_settings_of_a_pool_go_over_those_of_its_role_and_of_all_pods():
    pool = {"name": "tiny", "referenceEngine": True, "tolerations": [], "podLabels": {"c": "pool"}}
    values = {
        "podDefaults": {"nodeSelector": {"a": "all"}, "podLabels": {"a": "all", "b": "all"}},
        "workerDefaults": {"tolerations": [{"key": "gpu"}], "podLabels": {"b": "role", "c": "role"}},
        "workerPools": [pool],
    }
    found, _ = of_role("workerDefaults", values)
    assert found.pod["nodeSelector"] == {"a": "all"}
    assert "tolerations" not in found.pod
    assert [found.labels[key] for key in "abc"] == ["all", "role", "pool"]


def test_engines_beside_a_worker_start_after_its_own_containers():
    found, _ = of_role("workerDefaults", {"workerDefaults": {"initContainers": [CONTAINER]}})
    assert [container["name"] for container in found.pod["initContainers"]] == ["mine", "engine"]


def test_models_are_downloaded_by_those_who_read_them():
    objects = render(merged(MODELS, merged(secured.TRAINER, {"models": {"download": DOWNLOAD}})))
    found = {}
    for each in workloads(objects):
        schemas.check(each.object)
        for container in each.pod.get("initContainers", []):
            if container["name"] == "download":
                assert container["image"] == DOWNLOAD["image"] and container["command"] == DOWNLOAD["command"]
                assert DOWNLOAD["env"][0] in container["env"]
                # It writes what the others read.
                assert container["volumeMounts"] == [{"name": "models", "mountPath": "/models"}]
                given = {entry["name"]: entry["value"] for entry in container["env"]}
                assert given["HOME"] == "/models"
                found[each.component] = given["COMPONENT"], given["POOL"]
        for mount in each.main["volumeMounts"]:
            assert mount["name"] != "models" or mount["readOnly"]
    assert found == {"gateway": ("gateway", ""), "trainer": ("trainer", ""), "worker": ("worker", "tiny")}
    # Nothing is downloaded by default.
    names = [c["name"] for each in workloads(render(MODELS)) for c in each.pod.get("initContainers", [])]
    assert "download" not in names


def test_a_constraint_of_the_spread_is_for_the_pods_of_its_role():
    found, _ = of_role("gateway", {"gateway": {"topologySpreadConstraints": [SPREAD]}})
    [constraint] = found.pod["topologySpreadConstraints"]
    assert constraint["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"


def test_further_registries_are_added_to_that_of_the_image():
    values = {"image": {"pullSecrets": ["a"]}, "gateway": {"imagePullSecrets": ["b", "a"]}}
    found, _ = of_role("gateway", values)
    assert found.pod["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


def test_the_pod_of_helm_test_has_the_settings_of_all_pods():
    values = {"podDefaults": SETTINGS, "test": {"priorityClassName": "low"}}
    assert lint_errors(values) == []
    found = pod_of_helm_test(render(values))
    assert found.pod["nodeSelector"] == SETTINGS["nodeSelector"]
    assert found.pod["priorityClassName"] == "low"
    # It stays as small as it is.
    assert len(found.pod["containers"]) == 1 and "volumes" not in found.pod
    assert found.labels["team"] == "search" and found.component == "test"
