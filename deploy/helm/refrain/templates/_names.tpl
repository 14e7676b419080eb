{{- define "refrain.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- /* The start of all names. Pools and roles follow it, so it is short. */}}
{{- define "refrain.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "refrain.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "refrain.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- /* Labels by which pods of a component are found. The argument is a dict with root, component and maybe pool or shard. */}}
{{- define "refrain.selector" -}}
app.kubernetes.io/name: {{ include "refrain.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
refrain/pool: {{ . }}
{{- end }}
{{- with .shard }}
refrain/shard: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "refrain.labels" -}}
{{ include "refrain.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "refrain.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "refrain.keysSecret" -}}
{{- .Values.keys.existingSecret | default (printf "%s-keys" (include "refrain.fullname" .)) -}}
{{- end }}

{{- define "refrain.tenantsSecret" -}}
{{- .Values.tenants.existingSecret | default (printf "%s-tenants" (include "refrain.fullname" .)) -}}
{{- end }}

{{- /* Where callers of the draft stores find them. */}}
{{- define "refrain.storeUrls" -}}
{{- if include "refrain.hasFeed" . -}}
{{- $urls := list -}}
{{- range $shard := until (int .Values.draftStore.shards) -}}
{{- $urls = concat $urls (fromJsonArray (include "refrain.shardUrls" (dict "root" $ "shard" $shard))) -}}
{{- end -}}
{{- toJson (dict "draft_stores" $urls) -}}
{{- else -}}
{{- $store := printf "%s-draft-store" (include "refrain.fullname" .) -}}
{{- toJson (dict "draft_store" (printf "%s://%s:8203" (include "refrain.meshScheme" .) $store)) -}}
{{- end -}}
{{- end }}

{{- /* Whether there are several draft stores: replicas of each other, or shards. */}}
{{- define "refrain.hasFeed" -}}
{{- if or (gt (int .Values.draftStore.replicas) 1) (gt (int .Values.draftStore.shards) 1) -}}true{{- end -}}
{{- end }}

{{- /* The StatefulSet of a shard. A single one has no number in its name. */}}
{{- define "refrain.storeName" -}}
{{- $store := printf "%s-draft-store" (include "refrain.fullname" .root) -}}
{{- if gt (int .root.Values.draftStore.shards) 1 -}}{{- $store }}-shard-{{ .shard -}}{{- else -}}{{- $store -}}{{- end -}}
{{- end }}

{{- /* The hosts of the replicas of a shard. Their pods have names. */}}
{{- define "refrain.shardHosts" -}}
{{- $name := include "refrain.storeName" . -}}
{{- $hosts := list -}}
{{- range $number := until (int .root.Values.draftStore.replicas) -}}
{{- $hosts = append $hosts (printf "%s-%d.%s-pods" $name $number $name) -}}
{{- end -}}
{{- toJson $hosts -}}
{{- end }}

{{- define "refrain.shardUrls" -}}
{{- $urls := list -}}
{{- range fromJsonArray (include "refrain.shardHosts" .) -}}
{{- $urls = append $urls (printf "%s://%s:8203" (include "refrain.meshScheme" $.root) .) -}}
{{- end -}}
{{- toJson $urls -}}
{{- end }}

{{- /* The hosts of all replicas of all shards. */}}
{{- define "refrain.storeHosts" -}}
{{- $hosts := list -}}
{{- range $shard := until (int .Values.draftStore.shards) -}}
{{- $hosts = concat $hosts (fromJsonArray (include "refrain.shardHosts" (dict "root" $ "shard" $shard))) -}}
{{- end -}}
{{- toJson $hosts -}}
{{- end }}

{{- /* The hosts of the schedulers. Several ones have names, since callers have to find the one that leads. */}}
{{- define "refrain.schedulerHosts" -}}
{{- $name := printf "%s-scheduler" (include "refrain.fullname" .) -}}
{{- $hosts := list -}}
{{- range $number := until (int .Values.scheduler.replicas) -}}
{{- $hosts = append $hosts (printf "%s-%d.%s-pods" $name $number $name) -}}
{{- end -}}
{{- toJson (ternary $hosts (list $name) (gt (len $hosts) 1)) -}}
{{- end }}

{{- define "refrain.schedulerUrls" -}}
{{- $urls := list -}}
{{- range fromJsonArray (include "refrain.schedulerHosts" .) -}}
{{- $urls = append $urls (printf "%s://%s:8201" (include "refrain.meshScheme" $) .) -}}
{{- end -}}
{{- toJson (ternary (dict "schedulers" $urls) (dict "scheduler" (first $urls)) (gt (len $urls) 1)) -}}
{{- end }}

{{- /* Seconds that the drain of a gateway takes at most, rounded up. */}}
{{- define "refrain.drainSeconds" -}}
{{- div (add (int64 (.Values.config.drain_grace_ms | default 30000)) 999) 1000 -}}
{{- end }}

{{- /* The names of a Service inside the cluster. */}}
{{- define "refrain.serviceNames" -}}
{{- $namespace := .root.Release.Namespace -}}
{{- toJson (list .service (printf "%s.%s" .service $namespace) (printf "%s.%s.svc" .service $namespace)) -}}
{{- end }}
