{{- /* Whether a listener for callers from outside has a certificate. The argument is tls.api or tls.operations. */}}
{{- define "refrain.hasCertificate" -}}
{{- if or .existingSecret .issuer.name -}}true{{- end -}}
{{- end }}

{{- /* The Secret with a certificate. The argument is a dict with root, name and maybe existing. */}}
{{- define "refrain.certificateSecret" -}}
{{- .existing | default (printf "%s-%s-tls" (include "refrain.fullname" .root) .name) -}}
{{- end }}

{{- /* The Secret by which a component shows the others of the mesh who it is. */}}
{{- define "refrain.meshSecret" -}}
{{- $component := .identity | default .component -}}
{{- $key := ternary "draftStore" $component (eq $component "draft-store") -}}
{{- include "refrain.certificateSecret" (dict
  "root" .root "name" (printf "%s-mesh" $component) "existing" (get .root.Values.tls.mesh.existingSecrets $key)) -}}
{{- end }}

{{- define "refrain.meshScheme" -}}
{{- ternary "https" "http" .Values.tls.mesh.enabled -}}
{{- end }}

{{- /* The keys of a listener for a certificate in a folder. */}}
{{- define "refrain.listenerTls" -}}
{{- $tls := dict "certificate" (printf "%s/tls.crt" .folder) "key" (printf "%s/tls.key" .folder) -}}
{{- if .isMesh -}}{{- $_ := set $tls "client_ca" (printf "%s/ca.crt" .folder) -}}{{- end -}}
{{- toJson (dict "tls" $tls) -}}
{{- end }}

{{- /*
The section `mesh` of a role: the secret or the credential, the key that signs namespaces, and certificates. The key that
verifies namespaces is a variable.
*/}}
{{- define "refrain.meshSection" -}}
{{- $values := .root.Values -}}
{{- $mesh := dict -}}
{{- if or (not $values.credentials.existingSecret) $values.credentials.acceptsMeshSecret -}}
{{- $_ := set $mesh "secret_file" "/etc/refrain/keys/mesh-secret" -}}
{{- end -}}
{{- with $values.credentials.issuerPublicKeys -}}{{- $_ := set $mesh "issuer_public_keys" . -}}{{- end -}}
{{- if $values.credentials.existingSecret -}}
{{- $_ := set $mesh "credential_file" "/etc/refrain/credential/credential" -}}
{{- end -}}
{{- if has .role (list "gateway" "up") -}}
{{- $_ := set $mesh "namespace_signing_key_file" "/etc/refrain/keys/namespace-signing-key" -}}
{{- end -}}
{{- if $values.tls.mesh.enabled -}}
{{- range $key, $file := dict "ca" "ca.crt" "certificate" "tls.crt" "key" "tls.key" -}}
{{- $_ := set $mesh $key (printf "/etc/refrain/mesh-tls/%s" $file) -}}
{{- end -}}
{{- /* Workers are called by the addresses of their pods, which nobody knows before. */}}
{{- $_ := set $mesh "address_name" (printf "%s-worker" (include "refrain.fullname" .root)) -}}
{{- end -}}
{{- toJson $mesh -}}
{{- end }}

{{- /*
How a probe asks a listener. The argument is a dict with role, config, configKey, port and alive. A node presents no
certificate, so a listener that wants one is asked by the program inside the container.
*/}}
{{- define "refrain.probe" -}}
{{- $section := get (dict "up" "gateway" "draft-store" "draft_store" "reference-engine" "engine") .role | default .role -}}
{{- $http := ternary "operations_http" "http" (eq $section "gateway") -}}
{{- $tls := dig $section $http "tls" dict .config -}}
{{- if $tls.client_ca -}}
exec:
  command:
    - /usr/local/bin/refrain
    - health
    - --role={{ .role }}
    - --config=/etc/refrain/config/{{ .configKey }}
    {{- if .alive }}
    - --alive
    {{- end }}
{{- else -}}
httpGet: {path: {{ ternary "/healthz" "/readyz" .alive }}, port: {{ .port }}{{ if $tls }}, scheme: HTTPS{{ end }}}
{{- end -}}
{{- end }}

{{- /* What no schema can check about certificates and credentials. */}}
{{- define "refrain.checkTls" -}}
{{- $values := .Values -}}
{{- with $values.tls.mesh -}}
{{- if and .enabled (not .issuer.name) -}}
{{- range $component := list "gateway" "scheduler" "draftStore" "worker" -}}
{{- if not (get $values.tls.mesh.existingSecrets $component) -}}
{{- fail (printf "tls.mesh: set issuer.name, or existingSecrets.%s" $component) -}}
{{- end -}}
{{- end -}}
{{- if and (or $values.metrics.podMonitor.enabled $values.metrics.serviceMonitor.enabled) (not .existingSecrets.metrics) -}}
{{- fail "tls.mesh: Prometheus needs a certificate; set issuer.name, or existingSecrets.metrics" -}}
{{- end -}}
{{- end -}}
{{- if and (eq $values.mode "single") .enabled -}}
{{- fail "tls.mesh.enabled: in the mode \"single\" no process calls another one" -}}
{{- end -}}
{{- end -}}
{{- if and (eq $values.mode "single") $values.credentials.existingSecret -}}
{{- fail "credentials.existingSecret: in the mode \"single\" no process calls another one" -}}
{{- end -}}
{{- if and $values.credentials.existingSecret (not $values.credentials.issuerPublicKeys) -}}
{{- fail "credentials.issuerPublicKeys: the keys that verify the credentials; `refrain mesh issuer` prints them" -}}
{{- end -}}
{{- $config := $values.config | default dict -}}
{{- range $path, $isSet := dict
  "gateway.http" (include "refrain.hasCertificate" $values.tls.api)
  "gateway.operations_http" (include "refrain.hasCertificate" $values.tls.operations)
  "scheduler.http" $values.tls.mesh.enabled "draft_store.http" $values.tls.mesh.enabled
  "worker.http" $values.tls.mesh.enabled "engine.http" $values.tls.mesh.enabled -}}
{{- $keys := splitList "." $path -}}
{{- if and $isSet (dig (first $keys) (last $keys) "tls" "" $config) -}}
{{- fail (printf "config.%s.tls: the chart sets it, because of the value tls" $path) -}}
{{- end -}}
{{- end -}}
{{- end }}
