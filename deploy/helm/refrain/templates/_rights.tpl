{{- /*
What the sources of a pool may read, as JSON: rules by namespaces. Only sources that ask the API of the cluster need
rights. The argument is a dict with root and pool.
*/}}
{{- define "refrain.sourceRights" -}}
{{- $rights := dict -}}
{{- range .pool.sources -}}
{{- if hasPrefix "kubernetes:" . -}}
{{- $place := trimPrefix "kubernetes://" . | regexFind "^[^?]*" -}}
{{- $namespace := first (splitList "/" $place) | default $.root.Release.Namespace -}}
{{- $pods := dict "apiGroups" (list "") "resources" (list "pods") "verbs" (list "list") -}}
{{- $wanted := list $pods -}}
{{- if contains "/services/" $place -}}
{{- $wanted = list (dict "apiGroups" (list "discovery.k8s.io") "resources" (list "endpointslices") "verbs" (list "list")) -}}
{{- else if contains "/inferencepools/" $place -}}
{{- $wanted = list $pods (dict "apiGroups" (list "inference.networking.k8s.io") "resources" (list "inferencepools")
  "resourceNames" (list (base $place)) "verbs" (list "get")) -}}
{{- end -}}
{{- $_ := set $rights $namespace (concat (get $rights $namespace | default list) $wanted | uniq) -}}
{{- end -}}
{{- end -}}
{{- toJson $rights -}}
{{- end }}

{{- /* What no schema can check about sources: their spellings, and that no two processes drive the same engines. */}}
{{- define "refrain.checkSources" -}}
{{- $name := "[a-z0-9]([-a-z0-9.]*[a-z0-9])?" -}}
{{- $port := "port=[1-9][0-9]{0,4}" -}}
{{- $places := printf "services/%s\\?%s|pods\\?%s&selector=[^&]+|inferencepools/%s" $name $port $port $name -}}
{{- $known := dict -}}
{{- range $pool := .Values.workerPools -}}
{{- range .sources -}}
{{- if and (hasPrefix "kubernetes:" .) (not (regexMatch (printf "^kubernetes://(%s)?/(%s)$" $name $places) .)) -}}
{{- $reason := printf "workerPools: the source %q of the pool %q names no place in a cluster" . $pool.name -}}
{{- fail (printf "%s; write kubernetes://NAMESPACE/services/NAME?port=8000, kubernetes://NAMESPACE/%s or %s" $reason
  "pods?port=8000&selector=app=vllm" "kubernetes://NAMESPACE/inferencepools/NAME") -}}
{{- end -}}
{{- $place := . | replace (printf "kubernetes://%s/" $.Release.Namespace) "kubernetes:///" -}}
{{- if hasKey $known $place -}}
{{- fail (printf "workerPools: two workers would drive the engines of %q, so name it once" .) -}}
{{- end -}}
{{- $_ := set $known $place true -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /*
A Role and its RoleBinding in a namespace. The argument is a dict with root, component and maybe pool, and with name,
which is that of the account as well, namespace and rules. In a namespace of others, releases of the same name meet.
*/}}
{{- define "refrain.role" -}}
{{- $own := .root.Release.Namespace -}}
{{- $name := ternary .name (printf "%s-%s" $own .name) (eq .namespace $own) -}}
{{- range $kind := list "Role" "RoleBinding" }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}
metadata:
  name: {{ $name }}
  namespace: {{ $.namespace }}
  labels: {{- include "refrain.labels" $ | nindent 4 }}
{{- if eq $kind "Role" }}
rules: {{- toYaml $.rules | nindent 2 }}
{{- else }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $name }}}
subjects:
  - {kind: ServiceAccount, name: {{ $.name }}, namespace: {{ $own }}}
{{- end }}
{{- end }}
{{- end }}
