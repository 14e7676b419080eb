{{- /*
The configuration of a role, as JSON. The argument is a dict with root, role and maybe pool. A file has only the sections
that its role reads, so that a change restarts only the pods that it is for.
*/}}
{{- define "refrain.config" -}}
{{- $values := .root.Values -}}
{{- $fullname := include "refrain.fullname" .root -}}
{{- $config := deepCopy ($values.config | default dict) -}}
{{- with .pool -}}
{{- $engine := deepCopy (.engine | default dict) -}}
{{- if .referenceEngine -}}{{- $engine = merge $engine (dict "kind" "refrain" "files" "builtin:refrain-tiny") -}}{{- end -}}
{{- $config = mergeOverwrite $config (dict "worker" (dict "engine" $engine)) (deepCopy (.config | default dict)) -}}
{{- end -}}
{{- $data := "/var/lib/refrain" -}}
{{- $gateway := dict "listen" "0.0.0.0:8080" "operations_listen" "0.0.0.0:8090" "usage_dir" (printf "%s/usage" $data) -}}
{{- if eq $values.tenants.source "secret" -}}
{{- $_ := set $gateway "tenants_file" "/etc/refrain/tenants/tenants.toml" -}}
{{- else if eq $values.tenants.source "store" -}}
{{- $_ := set $gateway "tenants_in_store" true -}}
{{- $_ := set $gateway "tenants_cache_file" (printf "%s/tenants.json" $data) -}}
{{- end -}}
{{- $given := $config.gateway | default dict -}}
{{- if not (or $given.limit_share $given.limits_redis $values.gateway.autoscaling.enabled (eq .role "up")) -}}
{{- $_ := set $gateway "limit_share" (divf 1.0 (float64 $values.gateway.replicas)) -}}
{{- end -}}
{{- if $values.redis.passwordSecret.name -}}
{{- $_ := set $gateway "limits_redis" (dict "password_file" "/etc/refrain/redis/password") -}}
{{- end -}}
{{- $urls := fromJson (include "refrain.storeUrls" .root) -}}
{{- $_ := set $urls "scheduler" (printf "http://%s-scheduler:8201" $fullname) -}}
{{- $mesh := dict "secret_file" "/etc/refrain/keys/mesh-secret" -}}
{{- $signer := dict "namespace_signing_key_file" "/etc/refrain/keys/namespace-signing-key" -}}
{{- $store := dict "listen" "0.0.0.0:8203" "data_dir" $data -}}
{{- $parts := dict -}}
{{- if eq .role "gateway" -}}
{{- $parts = dict "gateway" $gateway "urls" $urls "mesh" (merge $mesh $signer) -}}
{{- else if eq .role "scheduler" -}}
{{- $parts = dict "scheduler" (dict "listen" "0.0.0.0:8201") "mesh" $mesh -}}
{{- else if eq .role "draft-store" -}}
{{- if gt (int $values.draftStore.replicas) 1 -}}
{{- $feed := dict "peers" $urls.draft_stores -}}
{{- if $values.nats.servers -}}{{- $_ := set $feed "servers" $values.nats.servers -}}{{- end -}}
{{- $_ := set $store "feed" $feed -}}
{{- else -}}
{{- $_ := unset ($config.draft_store | default dict) "feed" -}}
{{- end -}}
{{- $parts = dict "draft_store" $store "mesh" $mesh -}}
{{- else if eq .role "worker" -}}
{{- $_ := set $urls "engine" (include "refrain.engineUrl" .pool) -}}
{{- $parts = dict "worker" (dict "listen" "0.0.0.0:8202") "urls" $urls "mesh" $mesh -}}
{{- if .pool.referenceEngine -}}{{- $_ := set $parts "engine" (dict "listen" "0.0.0.0:8204") -}}{{- end -}}
{{- else -}}
{{- $_ := unset $store "listen" -}}
{{- $_ := unset ($config.draft_store | default dict) "feed" -}}
{{- $parts = dict "gateway" $gateway "draft_store" $store "worker" dict "engine" dict "scheduler" dict "urls" dict "mesh" (merge $mesh $signer) -}}
{{- end -}}
{{- $sections := dict -}}
{{- range $key := list "telemetry" "drain_grace_ms" -}}
{{- if hasKey $config $key -}}{{- $_ := set $sections $key (get $config $key) -}}{{- end -}}
{{- end -}}
{{- range $section, $fixed := $parts -}}
{{- $_ := set $sections $section (mergeOverwrite (get $config $section | default dict) $fixed) -}}
{{- end -}}
{{- toPrettyJson $sections -}}
{{- end }}

{{- /* The engine of a pool: in the same pod, or elsewhere. */}}
{{- define "refrain.engineUrl" -}}
{{- if .referenceEngine -}}
http://127.0.0.1:8204
{{- else if .sidecar -}}
http://127.0.0.1:{{ (first .sidecar.ports).containerPort }}
{{- else -}}
{{ .url }}
{{- end -}}
{{- end }}

{{- /* A pool with the defaults of all pools. */}}
{{- define "refrain.pool" -}}
{{- toJson (mergeOverwrite (deepCopy .root.Values.workerDefaults) .pool) -}}
{{- end }}

{{- /* What no schema can check. */}}
{{- define "refrain.check" -}}
{{- $names := list -}}
{{- range .Values.workerPools -}}
{{- $engines := 0 -}}
{{- range list .url .sidecar .referenceEngine -}}{{- if . -}}{{- $engines = add1 $engines -}}{{- end -}}{{- end -}}
{{- if ne (int $engines) 1 -}}
{{- fail (printf "workerPools: the pool %q needs one engine: url, sidecar or referenceEngine" .name) -}}
{{- end -}}
{{- if has .name $names -}}{{- fail (printf "workerPools: two pools have the name %q" .name) -}}{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- if gt (int .Values.draftStore.replicas) 1 -}}
{{- if and (not .Values.nats.servers) (not .Values.nats.serversSecret.name) -}}
{{- fail "draftStore.replicas: several stores need NATS; set nats.servers or nats.serversSecret.name" -}}
{{- end -}}
{{- if eq .Values.tenants.source "store" -}}
{{- fail "tenants.source: replicas of a draft store keep no tenants; use \"secret\"" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) -}}
{{- fail "ingress.host: missing" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: name the Gateway that the route belongs to" -}}
{{- end -}}
{{- end }}
