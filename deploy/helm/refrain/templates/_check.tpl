{{- /* What no schema can check. */}}
{{- define "refrain.check" -}}
{{- $config := .Values.config | default dict -}}
{{- $models := ($config.gateway | default dict).models -}}
{{- if not $models -}}
{{- fail "config.gateway.models: name at least one model, by its id and files" -}}
{{- end -}}
{{- with .Values.models -}}
{{- if and .download.image (not .volume) -}}
{{- fail "models.volume: models.download needs a volume for its files, such as emptyDir: {}" -}}
{{- end -}}
{{- if and .download.image (dig "persistentVolumeClaim" "readOnly" false .volume) -}}
{{- fail "models.volume: models.download has to write, so leave readOnly out; all others mount it to read only" -}}
{{- end -}}
{{- if and (not .download.image) (or .download.command .download.args) -}}
{{- fail "models.download.image: name the image that has the command" -}}
{{- end -}}
{{- end -}}
{{- $edges := ternary (list "single") (list "gateway") (eq .Values.mode "single") -}}
{{- if .Values.trainer.enabled -}}{{- $edges = append $edges "trainer" -}}{{- end -}}
{{- range $edge := $edges -}}
{{- range $models -}}
{{- include "refrain.checkFiles" (dict "root" $ "settings" (get $.Values $edge) "files" .files
  "key" (printf "config.gateway.models: the files of %q" .id) "owner" $edge) -}}
{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.workerPools -}}
{{- $engines := 0 -}}
{{- range list .url .sidecar .referenceEngine .sources -}}
{{- if . -}}{{- $engines = add1 $engines -}}{{- end -}}
{{- end -}}
{{- if ne (int $engines) 1 -}}
{{- fail (printf "workerPools: the pool %q needs one engine: url, sidecar, referenceEngine or sources" .name) -}}
{{- end -}}
{{- $pool := fromJson (include "refrain.pool" (dict "root" $ "pool" .)) -}}
{{- if and .url (or $pool.autoscaling.enabled (gt (int $pool.replicas) 1)) -}}
{{- $reason := printf "workerPools: the pool %q has one engine, at its url, so it takes one worker" .name -}}
{{- fail (printf "%s; set replicas: 1 without autoscaling, and make a pool for each further engine" $reason) -}}
{{- end -}}
{{- if and .sources (or $pool.autoscaling.enabled (gt (int $pool.replicas) 1)) -}}
{{- $reason := printf "workerPools: the pool %q has one process, which drives all engines of its sources" .name -}}
{{- fail (printf "%s; set replicas: 1 without autoscaling, and enginesMax for more engines" $reason) -}}
{{- end -}}
{{- $hasHome := false -}}
{{- range (.sidecar | default dict).env -}}{{- if eq .name "HOME" -}}{{- $hasHome = true -}}{{- end -}}{{- end -}}
{{- if and .sidecar (not $hasHome) -}}
{{- $reason := printf "workerPools: the sidecar of the pool %q has no HOME, and its user has no home" .name -}}
{{- fail (printf "%s; add {name: HOME, value: /tmp} to sidecar.env, and mount a volume there to write" $reason) -}}
{{- end -}}
{{- if eq $.Values.mode "mesh" -}}
{{- $given := dig "worker" "engine" dict ($pool.config | default dict) -}}
{{- $ofPool := mergeOverwrite (deepCopy $config) (deepCopy ($pool.config | default dict)) -}}
{{- $adoption := dig "worker" "adoption" dict $ofPool -}}
{{- if or $adoption.engines_max $adoption.sources -}}
{{- fail "config.worker.adoption: set sources and enginesMax of a pool in place of these keys" -}}
{{- end -}}
{{- $engine := mergeOverwrite (deepCopy ($pool.engine | default dict)) $given -}}
{{- include "refrain.checkFiles" (dict "root" $ "settings" $pool "files" $engine.files
  "key" (printf "workerPools: the engine.files of the pool %q" .name) "owner" "the pool") -}}
{{- $isOffered := empty $engine.model -}}
{{- range $models -}}{{- if eq .id $engine.model -}}{{- $isOffered = true -}}{{- end -}}{{- end -}}
{{- if not $isOffered -}}
{{- $reason := printf "workerPools: no gateway offers the model %q of the pool %q" $engine.model .name -}}
{{- fail (printf "%s; add its id and files to config.gateway.models" $reason) -}}
{{- end -}}
{{- end -}}
{{- if has .name $names -}}{{- fail (printf "workerPools: two pools have the name %q" .name) -}}{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- if .Values.credentials.existingSecret -}}
{{- range $one := $names -}}{{- range $other := $names -}}
{{- if hasPrefix (printf "%s-" $one) $other -}}
{{- fail (printf "workerPools: the credential of the pool %q would be good for %q; rename one of them" $one $other) -}}
{{- end -}}
{{- end -}}{{- end -}}
{{- end -}}
{{- include "refrain.checkSources" . -}}
{{- include "refrain.checkTls" . -}}
{{- if include "refrain.hasFeed" . -}}
{{- if and (not .Values.nats.servers) (not .Values.nats.serversSecret.name) -}}
{{- fail "draftStore: several stores need NATS; set nats.servers or nats.serversSecret.name" -}}
{{- end -}}
{{- if eq .Values.tenants.source "store" -}}
{{- fail "tenants.source: replicas of a draft store keep no tenants; use \"secret\"" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.metrics.podMonitor.enabled .Values.metrics.serviceMonitor.enabled -}}
{{- fail "metrics.serviceMonitor: with metrics.podMonitor each pod would be asked twice; enable one of them" -}}
{{- end -}}
{{- $trainer := dig "gateway" "trainer" dict $config -}}
{{- if .Values.trainer.enabled -}}
{{- if ne .Values.mode "mesh" -}}
{{- fail "trainer.enabled: a trainer needs the mode \"mesh\"" -}}
{{- end -}}
{{- if not $trainer.tenant -}}
{{- fail "config.gateway.trainer.tenant: name the tenant that the rollouts belong to" -}}
{{- end -}}
{{- if and .Values.networkPolicies.enabled (not .Values.networkPolicies.trainers) -}}
{{- fail "networkPolicies.trainers: name the pods of the trainer, since it needs no key" -}}
{{- end -}}
{{- else if $trainer -}}
{{- fail "config.gateway.trainer: set trainer.enabled as well" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) -}}
{{- fail "ingress.host: missing" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: name the Gateway that the route belongs to" -}}
{{- end -}}
{{- end }}

{{- /*
Refuses files of a model that no volume of a pod holds. The argument is a dict with root, files, key, which is the start
of the sentence, the settings of the pod, and owner, which is where its volumes are set.
*/}}
{{- define "refrain.checkFiles" -}}
{{- $folders := list -}}
{{- with .root.Values.models -}}{{- if .volume -}}{{- $folders = append $folders .mountPath -}}{{- end -}}{{- end -}}
{{- range (fromJson (include "refrain.settings" .)).extraVolumeMounts -}}{{- $folders = append $folders .mountPath -}}{{- end -}}
{{- $isThere := or (not .files) (hasPrefix "builtin:" (toString .files)) -}}
{{- range $folders -}}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" .)) (printf "%s/" $.files) -}}{{- $isThere = true -}}{{- end -}}
{{- end -}}
{{- if not $isThere -}}
{{- $remedy := printf "set models.volume, or extraVolumes and extraVolumeMounts of %s" .owner -}}
{{- fail (printf "%s are in no volume: %q; %s" .key .files $remedy) -}}
{{- end -}}
{{- end }}
