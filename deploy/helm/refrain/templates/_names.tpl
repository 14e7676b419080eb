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

{{- /* Labels by which pods of a component are found. The argument is a dict with root, component and maybe pool. */}}
{{- define "refrain.selector" -}}
app.kubernetes.io/name: {{ include "refrain.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
refrain/pool: {{ . }}
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
{{- $store := printf "%s-draft-store" (include "refrain.fullname" .) -}}
{{- if gt (int .Values.draftStore.replicas) 1 -}}
{{- $urls := list -}}
{{- range $number := until (int .Values.draftStore.replicas) -}}
{{- $urls = append $urls (printf "http://%s-%d.%s-pods:8203" $store $number $store) -}}
{{- end -}}
{{- toJson (dict "draft_stores" $urls) -}}
{{- else -}}
{{- toJson (dict "draft_store" (printf "http://%s:8203" $store)) -}}
{{- end -}}
{{- end }}

{{- /* Seconds that the drain of a gateway takes at most, rounded up. */}}
{{- define "refrain.drainSeconds" -}}
{{- div (add (int64 (.Values.config.drain_grace_ms | default 30000)) 999) 1000 -}}
{{- end }}
