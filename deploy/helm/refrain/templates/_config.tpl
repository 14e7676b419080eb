{{- /*
The configuration of a role, as JSON. The argument is a dict with root, role and maybe pool, shard or isForTrainer. A file
has only the sections that its role reads, so that a change restarts only the pods that it is for.
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
{{- /* The names by which operators and a trainer call, since calls to other names are refused. */}}
{{- $ownService := printf "%s-%s" $fullname (ternary "trainer" "gateway-operations" (default false .isForTrainer)) -}}
{{- $ownNames := fromJsonArray (include "refrain.serviceNames" (dict "root" .root "service" $ownService)) -}}
{{- $ownNames = append $ownNames (printf "%s.%s.svc.cluster.local" $ownService .root.Release.Namespace) -}}
{{- $hosts := concat $ownNames ($values.tls.operations.dnsNames | default list) ($given.allowed_hosts | default list) -}}
{{- $_ := set $gateway "allowed_hosts" (uniq $hosts) -}}
{{- if .isForTrainer -}}
{{- /* Its API is for nobody. The limits of the tenant are for this gateway alone. */}}
{{- $_ := set $gateway "listen" "127.0.0.1:8080" -}}
{{- $_ := set $gateway "trainer" (dict "listen" "0.0.0.0:8091" "allows_other_machines" true) -}}
{{- else -}}
{{- $_ := unset $given "trainer" -}}
{{- end -}}
{{- if not (or $given.limit_share $given.limits_redis $values.gateway.autoscaling.enabled (eq .role "up") .isForTrainer) -}}
{{- $_ := set $gateway "limit_share" (divf 1.0 (float64 $values.gateway.replicas)) -}}
{{- end -}}
{{- if $values.redis.passwordSecret.name -}}
{{- $_ := set $gateway "limits_redis" (dict "password_file" "/etc/refrain/redis/password") -}}
{{- end -}}
{{- $urls := fromJson (include "refrain.storeUrls" .root) -}}
{{- $urls = merge $urls (fromJson (include "refrain.schedulerUrls" .root)) -}}
{{- $scheme := include "refrain.meshScheme" .root -}}
{{- $mesh := fromJson (include "refrain.meshSection" (dict "root" .root "role" .role)) -}}
{{- range $key, $name := dict "http" "api" "operations_http" "operations" -}}
{{- if include "refrain.hasCertificate" (get $values.tls $name) -}}
{{- $folder := printf "/etc/refrain/%s-tls" $name -}}
{{- $_ := set $gateway $key (fromJson (include "refrain.listenerTls" (dict "folder" $folder))) -}}
{{- end -}}
{{- end -}}
{{- if and $values.credentials.forOperators $values.credentials.existingSecret -}}
{{- $_ := set $gateway "operator_credential_file" "/etc/refrain/credential/operator" -}}
{{- end -}}
{{- $http := dict -}}
{{- if $values.tls.mesh.enabled -}}
{{- $http = dict "http" (fromJson (include "refrain.listenerTls" (dict "folder" "/etc/refrain/mesh-tls" "isMesh" true))) -}}
{{- end -}}
{{- $store := merge (dict "listen" "0.0.0.0:8203" "data_dir" $data) $http -}}
{{- $parts := dict -}}
{{- if eq .role "gateway" -}}
{{- $parts = dict "gateway" $gateway "urls" $urls "mesh" $mesh -}}
{{- else if eq .role "scheduler" -}}
{{- $scheduler := merge (dict "listen" "0.0.0.0:8201") $http -}}
{{- if gt (int $values.scheduler.replicas) 1 -}}
{{- $_ := set $scheduler "standby" (dict "kubernetes_lease" (printf "%s-scheduler" $fullname)) -}}
{{- else -}}
{{- $_ := unset ($config.scheduler | default dict) "standby" -}}
{{- end -}}
{{- $parts = dict "scheduler" $scheduler "mesh" $mesh -}}
{{- else if eq .role "draft-store" -}}
{{- if include "refrain.hasFeed" .root -}}
{{- $peers := fromJsonArray (include "refrain.shardUrls" (dict "root" .root "shard" .shard)) -}}
{{- $feed := dict "peers" $peers "shards" (int $values.draftStore.shards) "shard" (int .shard) -}}
{{- if $values.nats.servers -}}{{- $_ := set $feed "servers" $values.nats.servers -}}{{- end -}}
{{- $_ := set $store "feed" $feed -}}
{{- else -}}
{{- $_ := unset ($config.draft_store | default dict) "feed" -}}
{{- end -}}
{{- $parts = dict "draft_store" $store "mesh" $mesh -}}
{{- else if eq .role "worker" -}}
{{- $worker := merge (dict "listen" "0.0.0.0:8202") $http -}}
{{- if .pool.sources -}}
{{- $enginesMax := int (include "refrain.enginesMax" .) -}}
{{- $adoption := dict "sources" .pool.sources "engines_max" $enginesMax "first_port" 8210 -}}
{{- if $config.worker.engine.kind -}}{{- $_ := set $adoption "finds_kind" false -}}{{- end -}}
{{- $_ := set $worker "adoption" $adoption -}}
{{- else -}}
{{- $_ := set $urls "engine" (include "refrain.engineUrl" (dict "pool" .pool "scheme" $scheme)) -}}
{{- end -}}
{{- $parts = dict "worker" $worker "urls" $urls "mesh" $mesh -}}
{{- if .pool.referenceEngine -}}
{{- $engine := merge (dict "listen" "0.0.0.0:8204") (deepCopy $http) -}}
{{- if include "refrain.hasEnginePeers" (dict "root" .root "pool" .pool) -}}
{{- $peer := printf "dns+%s://%s-worker-%s-engines:8204" $scheme $fullname .pool.name -}}
{{- $_ := set $engine "kv_pool" (dict "peers" (list $peer)) -}}
{{- end -}}
{{- $_ := set $parts "engine" $engine -}}
{{- end -}}
{{- else -}}
{{- $_ := unset $store "listen" -}}
{{- $_ := unset ($config.draft_store | default dict) "feed" -}}
{{- $parts = dict "gateway" $gateway "draft_store" $store "worker" dict "engine" dict "scheduler" dict "urls" dict "mesh" $mesh -}}
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
{{- if .pool.referenceEngine -}}
{{ .scheme }}://127.0.0.1:8204
{{- else if .pool.sidecar -}}
http://127.0.0.1:{{ (first .pool.sidecar.ports).containerPort }}
{{- else -}}
{{ .pool.url }}
{{- end -}}
{{- end }}

{{- /* Whether the engines of a pool take KV blocks from each other: with a pool of KV blocks, and several replicas. */}}
{{- define "refrain.hasEnginePeers" -}}
{{- $pool := fromJson (include "refrain.pool" .) -}}
{{- $config := mergeOverwrite (deepCopy (.root.Values.config | default dict)) (deepCopy ($pool.config | default dict)) -}}
{{- $hasPool := gt (int64 (dig "engine" "kv_pool" "memory_bytes_max" 0 $config)) 0 -}}
{{- if and $pool.referenceEngine $hasPool (or $pool.autoscaling.enabled (gt (int $pool.replicas) 1)) -}}true{{- end -}}
{{- end }}

{{- /* The most engines of a pool with sources. Each has a worker with a port, from 8210 on. */}}
{{- define "refrain.enginesMax" -}}
{{- (fromJson (include "refrain.pool" .)).enginesMax -}}
{{- end }}

{{- /* A pool with the defaults of all pools. */}}
{{- define "refrain.pool" -}}
{{- toJson (mergeOverwrite (deepCopy .root.Values.workerDefaults) .pool) -}}
{{- end }}
